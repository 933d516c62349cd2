"""Chats -> the text that the engine tokenises: which template, which variables, and how far the text is certain.

`Renderer` answers for models whose engine renders through Jinja. The others (Harmony, Mistral's own format and their
like) have `why_elsewhere` set by `model_files`, and only a replica can say what their prompts become.

Facts about vLLM are from 0.33: arguments in `entrypoints/openai/chat_completion/protocol.py`, template choice and
developer messages in `renderers/hf.py`; the end of `continue_final_message` is Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from jinja2 import TemplateError
from msgspec import Struct

from kvroute.adapters.conversation import (
    CannotRender,
    Message,
    conversation_of,
    has_media,
    tools_of,
    without_developer,
)
from kvroute.adapters.template import ChatTemplate
from kvroute.adapters.turnwise import TurnTemplate, turns_of
from kvroute.kv.prompt import ChatPrompt

P = ParamSpec("P")
T = TypeVar("T")

MEDIA_MARK = "\ue000kvroute:media\ue001"  # private-use characters: no client has a reason to send them
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # Hugging Face's: a template that shows it shows the same here
UNSET = (None, "auto")  # values that the engine treats as not given


class Rendered(Struct, frozen=True):
    """A chat as text."""

    text: str
    is_whole: bool = True  # False: ends before the first media item


class Opening:
    """What chats share that differ in their messages only, for a template that renders turn by turn."""

    def __init__(self, template: ChatTemplate, turns: TurnTemplate, variables: dict[str, Any]) -> None:
        self.template = template
        self.turns = turns
        self.variables = variables
        self._later = turns.later(variables)

    def first(self, message: Message) -> tuple[str, int]:
        """Return the text up to the end of the first message, and what `later` counts on from."""
        return _tried(self.turns.first, self.variables, self._prepared([message])[0])

    def later(self, messages: list[Message], before: int) -> str:
        """Return the text of messages that are not the first; `before`: turns that the template counted so far."""
        return _tried(self._later.text, self._prepared(messages), before)

    def foot(self) -> str:
        """Return the text behind the messages."""
        return _tried(self.turns.foot, self.variables)

    def _prepared(self, messages: list[Message]) -> list[Message]:
        if not self.template.wants_parts and all(map(_is_plain, messages)):
            return messages
        prepared = conversation_of(messages, as_parts=self.template.wants_parts)
        if has_media(messages):
            raise CannotRender("media are rendered with the whole chat")
        if not self.template.knows_developers and any(message["role"] == "developer" for message in prepared):
            raise CannotRender("developer messages are merged with those of the whole chat")
        return prepared


def _is_plain(message: Any) -> bool:
    """Say whether a message is one that the engine passes to the template as it is: a role, then text."""
    return (
        type(message) is dict
        and [*message] == ["role", "content"]
        and message["role"] in ("user", "assistant")
        and type(message["content"]) is str
    )


class Renderer:
    """Renders chats with a model's own templates.

    Args:
        templates: template name -> Jinja source; one of them is "default".
        variables: what every template may read besides the chat: bos_token and its like.

    Raises:
        TemplateError: a source is not a template.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        self._turns = {name: turns_of(source) for name, source in templates.items()}
        self._variables = dict(variables)

    def opening_of(self, chat: ChatPrompt) -> Opening | None:
        """Return what chats with these fields share, whatever their messages; None where chats are rendered whole.

        Raises:
            CannotRender: as `render` does.
        """
        if chat.chat_template is not None or chat.continue_final_message:
            return None
        variables = _arguments_of(chat)
        name = self._template_name(variables.get("tools"))
        turns = self._turns[name]
        if turns is None or variables["continue_final_message"]:
            return None
        return Opening(self._templates[name], turns, {**self._variables, **variables})

    def render(self, chat: ChatPrompt) -> Rendered:
        """Return the text that the engine tokenises for a chat, up to the first media item.

        Raises:
            CannotRender: the text cannot be known here, or the template refuses the chat (so does the engine then).
        """
        if chat.chat_template is not None:
            raise CannotRender("the request brings its own template, which engines only take with a flag")
        variables = _arguments_of(chat)
        template = self._templates[self._template_name(variables.get("tools"))]
        if not has_media(chat.messages):
            return Rendered(self._text(template, chat, variables, None))
        marked = self._text(template, chat, variables, MEDIA_MARK)
        certain = marked.partition(MEDIA_MARK)[0]
        if template.wants_parts:  # the engine's own rendering is known here too: keep only what both agree on
            certain = _common_start(certain, self._text(template, chat, variables, None))
        return Rendered(certain, is_whole=False)

    def _template_name(self, tools: Any) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise CannotRender("the model has no chat template")
        return name

    def _text(self, template: ChatTemplate, chat: ChatPrompt, variables: dict[str, Any], mark: str | None) -> str:
        messages = conversation_of(chat.messages, as_parts=template.wants_parts, mark=mark)
        if not messages:
            raise CannotRender("a conversation needs a message")
        if not template.knows_developers and any(message["role"] == "developer" for message in messages):
            messages = without_developer(messages)
        final = _open_final(messages) if variables["continue_final_message"] else None
        text = _tried(template.render, {**self._variables, **variables, "messages": messages})
        return text if final is None else _cut_open(text, final)


def _tried(render: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return render(*args, **kwargs)
    except Exception as error:  # the border to a model's own program: it may run into anything
        raise CannotRender(f"the template refused the chat: {error}") from error


def _common_start(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _arguments_of(chat: ChatPrompt) -> dict[str, Any]:
    """Return the variables that the engine hands to the template: the body's fields over chat_template_kwargs."""
    asked = chat.chat_template_kwargs or {}
    if asked.get("tokenize"):
        raise CannotRender("chat_template_kwargs asks the template to tokenise, with options of its own")
    if "chat_template" in asked:
        raise CannotRender("chat_template_kwargs brings its own template, which engines only take with a flag")
    fields: dict[str, Any] = {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "documents": chat.documents,
        "reasoning_effort": chat.reasoning_effort,
    }
    if chat.reasoning_effort is not None and "enable_thinking" not in asked:
        fields["enable_thinking"] = chat.reasoning_effort != "none"
    given = {name: value for name, value in [*asked.items(), *fields.items()] if value not in UNSET}
    merged = {"tools": tools_of(chat.tools), "documents": None, **given}
    if merged["continue_final_message"] and merged["add_generation_prompt"]:
        raise CannotRender("continue_final_message and add_generation_prompt exclude each other")
    return merged


def _open_final(messages: list[Message]) -> str:
    """Put the mark at the end of the final message, in place; return the message's own text."""
    message = dict(messages[-1])
    content = message["content"]
    if isinstance(content, str):
        final, message["content"] = content, content + CONTINUE_MARK
    else:
        parts = [dict(part) for part in content]
        part = next((part for part in reversed(parts) if "text" in part), None)
        if part is None:
            raise CannotRender("the final message has no text to continue")
        final, part["text"], message["content"] = part["text"], part["text"] + CONTINUE_MARK, parts
    messages[-1] = message
    return str(final)


def _cut_open(text: str, final: str) -> str:
    """Return the text up to where the final message is left open."""
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise CannotRender("the template drops the final message, so it cannot be continued")
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()


__all__ = ["CannotRender", "Rendered", "Renderer", "TemplateError"]
