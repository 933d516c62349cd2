"""Chat templates that render a conversation turn by turn: proved on their syntax tree, and taken apart.

A template is *turn-wise* when its text is `first(first message) + turn(message) + ... + foot`: what stands for a
message depends neither on any other message nor on how many there are. Then a conversation that grew need not be
rendered again. The proof asks for this shape and refuses whatever it does not know:

1. On the top level stands exactly one loop over `messages`, or over `messages[1:]` where the first one is a system
   message that was written before. Before the loop only `messages[0]` is read, in it and behind it no message but the
   loop's own.
2. Of the loop's own state the body reads `first`, `index` and `index0`, which a number of turns before can stand for.
3. Nothing carries state from turn to turn: no namespaces that change, no macros, iterators or clocks, no `break`.
4. Names that are set before the loop and read in it or behind it do not depend on messages. Jinja itself keeps what
   is set in a loop's body from leaking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer
from msgspec import Struct

from kvroute.adapters.template import ENVIRONMENT

MESSAGES, LOOP = "messages", "loop"
BEFORE = "kvroute_turns_before"  # how often the loop ran for earlier messages
GLOBALS = dict(ENVIRONMENT.globals)
IMPURE = {"strftime_now", "lipsum", "cycler", "joiner", "self", "super", "caller", BEFORE}
STATEMENTS = (
    nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Scope, nodes.Continue, nodes.Break,
)  # fmt: skip
EXPRESSIONS = (
    nodes.Name, nodes.Const, nodes.List, nodes.Dict, nodes.Pair, nodes.Tuple, nodes.Keyword, nodes.CondExpr,
    nodes.Filter, nodes.Test, nodes.Call, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Compare, nodes.Operand,
    nodes.Concat, nodes.BinExpr, nodes.UnaryExpr,
)  # fmt: skip
PLAIN_FILTERS = {
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent", "int", "join", "last",
    "length", "list", "lower", "replace", "round", "sort", "string", "title", "tojson", "trim", "upper", "wordcount",
}  # fmt: skip
LAZY_FILTERS = {"items", "reject", "rejectattr", "reverse", "select", "selectattr", "unique"}  # can be read only once


class _NotTurnwiseError(Exception):
    """The proof fails."""


class TurnTemplate(Struct, frozen=True):
    """A turn-wise template in three parts."""

    _first: Template
    _turns: Template
    _foot: Template

    def first(self, variables: dict[str, Any], message: Any) -> tuple[str, int]:
        """Return what stands before the second message, and how often the loop ran for the first one: 0 or 1."""
        return _run(self._first, {**GLOBALS, **variables, MESSAGES: [message]})

    def later(self, variables: dict[str, Any]) -> Later:
        """Return what renders later messages."""
        return Later(self._turns, variables)

    def foot(self, variables: dict[str, Any]) -> str:
        """Return what stands behind the messages."""
        return _run(self._foot, {**GLOBALS, **variables, MESSAGES: (None,)})[0]  # not empty is all that it may ask


def _run(template: Template, values: dict[str, Any]) -> tuple[str, int]:
    """Return a part's text, and the count of turns that it set; a context that shares its values saves two copies."""
    context = template.new_context(values, shared=True)
    return "".join(template.root_render_func(context)), context.vars.get(BEFORE, 0)


class Later:
    """Renders later messages of chats that share their variables: one context, filled anew for every chat."""

    def __init__(self, template: Template, variables: dict[str, Any]) -> None:
        self._values = {**GLOBALS, **variables, MESSAGES: (), BEFORE: 0}
        self._context = template.new_context(self._values, shared=True)
        self._render = template.root_render_func

    def text(self, messages: list[Any], before: int) -> str:
        """Return the text of messages; `before`: how often the loop ran for those that came earlier."""
        values, context = self._values, self._context
        values[MESSAGES], values[BEFORE] = messages, before
        try:
            return "".join(self._render(context))
        finally:
            values[MESSAGES] = ()  # keeps nobody's words
            context.vars.clear()
            context.exported_vars.clear()


