"""A chat template: Jinja source -> a function from a conversation to text, exactly as Hugging Face renders it.

The environment is that of `transformers` (`utils/chat_template_utils.py`): immutable sandbox, trimmed blocks, loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now` and the `generation` block. What differs is
speed only, by a factor of three: a key of a plain dict is read where the template stands, and loops, namespaces and
methods of strings take a short way through the sandbox's rules. Templates use little else.

Whether a template wants content as a string or as parts is found as vLLM finds it: by looking for a loop over content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cached_property
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

DICT_ATTRIBUTES = frozenset(dir(dict))
PLAIN_TYPES = {LoopContext, Namespace}  # hold nothing but what the template may see
STRING_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}


class KeyReader(CodeGenerator):
    """Compiles `message.role` and `message["role"]` to a dict access in place, with the environment for all else.

    Both forms look for the key of a dict; the first only after dict's own attributes, so names like `items` stay slow.
    """

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """Write the code that reads an attribute."""
        if node.attr in DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
        else:
            self._write_access(node.node, node.attr, "getattr", frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Write the code that reads an item."""
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            self._write_access(node.node, node.arg.value, "getitem", frame)
        else:
            super().visit_Getitem(node, frame)

    def _write_access(self, owner: nodes.Expr, key: str, method: str, frame: Frame) -> None:
        name = self.temporary_identifier()
        self.write(f"({name}[{key!r}] if type({name} := (")
        self.visit(owner, frame)
        self.write(f")) is dict and {key!r} in {name} else environment.{method}({name}, {key!r}))")


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a short way for what chat templates do all the time."""

    code_generator_class = KeyReader

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Read an attribute; where the type and the name settle that it is safe, without asking further."""
        kind = type(obj)
        if kind is dict and attribute not in DICT_ATTRIBUTES:
            value = obj.get(attribute, self)
            return self.undefined(obj=obj, name=attribute) if value is self else value
        if (kind is str and attribute in STRING_METHODS) or (kind in PLAIN_TYPES and attribute[0] != "_"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something: methods of strings change nothing, so they need no further check."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in STRING_METHODS:
            kwargs.pop("_loop_vars", None)  # Jinja's own, for functions that take the context
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


class GenerationBlock(Extension):
    """The `generation` block marks what the assistant said, for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a set from the class

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block as a scope of its own, like the call that Hugging Face makes of it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)  # the engine writes its own local time


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
ENVIRONMENT.filters["tojson"] = _tojson
ENVIRONMENT.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class ChatTemplate:
    """One compiled template.

    Raises:
        TemplateError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.knows_developers = '"developer"' in source or "'developer'" in source
        self._compiled = ENVIRONMENT.from_string(source)
        self._compiled.globals = dict(ENVIRONMENT.globals)  # a plain dict: each rendering copies it

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text of a conversation. Raises whatever the template's own code runs into."""
        return self._compiled.render(variables)

    @cached_property
    def wants_parts(self) -> bool:
        """Whether content is passed as a list of parts: the template loops over some message's content."""
        return _loops_over_content(ENVIRONMENT.parse(self.source))


def _loops_over_content(root: nodes.Template) -> bool:
    messages = _loop_names(root, _aliases(root, "messages"))
    macros = list(root.find_all(nodes.Macro))
    inside = {
        id(loop): _content_arguments(root, macro, messages) for macro in macros for loop in macro.find_all(nodes.For)
    }
    return any(_is_over_content(loop, messages, inside.get(id(loop))) for loop in root.find_all(nodes.For))


def _is_over_content(loop: nodes.For, messages: set[str], arguments: set[str] | None) -> bool:
    """Return whether a loop runs over content; `arguments`: the enclosing macro's parameters that are given content."""
    if any(_reads(loop.iter, name, "content") for name in messages):
        return True
    names = {"content"} if arguments is None else arguments
    return isinstance(loop.iter, nodes.Name) and loop.iter.name in names


def _aliases(root: nodes.Template, name: str) -> set[str]:
    """Return the names that hold the variable or a part of it."""
    found, queue = {name}, [name]
    while queue:
        current = queue.pop()
        for assign in root.find_all(nodes.Assign):
            if (
                isinstance(assign.target, nodes.Name)
                and _reads(assign.node, current)
                and assign.target.name not in found
            ):
                found.add(assign.target.name)
                queue.append(assign.target.name)
    return found


def _loop_names(root: nodes.Template, iterables: set[str]) -> set[str]:
    """Return the loop variables of loops over any of these names."""
    loops = (loop for loop in root.find_all(nodes.For) if any(_reads(loop.iter, name) for name in iterables))
    return {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}


def _content_arguments(root: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Return the macro's parameters that some call fills with a message's content."""
    return {name for call in root.find_all(nodes.Call) for name in _filled(call, macro, messages)}


def _filled(call: nodes.Call, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
        return
    names = [argument.name for argument in macro.args]
    given = [*zip(names, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
    yield from (name for name, value in given if name in names and any(_reads(value, m, "content") for m in messages))


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether an expression is the variable (or its `key`), filtered, tested or sliced in any way."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            node = node.node if node.arg.value == key else None
        elif isinstance(node, nodes.Getattr):
            node = node.node if node.attr == key else None
        else:
            return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
