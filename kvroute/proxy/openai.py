"""What routing needs of a request body, and the few bodies that the router writes itself. OpenAI's shapes.

A body is decoded once, for the fields that decide where it goes; the bytes are forwarded as they came. Messages and
tools are only found, not decoded: most of them were read with an earlier turn (see `WrittenChat`). Whatever the engine
itself would refuse (no messages, a bad type, two prompts in one field) is not refused here: it becomes a request
without a prompt, and the engine answers in its own words. Only what is no JSON at all is turned away, because nothing
can be read from it.

Fields and defaults are those of vLLM's protocol.py files (0.32), see `Inference`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from kvroute.errors import BadRequest, KvrouteError
from kvroute.kv.chain import tokens_of
from kvroute.kv.prompt import USUAL, ChatPrompt, PromptSource, TextPrompt, TokenPrompt, WrittenChat
from kvroute.routing.replica import ModelCard

Kind = Literal["chat", "completion", "other", "form"]

ROUTES: dict[str, Kind] = {  # inference only: management routes share the /v1/ prefix, so this is a list
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "other",
    "/v1/messages": "other",
    "/v1/messages/count_tokens": "other",
    "/v1/embeddings": "other",
    "/v1/score": "other",
    "/score": "other",
    "/rerank": "other",
    "/v1/rerank": "other",
    "/v2/rerank": "other",
    "/pooling": "other",
    "/classify": "other",
    "/v2/embed": "other",
    "/tokenize": "other",
    "/detokenize": "other",
    "/v1/audio/transcriptions": "form",
    "/v1/audio/translations": "form",
}
PROMPTS_MAX = 1024  # in one request; a longer list is routed by load alone
COMPLETION_TOKENS = 16  # vLLM's bound for a completion that names none
COUNT_MAX = 1 << 31  # a larger bound is the engine's to refuse
LOOSE_BYTES_MAX = 64 << 10  # of a body that is no standard JSON and is looked at all the same; a few milliseconds
BYTES_PER_TOKEN = 4  # to guess the size of a prompt that is not understood


class Inference(Struct, frozen=True, kw_only=True):
    """One request as routing sees it."""

    kind: Kind
    model: str | None = None
    sources: tuple[PromptSource, ...] = ()  # empty: no prompt that we understand
    n: int = 1  # answers for each prompt
    stream: bool = False
    stream_options: Any = UNSET  # as the client wrote it; UNSET where it did not
    max_tokens: int | None = None  # the client's bound for each answer
    cache_salt: str | None = None
    reads_cache: bool = True  # False: prompt logprobs make the engine compute every token again
    guessed_tokens: int = 0  # of a prompt that is not understood

    @property
    def sequences(self) -> int:
        """How many answers the engine generates."""
        return max(1, len(self.sources)) * self.n


class _Body(Struct):
    """Chats and completions together. `Any`: a wrong type is the engine's to refuse."""

    model: Any = None
    prompt: Any = None
    stream: Any = False
    stream_options: Any = UNSET
    n: Any = None
    max_tokens: Any = UNSET
    max_completion_tokens: Any = None
    cache_salt: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    add_special_tokens: Any = None
    reasoning_effort: Any = None
    echo: Any = False
    logprobs: Any = None
    top_logprobs: Any = 0
    prompt_logprobs: Any = None
    prompt_logprob_token_ids: Any = None
    truncate_prompt_tokens: Any = None  # cuts the prompt at a side that only the engine's settings tell
    prompt_embeds: Any = None  # stands for the prompt
    suffix: Any = None  # fill in the middle, rendered by the model's own code
    kv_transfer_params: Any = None  # may bring token ids that stand for the messages


class _Chat(_Body):
    """A chat whose messages are a list."""

    messages: list[Raw] = []
    tools: Raw = Raw(b"null")


def _rare(fields: _Chat) -> tuple[Any, ...]:
    """Return what decides, beside messages and tools, which tokens a chat's engine computes, and how many answers."""
    return (
        fields.n, fields.cache_salt, fields.documents, fields.chat_template, fields.chat_template_kwargs,
        fields.reasoning_effort, fields.add_generation_prompt, fields.continue_final_message,
        fields.add_special_tokens, fields.echo, fields.top_logprobs, fields.prompt_logprobs,
        fields.prompt_logprob_token_ids, fields.truncate_prompt_tokens, fields.prompt_embeds, fields.suffix,
        fields.kv_transfer_params,
    )  # fmt: skip


_NOTHING_RARE = _rare(_Chat())


class _Named(Struct):
    """The only field that is read where the prompt is not understood."""

    model: Any = None


def parse(path: str, body: bytes, content_type: str = "application/json") -> Inference:
    """Read what routing needs from the body of a request to one of `ROUTES`.

    Raises:
        BadRequest: the body is not JSON.
    """
    kind = ROUTES[path]
    if kind == "form":
        return Inference(kind=kind, model=_form_model(body, content_type))
    if kind == "other":
        named = _decode(body, _Named)
        return Inference(kind=kind, model=_text(named.model), guessed_tokens=len(body) // BYTES_PER_TOKEN)
    fields: _Body = _decode(body, _Chat, _Body) if kind == "chat" else _decode(body, _Body)
    if type(fields) is _Chat and fields.messages and _rare(fields) == _NOTHING_RARE:  # most requests end here
        return Inference(
            kind=kind,
            model=_text(fields.model),
            sources=(WrittenChat(fields.messages, fields.tools, USUAL),),
            stream=fields.stream is True,
            stream_options=fields.stream_options,
            max_tokens=_bound(fields, kind),
        )
    sources = () if _hides_prompt(fields) else _chat(fields) if kind == "chat" else _prompts(fields)
    return Inference(
        kind=kind,
        model=_text(fields.model),
        sources=sources,
        n=_count(fields.n) or 1,
        stream=fields.stream is True,
        stream_options=fields.stream_options,
        max_tokens=_bound(fields, kind),
        cache_salt=_text(fields.cache_salt),
        reads_cache=_reads_cache(fields, kind),
        guessed_tokens=0 if sources else len(body) // BYTES_PER_TOKEN,
    )


def _decode(body: bytes, kind: type[Any], looser: type[Any] | None = None) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:  # JSON, but no object, or not with such fields
        return kind() if looser is None else _decode(body, looser)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, RecursionError):
            _refuse(body, error)
        return kind() if _engine_can_read(body) else _refuse(body, error)


