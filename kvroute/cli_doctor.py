"""`kvroute doctor`: reads settings, has the pool examined, prints the verdicts. Exits with 1 where routing is blind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.routing.diagnosis import judge_replica
from kvroute.routing.findings import Finding, ReplicaFacts, StoreFacts, is_blind
from kvroute.routing.pool_diagnosis import judge_pool, judge_store

if TYPE_CHECKING:
    from kvroute.config import Config


class Verdict(Struct, frozen=True):
    """One replica: what is to be said, and what was seen."""

    url: str
    findings: list[Finding]
    facts: ReplicaFacts


class Diagnosis(Struct, frozen=True):
    """The whole examination, as --json prints it."""

    blind: bool  # routing does not know what it does, somewhere
    replicas: list[Verdict]
    pool: list[Finding]  # what no replica shows alone
    store: list[Finding]
    store_facts: StoreFacts | None


@click.command()
@click.argument("urls", nargs=-1, metavar="URL...")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="kvroute's YAML file, for all of these.")
@click.option("--tokenizer", metavar="auto|DIR|none", help="How prompts become tokens.  [default: auto]")
@click.option("--model", metavar="NAME", help="The model to try.  [default: the first one that a replica serves]")
@click.option(
    "--api-key", envvar="KVROUTE_API_KEY", metavar="KEY", help="Of the replicas at URL...  [env: KVROUTE_API_KEY]"
)
@click.option("--redis", "redis_url", metavar="URL", help="The shared store, to look at as well.")
@click.option(
    "--kv-events",
    metavar="ENDPOINT[,REPLAY]",
    help="Where vLLM before 0.31 publishes, as its --kv-events-config has it, such as tcp://*:5557,tcp://*:5558.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(urls: tuple[str, ...], path: Path | None, as_json: bool, **flags: Any) -> None:
    """Examine running vLLM replicas: is each one fit to be routed to by its cache, and if not, which flag mends it?

    Each engine gets two short prompts. The exit status is 1 where routing would be blind: a replica that does not
    answer, that caches no prefixes, or whose tokens or blocks are not those that kvroute expects.
    """
    try:
        config = _config(urls, path, flags)
        diagnosis = asyncio.run(_examine(config, flags["model"]))
    except ConfigError as error:
        raise click.ClickException(error.message) from None
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode())
    else:
        _print(diagnosis)
    if diagnosis.blind:
        raise click.exceptions.Exit(1)


def _config(urls: tuple[str, ...], path: Path | None, flags: dict[str, Any]) -> Config:
    from kvroute import config

    overrides = {name: flags[flag] for flag, name in (("tokenizer", "tokenizer"), ("redis_url", "store.url"))}
    given = {name: value for name, value in overrides.items() if value is not None}
    if flags["kv_events"]:
        endpoint, _, replay = flags["kv_events"].partition(",")
        given |= {"events.endpoint": endpoint, "events.replay_endpoint": replay or None}
    if urls:
        given["replicas"] = [{"url": url.rstrip("/"), "api_key": flags["api_key"]} for url in urls]
    settings = config.load(path, overrides=given)
    if not settings.replicas:
        raise ConfigError("`replicas`: no replica given; name at least one URL, e.g. kvroute doctor http://gpu1:8000")
    return settings


async def _examine(config: Config, model: str | None) -> Diagnosis:
    """Look at every replica at once, then at the store."""
    import aiohttp

    from kvroute.adapters.doctor import Doctor
    from kvroute.adapters.doctor_events import EventEndpoints
    from kvroute.adapters.doctor_store import examine_store
    from kvroute.adapters.doctor_tokens import Readers
    from kvroute.adapters.tls import session_tls

    readers, settings = Readers(config.tokenizer), config.events
    events = EventEndpoints(settings.endpoint, settings.replay_endpoint, settings.topic, settings.engines_dial)
    try:
        connector = aiohttp.TCPConnector(limit=0, ssl=session_tls(config.proxy.replica_trust))
        async with aiohttp.ClientSession(connector=connector) as session:
            doctor = Doctor(session, readers, model, None if settings.mode in ("off", False) else events)
            examined = [doctor.examine(one.url.rstrip("/"), one.api_key) for one in config.replicas]
            facts = await asyncio.gather(*examined)
    finally:
        await readers.close()
    store = config.store
    store_facts = await examine_store(store.url, store.lookup_deadline_ms / 1000) if store.url else None
    return _judge(facts, store_facts)


def _judge(facts: list[ReplicaFacts], store_facts: StoreFacts | None) -> Diagnosis:
    verdicts = [Verdict(one.url, judge_replica(one), one) for one in facts]
    pool, store = judge_pool(facts), judge_store(store_facts) if store_facts else []
    every = [*(finding for verdict in verdicts for finding in verdict.findings), *pool, *store]
    return Diagnosis(is_blind(every), verdicts, pool, store, store_facts)


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console

    from kvroute.adapters.doctor_tables import apart, print_findings

    console = Console(highlight=False)
    common, own = apart([verdict.findings for verdict in diagnosis.replicas])
    for verdict, findings in zip(diagnosis.replicas, own, strict=True):
        print_findings(verdict.url, findings, console)
    if diagnosis.pool or common:
        print_findings("all replicas", [*diagnosis.pool, *common], console)
    if diagnosis.store_facts is not None:
        print_findings(diagnosis.store_facts.url, diagnosis.store, console)
    blind = [verdict for verdict in diagnosis.replicas if is_blind(verdict.findings)]
    examined = f"{len(diagnosis.replicas)} replica{'s' if len(diagnosis.replicas) > 1 else ''}"
    if diagnosis.blind:
        where = f"on {len(blind)} of {examined}" if blind else "without its store"
        console.print(f"Routing would be blind {where}: see FAIL above.", style="bold red")
    else:
        console.print(f"{examined} examined: routing would be blind nowhere.", style="green")
