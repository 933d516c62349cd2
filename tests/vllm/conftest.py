"""Two real engines for the whole session, and routers before them."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.processes import Router, Valkey, free_port
from tests.vllm.engines import Engines
from tests.vllm.make_model import write_model

HERE = Path(__file__).parent


REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Let a polite end of the process run the fixtures' clean-up, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.stash[REPORT] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what the tests measured, whether they passed or not."""
    for text in config.stash[REPORT]:
        terminalreporter.write_line("")
        terminalreporter.write(text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("vllm")


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model_dir(run_dir: Path) -> Path:
    """The tiny model: tokenizer, chat template, config; no weights."""
    return write_model(run_dir / "model")


@pytest.fixture(scope="session")
def engines(run_dir: Path, model_dir: Path) -> Iterator[Engines]:
    """Two engines with equal weights."""
    with Engines(model_dir, run_dir) as engines:
        yield engines.start([(free_port(), free_port(), free_port()) for _ in range(2)])


@pytest.fixture
def replica_url(engines: Engines) -> str:
    """The first engine, without a router before it."""
    return engines.urls[0]


@pytest.fixture
def start_router(engines: Engines, tmp_path: Path) -> Iterator[Callable[..., Router]]:
    """Start `kvroute serve` before both engines, or before the URLs given; settings as KVROUTE_… variables."""
    with ExitStack() as stack:
        count = 0

        def start(*args: str, urls: list[str] | None = None, **settings: str) -> Router:
            nonlocal count
            count += 1
            env = {f"KVROUTE_{name.upper()}": value for name, value in settings.items()}
            router = Router(*args, *(urls or engines.urls), log=tmp_path / f"router{count}.log", env=env)
            return stack.enter_context(router)

        yield start


@pytest.fixture
def router(start_router: Callable[..., Router]) -> Router:
    """`kvroute serve` before both engines, with its defaults."""
    return start_router()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str, Table], None]:
    """Print a table under a title after the run; a passing test's own output would be swallowed."""

    def write(title: str, table: Table) -> None:
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(title)
        console.print(table)
        request.config.stash[REPORT].append(console.export_text())

    return write


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Redis of the test's own, empty."""
    with Valkey(tmp_path / "valkey.log") as valkey:
        yield valkey