def _engine_can_read(body: bytes) -> bool:
    """Python's decoder, which engines use, takes more than the standard: NaN, lone surrogates, UTF-16."""
    if len(body) > LOOSE_BYTES_MAX:
        return True  # decoding it here would hold up everybody else; the engine has the last word anyway
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(body: bytes, error: Exception) -> None:
    what = "it is empty" if not body.strip() else str(error) or "nested too deeply"
    raise BadRequest(f"The body of the request is not valid JSON: {what}", param="body") from None


def _hides_prompt(fields: _Body) -> bool:
    """Say whether something else than the prompt's own fields decides which tokens the engine computes."""
    transfer = fields.kv_transfer_params
    return (
        fields.truncate_prompt_tokens is not None
        or fields.prompt_embeds is not None
        or bool(fields.suffix)
        or (isinstance(transfer, dict) and "prompt_token_ids" in transfer)
        or (fields.cache_salt is not None and not (isinstance(fields.cache_salt, str) and fields.cache_salt))
    )


def _chat(fields: _Body) -> tuple[PromptSource, ...]:
    if not isinstance(fields, _Chat):
        return ()
    understood = (
        bool(fields.messages)
        and (fields.documents is None or _are_objects(fields.documents))
        and isinstance(fields.chat_template, str | None)
        and isinstance(fields.chat_template_kwargs, dict | None)
        and isinstance(fields.reasoning_effort, str | None)
    )
    if not understood:
        return ()
    others = ChatPrompt(
        messages=[],
        documents=fields.documents,
        chat_template=fields.chat_template,
        chat_template_kwargs=fields.chat_template_kwargs,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
        add_special_tokens=fields.add_special_tokens is True,
        reasoning_effort=fields.reasoning_effort,
    )
    return (WrittenChat(fields.messages, fields.tools, others),)


def _prompts(fields: _Body) -> tuple[PromptSource, ...]:
    prompt = fields.prompt
    special = fields.add_special_tokens is not False
    if isinstance(prompt, str):
        return (TextPrompt(prompt, special),)
    if not isinstance(prompt, list) or not prompt:
        return ()
    if isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > PROMPTS_MAX:
        return ()
    if all(isinstance(text, str) for text in prompt):
        return tuple(TextPrompt(text, special) for text in prompt)
    try:
        return tuple(TokenPrompt(tokens_of(ids)) for ids in prompt)
    except (TypeError, OverflowError):  # not a list of ids, or no token's id
        return ()


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _reads_cache(fields: _Body, kind: Kind) -> bool:
    """vLLM skips its prefix cache where prompt logprobs are wanted; an echo with logprobs wants them too."""
    logprobs = fields.top_logprobs if kind == "chat" else fields.logprobs
    echoed = bool(fields.echo) and logprobs is not None
    return fields.prompt_logprobs is None and fields.prompt_logprob_token_ids is None and not echoed


def _bound(fields: _Body, kind: Kind) -> int | None:
    if kind == "chat" and fields.max_completion_tokens is not None:
        return _count(fields.max_completion_tokens)
    if fields.max_tokens is UNSET:
        return None if kind == "chat" else COMPLETION_TOKENS
    return _count(fields.max_tokens)


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= COUNT_MAX
    return value if is_count else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_MODEL_PART = (
    rb"--%b\r\n(?i:content-disposition): form-data; name=\"?model\"?\r\n"
    rb"(?:[^\r\n]+\r\n){0,8}\r\n([^\r\n]{0,512})\r\n--"
)


def _form_model(body: bytes, content_type: str) -> str | None:
    """Return the `model` field of a multipart form; where it lies among the parts does not matter."""
    boundary = re.search(r'boundary="?([^";,\s]{1,70})', content_type)
    if boundary is None:
        return None
    field = re.search(_MODEL_PART % re.escape(boundary[1].encode()), body)
    return field[1].decode("utf-8", "replace") if field else None


def error_body(error: KvrouteError) -> bytes:
    """Return an error as OpenAI and vLLM write it."""
    shape = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return msgspec.json.encode({"error": shape})


def unknown_model(model: str, choices: Iterable[str]) -> BadRequest:
    """Return what vLLM says about a model that it does not serve."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(sorted(choices))}."
    return BadRequest(message, param="model", status=404, kind="NotFoundError")


def which_model(choices: Iterable[str]) -> BadRequest:
    """Return what a request is told that names no model before a pool with several."""
    names = ", ".join(sorted(choices))
    return BadRequest(f"This pool serves several models; set `model` to one of: {names}", param="model")


def models_body(cards: Iterable[ModelCard], created_s: int) -> bytes:
    """Return the answer to /v1/models: every name once, in the order in which it comes."""
    data: dict[str, dict[str, Any]] = {}
    for card in cards:
        data.setdefault(
            card.name,
            {
                "id": card.name,
                "object": "model",
                "created": created_s,
                "owned_by": "vllm",
                "root": card.root,
                "parent": card.parent,
                "max_model_len": card.max_model_len,
            },
        )
    return msgspec.json.encode({"object": "list", "data": list(data.values())})
