"""The command line. It reads settings, starts a service and turns errors into one clear line.

Each command imports what it needs when it runs, so that `kvroute size` and `--help` answer at once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvroute import __version__
from kvroute.cli_types import Finite
from kvroute.errors import ConfigError

if TYPE_CHECKING:
    from kvroute.config import Config

POLICIES = (
    "kvroute", "round-robin", "random", "least-request", "power-of-two", "consistent-hash",
    "cache-threshold", "linear", "blend", "sticky", "affinity", "lmetric",
)  # fmt: skip
LAZY = {  # commands that live in modules of their own: name -> module:attribute
    "doctor": "kvroute.cli_doctor:doctor",
    "simulate": "kvroute.cli_simulate:simulate",
    "size": "kvroute.cli_size:size",
}


class LazyGroup(click.Group):
    """A group some of whose commands are imported at their first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *LAZY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = LAZY[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvroute")
def main() -> None:
    """One OpenAI-compatible endpoint before a pool of vLLM replicas, routed by what their KV caches hold."""


@main.command()
@click.argument("urls", nargs=-1, metavar="URL...")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="YAML file; see config/kvroute.yaml.")
@click.option("--host", help="Address of the public listener.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port of the public listener, 0 = any free one.  [default: 8000]")
@click.option("--admin-port", type=int, help="Port of the admin listener.  [default: 8001]")
@click.option("--redis", "redis_url", metavar="URL", help="Shared store; without it a private server is started.")
@click.option("--index", "index_kind", type=click.Choice(["memory", "redis"]), help="Where the index lives.")
@click.option("--tokenizer", metavar="auto|DIR|none", help="How prompts become tokens.  [default: auto]")
@click.option("--policy", metavar="|".join(POLICIES), help="How a replica is chosen.  [default: kvroute]")
@click.option("--workers", type=int, metavar="N", help="Processes on one port.  [default: one a core, at most 8]")
@click.option("--show-config", is_flag=True, help="Print the settings that would be used, and stop.")
@click.option("-v", "--verbose", is_flag=True, help="Log details.")
def serve(urls: tuple[str, ...], path: Path | None, show_config: bool, verbose: bool, **flags: Any) -> None:
    """Route requests to the vLLM replicas at URL..., for example http://gpu1:8000 http://gpu2:8000."""
    from kvroute import config

    def load() -> config.Config:
        return config.load(path, overrides=_overrides(urls, flags))

    try:
        settings = load()
        if show_config:
            click.echo(config.dump(settings))
            return
        if not settings.replicas:
            raise ConfigError(
                "`replicas`: no replica given; name at least one URL, e.g. kvroute serve http://gpu1:8000"
            )
        _log_to_stderr(verbose)
        _run(_service(load, settings, verbose))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


def _service(load: Callable[[], Config], settings: Config, verbose: bool) -> Coroutine[Any, Any, None]:
    """Return what serves: one router in this process, or the supervisor of several."""
    from kvroute.workers.cores import workers_for

    if workers_for(settings) == 1:
        from kvroute.proxy.app import run

        return run(settings, load)
    from kvroute.workers.supervisor import Supervisor

    return Supervisor(load, verbose=verbose).run()


@main.command(hidden=True)
@click.option("-v", "--verbose", is_flag=True)
def worker(verbose: bool) -> None:
    """Be one of the processes of `kvroute serve`, which says on the standard input what to do."""
    from kvroute.workers.log import LineHandler
    from kvroute.workers.worker import main as work

    _log_to_stderr(verbose, LineHandler)
    sys.exit(work())


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="0 = any free one.")
@click.option("--model", default="sim", show_default=True, help="Name that it serves.")
@click.option(
    "--kv-tokens", type=click.IntRange(min=64), default=65_536, show_default=True, help="KV cache, in tokens."
)
@click.option("--block-size", type=click.IntRange(1, 8192), default=16, show_default=True, help="Tokens a block.")
@click.option("--kv-offloading-size", type=Finite(0, 1e5), default=0.0, metavar="GIB", help="As vLLM's: CPU memory.")
@click.option("--speed", type=Finite(0.01, 10_000), default=1.0, show_default=True, help="1 = one GPU.")
@click.option("--faults", is_flag=True, help="Accept POST /_fault, for tests.")
@click.option(
    "--kv-events",
    metavar="ENDPOINT",
    help="Publish KV events: tcp://*:PORT is bound (0 = any), tcp://HOST:PORT dialled.",
)
@click.option("--kv-events-replay", metavar="ENDPOINT", help="Bind a replay socket, e.g. tcp://*:0.")
@click.option("--kv-events-topic", metavar="TOPIC", default="", help="Topic of the events.  [default: empty]")
@click.option(
    "--shutdown-timeout",
    type=Finite(0, 3600),
    default=0.0,
    show_default=True,
    help="Seconds that requests under way get after SIGTERM.",
)
def replica(**options: Any) -> None:
    """Run a simulated vLLM replica: its HTTP surface, cache and speed, without a GPU."""
    from kvroute.fake.server import run_replica

    try:
        _run(run_replica(**options))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.option("--replicas", type=click.IntRange(1, 16), default=4, show_default=True)
@click.option("--requests", type=click.IntRange(1, 100_000), default=240, show_default=True, help="Requests to send.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--admin-port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--exit", "leave", is_flag=True, help="Stop when the traffic is over.")
def demo(**options: Any) -> None:
    """Show everything on this machine: simulated replicas, a private store, the router and some traffic."""
    from kvroute.demo import run_demo

    sys.exit(run_demo(**options))


def _run(service: Coroutine[Any, Any, None]) -> None:
    """Run a service to its end, on the fast event loop."""
    import uvloop

    _allow_open_files()
    uvloop.run(service)


def _allow_open_files() -> None:
    """Allow as many open files as this user may have: a request needs two, and shells begin with 1,024 for all."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system with a lower bound of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _overrides(urls: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    names = {
        "host": "listen.host",
        "port": "listen.port",
        "admin_port": "admin.port",
        "redis_url": "store.url",
        "index_kind": "store.kind",
        "tokenizer": "tokenizer",
        "policy": "routing.policy",
        "workers": "workers",
    }
    given = {names[flag]: value for flag, value in flags.items() if value is not None}
    if urls:
        given["replicas"] = [{"url": url.rstrip("/")} for url in urls]
    return given


def _log_to_stderr(verbose: bool, handler: Callable[[], logging.Handler] = logging.StreamHandler) -> None:
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(handlers=[handler()], level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    requests = logging.getLogger("kvroute.requests")  # lines of JSON that carry their own time
    requests.addHandler(handler())
    requests.propagate = False