def turns_of(source: str) -> TurnTemplate | None:
    """Take a template apart; None where it cannot be shown to be turn-wise. Raises TemplateError for no template."""
    try:
        at = _proved(ENVIRONMENT.parse(source).body)
    except _NotTurnwiseError:
        return None
    first, turns, foot = (ENVIRONMENT.parse(source).body for _ in range(3))  # compiling may change a tree
    loop = turns[at]
    assert isinstance(loop, nodes.For)
    looped = nodes.Filter(_loop_at(ENVIRONMENT.parse(source).body, at).iter, "length", [], [], None, None)
    ran = nodes.Assign(nodes.Name(BEFORE, "store"), looped)
    loop.body = [_Counting().visit(node) for node in loop.body]
    loop.iter = nodes.Name(MESSAGES, "load")
    return TurnTemplate(
        _compiled([*first[: at + 1], ran]),
        _compiled([*_prelude(turns, at), loop]),
        _compiled([*_prelude(foot, at), *foot[at + 1 :]]),
    )


def _compiled(body: list[nodes.Node]) -> Template:
    tree = nodes.Template(body, lineno=1).set_environment(ENVIRONMENT)
    for node in tree.find_all(nodes.Node):
        node.lineno = node.lineno or 1
    assert isinstance(tree, nodes.Template)
    return Template.from_code(ENVIRONMENT, ENVIRONMENT.compile(tree), GLOBALS)


