"""The rooms of kvroute, the doors between them, and the sizes and habits that keep them readable.

Everything is read from syntax trees; nothing is imported. A failure names the file, the line and the remedy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "kvroute"
TESTS = PACKAGE.with_name("tests")

DOORS = {  # room: the rooms that it may import, besides itself
    "errors": "",
    "kv": "errors",
    "sizing": "errors kv",
    "routing": "errors kv sizing",
    "sim": "errors kv sizing routing",
    "fake": "errors kv sizing routing sim",
    "adapters": "errors kv sizing routing",
    "proxy": "errors kv sizing routing adapters",
    "proxy.app": "errors kv sizing routing adapters config",
    "workers": "errors adapters proxy config",
    "config": "errors kv sizing routing adapters",
    "demo": "errors",  # runs the commands, as a user would
    "cli": "errors kv sizing routing sim fake adapters proxy workers config demo "
    "cli_types cli_size cli_simulate cli_doctor",
    "cli_doctor": "errors routing adapters config",
    "cli_simulate": "cli_types errors sizing routing sim adapters cli_simulate_png cli_simulate_table",
    "cli_simulate_png": "errors sim",
    "cli_simulate_table": "sim",
    "cli_types": "",
    "cli_size": "errors kv sizing adapters",
}
PURE = {"errors", "kv", "sizing", "routing", "sim", "workers.staff"}  # rooms, and single modules
LANGUAGE = {"__future__", "collections", "dataclasses", "enum", "functools", "typing", "msgspec"}
TOOLS = {"array", "bisect", "heapq", "itertools", "json", "math", "random", "re", "statistics", "struct", "xxhash"}
LINES_MAX = 500
FUNCTION_LINES_MAX = 60
MOCKS_PER_TEST_MAX = 0.05
MOCK_NAMES = {"Mock", "MagicMock", "AsyncMock", "patch", "create_autospec", "monkeypatch"}

# Modules without a test file of their own, each with the reason. The list only shrinks.
UNTESTED = {
    "errors": "a table of classes",
    "routing.demand": "values without behaviour",
    "routing.hold": "values without behaviour",
    "routing.policy": "values without behaviour",
    "routing.turn": "a small class; test_waiting and test_admission use it",
    "sizing.report": "values without behaviour; test_assemble reads every one",
}


def module_of(path: Path) -> str:
    """Name a source file as its room sees it: kvroute/kv/chain.py -> kv.chain, kvroute/kv/__init__.py -> kv."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem[0] != "_"
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def door_of(module: str) -> str:
    """Return the row of DOORS that holds for a module: its own if it has one, else its room's."""
    return module if module in DOORS else module.partition(".")[0]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported; relative imports are banned by ruff."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def closed_doors(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield each import that leads from a module into a room it must not know."""
    home = module.partition(".")[0]
    allowed = {home, "__version__", *DOORS[door_of(module)].split()}
    for line, name in imports(tree):
        top, _, inner = name.partition(".")
        if top == "kvroute" and inner.partition(".")[0] not in allowed:
            yield f"line {line}: {door_of(module)} must not import {name}"


def impurities(tree: ast.Module) -> Iterator[str]:
    """Yield what a pure room must not contain: other libraries, coroutines, and randomness that nobody handed in."""
    for line, name in imports(tree):
        if name.partition(".")[0] not in {"kvroute"} | LANGUAGE | TOOLS:
            yield f"line {line}: a pure room must not use {name}; take the value as an argument"
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"line {node.lineno}: a pure room decides at once; waiting is the caller's"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "random" and node.attr != "Random":
                yield f"line {node.lineno}: take a random.Random as an argument"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"open", "input", "print"}
        ):
            yield f"line {node.lineno}: a pure room does no I/O"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function's code, without its docstring."""
    text = node.body[0] if ast.get_docstring(node) is not None else None
    return (node.end_lineno or node.lineno) - node.lineno + 1 - (text.end_lineno - text.lineno + 1 if text else 0)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "must not use time"),
        ("from asyncio import Lock", "must not use asyncio.Lock"),
        ("async def place(): ...", "decides at once"),
        ("jitter = random.random()", "take a random.Random"),
        ("text = open('rates').read()", "does no I/O"),
    ],
)
def test_the_guards_see_what_they_guard_against(source, fault):
    """Each rule of purity fires on the smallest program that breaks it."""
    assert [fault in found for found in impurities(ast.parse(source))] == [True]


def test_every_room_is_in_the_table():
    """A new room or top-level module is given its doors before it is used."""
    assert {door_of(module) for module in SOURCES} - DOORS.keys() == set()


@pytest.mark.parametrize("module", SOURCES)
def test_rooms_keep_their_doors(module):
    """No module imports from a room that its own may not know."""
    assert list(closed_doors(module, tree_of(SOURCES[module]))) == []


@pytest.mark.parametrize("module", [module for module in SOURCES if {module, module.partition(".")[0]} & PURE])
def test_pure_rooms_stay_pure(module):
    """A pure room has no clock, no I/O, no coroutine and no randomness of its own."""
    assert list(impurities(tree_of(SOURCES[module]))) == []


@pytest.mark.parametrize("module", SOURCES)
def test_modules_and_functions_stay_small(module):
    """No module and no function is longer than a reader holds in the head."""
    path = SOURCES[module]
    too_long = [node.name for node in functions(tree_of(path)) if length(node) > FUNCTION_LINES_MAX]
    assert (len(path.read_text().splitlines()) <= LINES_MAX, too_long) == (True, [])


def has_its_test_file(module: str) -> bool:
    """kvroute/kv/chain.py is tested in tests/kv/test_chain.py, or by a contract suite that imports it."""
    *rooms, name = module.split(".")
    return TESTS.joinpath(*rooms, f"test_{name}.py").exists() or module in contracted()


@cache
def contracted() -> set[str]:
    """Name the modules that the suites in tests/contracts hold to a contract."""
    trees = [tree_of(path) for path in (TESTS / "contracts").glob("test_*.py")]
    return {name.removeprefix("kvroute.").rpartition(".")[0] for tree in trees for _, name in imports(tree)}


def test_every_module_has_its_test_file():
    """No module goes untested, and no tested or vanished one is excused."""
    modules = {module for module, path in SOURCES.items() if path.stem != "__init__"}
    tested = set(filter(has_its_test_file, modules))
    assert sorted(modules - tested - UNTESTED.keys()) == []
    assert sorted(UNTESTED.keys() - (modules - tested)) == []


def test_mocks_stay_rare():
    """Tests talk to real things: hardly any of them replaces a part of the program."""
    trees = [tree_of(path) for path in TESTS.rglob("*.py") if path != Path(__file__)]
    tests = sum(node.name.startswith("test_") for tree in trees for node in functions(tree))
    mocks = sum(isinstance(node, ast.Name) and node.id in MOCK_NAMES for tree in trees for node in ast.walk(tree))
    assert mocks <= MOCKS_PER_TEST_MAX * max(tests, 20)