class _Counting(NodeTransformer):
    """Makes a loop over later messages count as if it had run over the earlier ones."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node.iter = self.visit(node.iter)  # its body has a loop of its own
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Expr:
        if not _is_name(node.node, LOOP):
            return self.generic_visit(node)  # type: ignore[return-value]
        attribute = "index0" if node.attr == "first" else node.attr
        count = nodes.Add(nodes.Getattr(node.node, attribute, "load"), nodes.Name(BEFORE, "load"))
        return count if node.attr != "first" else nodes.Compare(count, [nodes.Operand("eq", nodes.Const(0))])


def _proved(body: list[nodes.Node]) -> int:
    """Return which node is the loop over the messages."""
    tree = nodes.Template(body)
    _demand(all(isinstance(node, STATEMENTS + EXPRESSIONS) for node in tree.find_all(nodes.Node)))
    _demand(not any(name.name in IMPURE for name in tree.find_all(nodes.Name)))
    _demand(all(item.name in PLAIN_FILTERS | LAZY_FILTERS for item in tree.find_all(nodes.Filter)))
    lists = {MESSAGES, *_aliases(body)}
    loops = [at for at, node in enumerate(body) if isinstance(node, nodes.For) and _names(node.iter) & lists]
    _demand(len(loops) == 1)
    at = loops[0]
    head, loop, foot = body[:at], _loop_at(body, at), body[at + 1 :]
    _demand_loop(loop)
    _demand_own_messages(head, loop, foot, lists)
    _demand_plain_names(body, at, lists)
    return at


def _demand(holds: bool) -> None:
    if not holds:
        raise _NotTurnwiseError


def _demand_loop(loop: nodes.For) -> None:
    _demand(isinstance(loop.target, nodes.Name) and not (loop.else_ or loop.test or loop.recursive))
    inner = [node for body in loop.body for node in (body, *body.find_all(nodes.For)) if isinstance(node, nodes.For)]
    _demand(not any(node.recursive or LOOP in _names(node.test, *node.else_) for node in inner))
    _demand(not any(isinstance(node, nodes.Break) for found in inner for node in _all(found.else_)))
    counted = {
        id(node.node)
        for body in loop.body
        for node in (body, *body.find_all(nodes.Getattr))
        if isinstance(node, nodes.Getattr) and node.attr in ("first", "index", "index0")
    }
    own = list(_outside_loops(loop.body))
    _demand(not any(isinstance(node, nodes.Break) for node in own))
    _demand(all(id(node) in counted for node in own if _is_name(node, LOOP)))


def _demand_own_messages(head: list[nodes.Node], loop: nodes.For, foot: list[nodes.Node], lists: set[str]) -> None:
    """See to it that messages are read only where and how it cannot matter which others there are."""
    allowed = {id(name) for name in _tail_names(loop.iter, lists)}
    _demand(bool(allowed))
    for assign in _flat(head):
        if isinstance(assign.target, nodes.Name) and assign.target.name in lists:
            allowed.update(id(name) for name in _tail_names(assign.node, {MESSAGES}))
    for node in _all([*head, loop.iter]):
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == 0:
            allowed.add(id(node.node))
    for node in _all([*head, *foot]):
        if isinstance(node, nodes.Not):
            allowed.add(id(node.node))
        elif isinstance(node, nodes.If | nodes.CondExpr):
            allowed.add(id(node.test))
    for node in _all([*head, loop, *foot]):
        if isinstance(node, nodes.Name) and node.name in lists and node.ctx == "load":
            _demand(id(node) in allowed)
            _demand(node.name == MESSAGES or node is loop.iter)
    if isinstance(loop.iter, nodes.Name) and loop.iter.name != MESSAGES:
        _demand(_always_set(head, loop.iter.name))


def _demand_plain_names(body: list[nodes.Node], at: int, lists: set[str]) -> None:
    head, loop, foot = body[:at], body[at], body[at + 1 :]
    stores = [name for name in _all(body) if isinstance(name, nodes.Name) and name.ctx == "store"]
    aliased = {id(assign.target) for assign in _flat(head)}
    _demand(not any(name.name in (MESSAGES, LOOP) for name in stores))
    _demand(all(id(name) in aliased for name in stores if name.name in lists))
    set_last = {name for assign in _flat(foot) for name in _names(assign.target)}
    _demand(not set_last & _names(*head, loop))  # Jinja hides them from loops that stand before
    prelude = _prelude(body, at)
    _demand(not _names(*prelude) & lists)
    _demand(not any(isinstance(node, nodes.Filter) and node.name in LAZY_FILTERS for node in _all(prelude)))


def _aliases(body: list[nodes.Node]) -> Iterator[str]:
    """Yield the names that stand for all messages, or for all but the first."""
    for assign in _flat(body):
        if isinstance(assign.target, nodes.Name) and _tail_names(assign.node, {MESSAGES}):
            yield assign.target.name


def _tail_names(node: nodes.Node | None, lists: set[str]) -> list[nodes.Name]:
    """Return the lists in an expression whose value is one of them, whole or from its second item; else nothing."""
    if isinstance(node, nodes.Name) and node.name in lists:
        return [node]
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        start, rest = node.arg.start, (node.arg.stop, node.arg.step)
        is_tail = isinstance(start, nodes.Const) and start.value == 1 and rest == (None, None)
        return [node.node] if is_tail and _is_name(node.node, MESSAGES) else []  # type: ignore[list-item]
    if isinstance(node, nodes.CondExpr):
        one, other = _tail_names(node.expr1, lists), _tail_names(node.expr2, lists)
        return one + other if one and other else []
    return []


def _always_set(body: Iterable[nodes.Node], name: str) -> bool:
    """Return whether every way through these nodes sets a name."""
    return any(
        _is_name(node.target, name)
        if isinstance(node, nodes.Assign)
        else isinstance(node, nodes.If)
        and all(_always_set(branch, name) for branch in (node.body, *(e.body for e in node.elif_), node.else_))
        for node in body
    )


def _prelude(body: list[nodes.Node], at: int) -> list[nodes.Node]:
    """Return what of the nodes before the loop must run again for the names that the rest reads."""
    needed: set[str] = set()
    more = _names(*body[at].iter_child_nodes(exclude=("iter",)), *body[at + 1 :])
    kept: list[nodes.Node] = []
    while not more <= needed:
        needed |= more
        kept = _setting(body[:at], needed)
        more = _names(*kept)
    return kept


def _setting(body: Iterable[nodes.Node], names: set[str]) -> list[nodes.Node]:
    """Return copies of the nodes reduced to where they set these names."""
    kept: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.Assign) and _names(node.target) & names:
            kept.append(node)
        elif isinstance(node, nodes.If):
            branches = [_setting(branch, names) for branch in (node.body, node.else_)]
            others = [nodes.If(e.test, _setting(e.body, names), [], [], lineno=e.lineno) for e in node.elif_]
            if any(branches) or any(other.body for other in others):
                kept.append(nodes.If(node.test, branches[0], others, branches[1], lineno=node.lineno))
    return kept


def _flat(body: Iterable[nodes.Node]) -> Iterator[nodes.Assign]:
    """Yield what is set on the level of these nodes: an `if` is no scope of its own."""
    for node in body:
        if isinstance(node, nodes.Assign):
            yield node
        elif isinstance(node, nodes.If):
            yield from _flat([*node.body, *node.elif_, *node.else_])


def _outside_loops(body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """Yield all nodes to which `loop` and `break` mean the loop around these nodes."""
    for node in body:
        yield node
        inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
        yield from _outside_loops(inner)


def _all(body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    for node in body:
        yield node
        yield from node.find_all(nodes.Node)


def _names(*body: nodes.Node | None) -> set[str]:
    return {node.name for node in _all(filter(None, body)) if isinstance(node, nodes.Name)}


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _loop_at(body: list[nodes.Node], at: int) -> nodes.For:
    loop = body[at]
    assert isinstance(loop, nodes.For)
    return loop
