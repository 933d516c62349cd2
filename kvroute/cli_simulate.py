"""`kvroute simulate`: plays a trace, or a generated workload, on an imagined fleet under one policy after another.

What is simulated is in `kvroute.sim`; here are the options, the files and the printing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvroute.cli_types import FRACTION, RATE, SECONDS, Finite
from kvroute.errors import ConfigError

if TYPE_CHECKING:
    from kvroute.routing.admission import AdmissionSettings
    from kvroute.sim.report import Report
    from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
    from kvroute.sim.workload import Workload
    from kvroute.sim.workload_plan import Pace

MakeWorkload = Callable[[int], "Workload"]  # of a seed
Progress = Callable[[int, float], None]
HEAD_LINES = 200  # from which a trace's form and block size are inferred
POLICIES_MAX = 16
SHOWN = {  # options whose value the result shows in its own way; of the others it names all that are not the default
    "trace", "policies", "replicas", "hardware", "model", "kv_tokens", "block_size", "max_model_len", "knowledge",
    "routers", "private", "seeds", "seed", "jitter", "as_json", "html", "png", "help",
}  # fmt: skip
REPLICAS_MAX = 4096
PHASES_MAX = 24
BLOCKS_MAX = 1 << 24  # of a fleet; some 150 bytes each


@click.command(epilog="TRACE is a file (.jsonl, .jsonl.gz), or a generator with its figures: see docs/simulating.md.")
@click.argument("trace")
@click.option("--policy", "policies", default="kvroute,round-robin", show_default=True, help="Names, comma-separated.")
@click.option("--replicas", type=click.IntRange(1, REPLICAS_MAX), default=4, show_default=True)
@click.option("--hardware", default="h100", show_default=True, metavar="[N x]GPU", help="GPUs of a replica: 2xh100.")
@click.option("--model", default="llama-3.1-8b", show_default=True, help="A preset, a folder or a config.json.")
@click.option("--kv-tokens", type=click.IntRange(64), help="KV cache of a replica.  [default: what fits]")
@click.option(
    "--block-size", type=click.IntRange(1, 65536), default=16, show_default=True, help="Tokens of a KV block."
)
@click.option("--rate", type=RATE, default=1.0, show_default=True, help="Times as densely as recorded.")
@click.option("--loop", type=click.Choice(["auto", "open", "closed", "alone"]), default="auto", show_default=True)
@click.option("--think", metavar="none|recorded|S|exp:S", help="Pause before a next turn; makes the loop closed.")
@click.option("--starts", type=RATE, metavar="PER_S", help="Conversations begun a second; makes the loop closed.")
@click.option("--max-concurrency", type=click.IntRange(1), help="Conversations that clients have open at a time.")
@click.option("--limit", type=click.IntRange(1), help="Requests to send at most.")
@click.option("--sessions", type=click.IntRange(1), help="Conversations to begin at most.")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs of each policy.")
@click.option("--seed", type=int, default=1, show_default=True, help="The first of them.")
@click.option("--jitter", default="auto", show_default=True, metavar="auto|none|S", help="Spreads coarse timestamps.")
@click.option("--think-cap", type=SECONDS, default=300.0, show_default=True, help="Longest recorded pause kept.")
@click.option("--max-prompt", type=click.IntRange(1), help="Leave out sessions with a longer prompt.")
@click.option("--trace-block", type=click.IntRange(1, 65536), help="Tokens of the trace's blocks.  [default: inferred]")
@click.option("--routers", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--private", is_flag=True, help="Routers share neither promises nor what they sent.")
@click.option("--knowledge", type=click.Choice(["exact", "sent", "original"]), default="exact", show_default=True)
@click.option("--hold", type=SECONDS, default=300.0, show_default=True, help="Longest that kvroute holds; 0 = never.")
@click.option("--holds", type=click.IntRange(0), help="Most requests held at once; 0 = no bound.  [default: 10000]")
@click.option("--ttft-weight", type=FRACTION, help="As routing.ttft_weight.")
@click.option("--tells-output", is_flag=True, help="Clients state their answers' lengths as max_tokens.")
@click.option("--event-lag", type=SECONDS, default=0.0, help="Seconds until cache events arrive.")
@click.option("--event-loss", type=FRACTION, default=0.0, help="Share of batches of events that are lost.")
@click.option("--ledger-lag", type=SECONDS, default=0.005, help="Seconds until promises are seen by other routers.")
@click.option("--ledger-loss", type=FRACTION, default=0.0, help="Share of ledger writes that are lost.")
@click.option("--metrics-every", type=Finite(0.001, 1e6), default=1.0, help="Seconds between metrics reads.")
@click.option("--metrics-lag", type=SECONDS, default=0.0, help="Seconds by which metrics are old.")
@click.option("--event", "happenings", multiple=True, metavar="S:join|leave|crash:N", help="What befalls replica N.")
@click.option("--warmup", type=SECONDS, default=0.0, help="Seconds whose requests are not counted.")
@click.option("--phases", metavar="S,S,...", help="Times at which a phase ends; conversations count where they began.")
@click.option("--tenants", metavar="SHARE,SHARE,...", help="Shares of conversations that tenants 1, 2, ... have.")
@click.option("--only-tenant", metavar="N", help="Play only this tenant's conversations, at the same times.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="As vLLM's.  [default: its own for the GPU]")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="As vLLM's.  [default: its own for the GPU]")
@click.option(
    "--max-model-len",
    type=click.IntRange(1),
    help="As vLLM's.  [default: the model's context, or what the cache holds]",
)
@click.option("--kv-offloading-size", type=Finite(1e-6, 1e6), metavar="GIB", help="As vLLM's: CPU memory of a replica.")
@click.option("--prefill-efficiency", type=FRACTION, help="Share of the GPU's compute that prefill reaches.")
@click.option("--decode-efficiency", type=FRACTION, help="Share of the GPU's bandwidth that decoding reaches.")
@click.option("--step-times", type=click.Path(path_type=Path), help="Measured step times, CSV or YAML: sim/measured.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with pictures.")
@click.option("--png", type=click.Path(path_type=Path), help="Write the pictures (needs kvroute[plots]).")
def simulate(trace: str, **flags: Any) -> None:
    """Play TRACE on an imagined fleet, under one policy after another, and compare what came of it."""
    try:
        for target in (flags["html"], flags["png"]):
            _check_target(target)
        report = _compare(trace, flags)
        if flags["html"] is not None:
            from kvroute.sim.report_page import page_of

            _write(flags["html"], page_of(report).encode())
        if flags["png"] is not None:
            from kvroute.cli_simulate_png import png_of

            _write(flags["png"], png_of(report))
    except ConfigError as error:
        raise click.ClickException(error.message) from None
    if flags["as_json"]:
        _print_json(report)
    else:
        from kvroute.cli_simulate_table import print_table

        print_table(report)


def _compare(trace: str, flags: dict[str, Any]) -> Report:
    """Run every policy with every seed."""
    from kvroute.sim.report import Report, row_of
    from kvroute.sim.simulation import IGNORED, Simulation
    from kvroute.sim.simulation_settings import check_happenings, happening_of

    policies = _policies(flags["policies"])
    engine, rates = _engine(flags)
    happenings = tuple(happening_of(text) for text in flags["happenings"])
    check_happenings(happenings, flags["replicas"], REPLICAS_MAX)
    phases_s = _phases(flags["phases"])
    with ExitStack() as stack:
        make, total, facts, notes = _workload(trace, flags, stack)
        make = _tenanted(make, flags)
        rows, failures = [], {}
        for policy in policies:
            runs = []
            routers = _routers(policy, rates, flags)
            for seed in range(flags["seed"], flags["seed"] + flags["seeds"]):
                with _progress(f"{policy}, seed {seed}", total) as on_progress:
                    run = Simulation(
                        make(seed),
                        flags["replicas"],
                        engine,
                        routers,
                        seed=seed,
                        happenings=happenings,
                        warmup_s=flags["warmup"],
                        phases_s=phases_s,
                        by_tenant=flags["tenants"] is not None,
                        at_once=flags["max_concurrency"],
                        on_progress=on_progress,
                    )
                    with _naming(trace):
                        runs.append(run.run())
            if not all(run.requests for run in runs):
                raise ConfigError("no request was counted: there is none, or all come before --warmup ends")
            rows.append(row_of(policy, runs))
            failures[policy] = next((run.first_failure for run in runs if run.first_failure), "")
    facts = {**facts, **_facts(engine, flags)}
    facts.update({f"first failure, {policy}": why for policy, why in failures.items() if why})
    return Report(f"{Path(trace).name} on {flags['replicas']} replicas", facts, tuple(rows), (*notes, *IGNORED))


@contextmanager
def _naming(trace: str) -> Iterator[None]:
    """Have errors say which file is at fault."""
    try:
        yield
    except ConfigError as error:
        if Path(trace).is_file() and not error.message.startswith(f"{trace}:"):
            raise ConfigError(f"{trace}: {error.message}") from None
        raise


def _policies(text: str) -> list[str]:
    from kvroute.routing.affinity import affinity_of
    from kvroute.routing.router import POLICIES, is_policy

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if not is_policy(name) and affinity_of(name, None) is None]
    if unknown or not names:
        known = f"{', '.join(POLICIES)}, affinity:N, blend:PREFIX:QUEUE:KV"
        raise ConfigError(f"--policy: {', '.join(map(repr, unknown)) or repr(text)}: name some of {known}")
    if len(names) > POLICIES_MAX:
        raise ConfigError(f"--policy: {len(names)} policies, at most {POLICIES_MAX}")
    return names


def _engine(flags: dict[str, Any]) -> tuple[EngineSettings, Any]:
    """Return the engine, and the rates that a router would start from."""
    from msgspec import structs

    from kvroute.adapters.size_io import read_model
    from kvroute.adapters.sized import sized
    from kvroute.adapters.step_table import read_step_table
    from kvroute.routing.rates import SEED
    from kvroute.sim.engine import RooflineTime, StepTime
    from kvroute.sim.measured import MeasuredTime, rows_of
    from kvroute.sim.presets import limits_of
    from kvroute.sim.simulation_settings import EngineSettings
    from kvroute.sizing.capacity import Parallel
    from kvroute.sizing.hardware import gpu
    from kvroute.sizing.speed import computes_in_8_bits

    count, _, name = (
        flags["hardware"].rpartition("x") if flags["hardware"][:1].isdigit() else ("1", "", flags["hardware"])
    )
    if not count.isdigit() or not 1 <= int(count) <= 64:
        raise ConfigError(f"--hardware: {flags['hardware']!r} is not GPU or NxGPU, such as 2xh100")
    model, hardware, parallel = read_model(flags["model"]), gpu(name), Parallel(tp=int(count))
    if model.query_heads % parallel.tp:
        fitting = [str(tp) for tp in range(1, 65) if not model.query_heads % tp and tp <= 2 * parallel.tp]
        raise ConfigError(
            f"--hardware: {count} GPUs do not divide the {model.query_heads} query heads of {model.name}, and vLLM "
            f"would not start: take {', '.join(fitting)}"
        )
    given = {key: flags[key] for key in ("prefill_efficiency", "decode_efficiency") if flags[key] is not None}
    eight_bit = computes_in_8_bits(model)
    time: StepTime = RooflineTime(model, hardware, parallel=parallel, eight_bit=eight_bit, **given)
    if flags["step_times"] is not None:
        time = MeasuredTime(rows_of(read_step_table(flags["step_times"])))
    known = sized(flags["model"], flags["model"], name, int(count))
    kv_tokens = flags["kv_tokens"] or _cache_tokens(f"{flags['model']}@{count}x{name}", flags, known)
    blocks = kv_tokens // flags["block_size"] * flags["replicas"]
    if blocks > BLOCKS_MAX:
        remedy = "give a larger --block-size, a smaller --kv-tokens or fewer --replicas"
        raise ConfigError(f"the fleet's caches have {blocks:,} blocks, more than {BLOCKS_MAX:,}: {remedy}")
    chosen = {key: flags[key] for key in ("max_num_seqs", "max_num_batched_tokens") if flags[key] is not None}
    limits = structs.replace(limits_of(hardware), **chosen)
    engine = EngineSettings(
        kv_tokens=kv_tokens,
        block_size=flags["block_size"],
        time=time,
        limits=limits,
        model=flags["model"],
        max_model_len=flags["max_model_len"] or model.context_tokens,
        offload=_offload(model, hardware, parallel, flags),
    )
    return engine, known.rates if known else SEED


def _offload(model: Any, hardware: Any, parallel: Any, flags: dict[str, Any]) -> Any:
    """Return the CPU memory behind each cache, None where there is none."""
    from kvroute.sim.presets import GIB, offload_of

    if flags["kv_offloading_size"] is None:
        return None
    offload = offload_of(model, hardware, parallel, flags["block_size"], int(flags["kv_offloading_size"] * GIB))
    if (blocks := offload.num_blocks * flags["replicas"]) > BLOCKS_MAX:
        raise ConfigError(f"--kv-offloading-size: {blocks:,} blocks in the fleet's CPU memory, at most {BLOCKS_MAX:,}")
    return offload


def _cache_tokens(engine: str, flags: dict[str, Any], known: Any) -> int:
    """Return what fits: as vLLM plans it for a preset, else by division."""
    from kvroute.sim.presets import engine_figures
    from kvroute.sizing.presets import PRESETS

    if flags["model"] in PRESETS:
        size, context = flags["block_size"], flags["max_model_len"]
        return engine_figures(engine, block_size=size, max_model_len=context).kv_tokens
    if known is None or known.capacity_tokens < flags["block_size"]:
        raise ConfigError(f"{flags['model']} leaves no room for a cache on {flags['hardware']}: give --kv-tokens")
    return int(known.capacity_tokens)


def _routers(policy: str, rates: Any, flags: dict[str, Any]) -> RouterSettings:
    from kvroute.sim.simulation_settings import RouterSettings

    weight = {} if flags["ttft_weight"] is None else {"ttft_weight": flags["ttft_weight"]}
    return RouterSettings(
        policy=policy,
        count=flags["routers"],
        is_shared=not flags["private"],
        knowledge=flags["knowledge"],
        rates=rates,
        admission=_admission(flags) if flags["hold"] else None,
        event_lag_s=flags["event_lag"],
        event_loss=flags["event_loss"],
        ledger_lag_s=flags["ledger_lag"],
        ledger_loss=flags["ledger_loss"],
        metrics_every_s=flags["metrics_every"],
        metrics_lag_s=flags["metrics_lag"],
        tells_output=flags["tells_output"],
        **weight,
    )


def _admission(flags: dict[str, Any]) -> AdmissionSettings:
    from kvroute.routing.admission import AdmissionSettings

    if flags["holds"] is None:
        return AdmissionSettings(hold_s=flags["hold"])
    return AdmissionSettings(hold_s=flags["hold"], holds_max=flags["holds"] or sys.maxsize, hold_bytes_max=sys.maxsize)


def _phases(text: str | None) -> tuple[float, ...]:
    try:
        ends_s = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        ends_s = (0.0,)
    if len(ends_s) > PHASES_MAX or not all(a < b < 1e9 for a, b in pairwise((0.0, *ends_s))):
        raise ConfigError(f"--phases: {text!r} is not SECONDS,SECONDS,... that grow, at most {PHASES_MAX}")
    return ends_s


def _tenanted(make: MakeWorkload, flags: dict[str, Any]) -> MakeWorkload:
    """Give conversations to tenants, where some are asked for."""
    from kvroute.sim.workload import shares_of, tenanted
    from kvroute.sim.workload_plan import rng_of

    if flags["tenants"] is None:
        _refuse(("only_tenant",), flags, "is one of --tenants")
        return make
    shares, only = shares_of(flags["tenants"]), flags["only_tenant"]
    if only is not None and only not in map(str, range(1, len(shares) + 1)):
        raise ConfigError(f"--only-tenant: {only!r} is not a number from 1 to {len(shares)}", param="only_tenant")
    return lambda seed: tenanted(make(seed), shares, rng_of(seed, "tenants"), only)


def _workload(
    trace: str, flags: dict[str, Any], stack: ExitStack
) -> tuple[MakeWorkload, int | None, dict[str, str], tuple[str, ...]]:
    """Return what makes the workload of a seed, its requests if known, facts about it, and what it leaves out."""
    from kvroute.sim.workload import think_of
    from kvroute.sim.workload_plan import Pace, of_profile, profile_of
    from kvroute.sim.workload_profiles import PROFILES

    pace = Pace(
        loop=flags["loop"],
        rate=flags["rate"],
        starts_s=flags["starts"],
        think=None if flags["think"] is None else think_of(flags["think"]),
        think_cap_s=flags["think_cap"],
        limit=flags["limit"],
        sessions=flags["sessions"],
    )
    name, parameters = profile_of(trace) if trace.partition(":")[0] in PROFILES else ("", {})
    if not name:
        with _naming(trace):
            return _file(Path(trace), flags, pace, stack)
    _refuse(("jitter", "trace_block", "max_prompt"), flags, "is for traces in files")
    size = flags["block_size"]
    return lambda seed: of_profile(name, parameters, size, pace, seed), pace.limit, {"workload": trace}, ()


def _file(
    path: Path, flags: dict[str, Any], pace: Pace, stack: ExitStack
) -> tuple[MakeWorkload, int | None, dict[str, str], tuple[str, ...]]:
    from msgspec import json, structs

    from kvroute.adapters.trace_files import Spool, lines_of
    from kvroute.sim.workload_plan import of_texts, of_trace
    from kvroute.sim.workload_profiles import PROFILES
    from kvroute.sim.workload_trace import Naming, Trace, infer_block_size, read_row

    if not path.exists():
        raise ConfigError(f"TRACE: no file {path}, and no generator of that name ({', '.join(PROFILES)})")
    spool = stack.enter_context(Spool(lines_of(path), longest_tokens=flags["max_prompt"]))
    head = spool.head(HEAD_LINES)
    if not head:
        raise ConfigError(f"{path}: there is nothing in it to play")
    first, size = json.decode(head[0]), flags["block_size"]
    if "messages" in first and "input_length" not in first:
        _refuse(("jitter", "trace_block", "max_prompt"), flags, "is for traces in Mooncake's layout, not for texts")
        note = "text is counted as four bytes a token, without a chat template"
        return lambda seed: of_texts(spool.in_order, size, pace, seed), None, {"workload": str(path)}, (note,)
    rows = [read_row(line) for line in head]
    block = flags["trace_block"] or infer_block_size(rows) or 0
    has_times = rows[0].timestamp is not None
    if has_times and pace.loop in ("open", "alone"):
        _refuse(("think", "starts"), flags, f"closes the loop: leave it out, or --loop {pace.loop}")
    pace = structs.replace(pace, jitter_s=_jitter(flags["jitter"], spool) if has_times and not pace.is_closed else 0.0)
    play = Trace(spool, Naming(block, size))
    facts = {
        "workload": str(path),
        "trace": f"{len(spool):,} requests, {f'blocks of {block}' if block else 'no blocks'}",
    }
    if pace.jitter_s:
        facts["jitter"] = f"{pace.jitter_s:g} s, over which requests stamped together are spread"
    note = "what no block id of the trace covers is never hit" if block else "prompts without block ids share nothing"
    total = min(len(spool), pace.limit or len(spool)) if pace.sessions is None else None
    return lambda seed: of_trace(play, pace, seed, has_times=has_times), total, facts, (note,)


def _refuse(names: tuple[str, ...], flags: dict[str, Any], why: str) -> None:
    """Refuse options that would be ignored."""
    for name in names:
        if flags[name] not in (None, "auto"):
            raise ConfigError(f"--{name.replace('_', '-')} {why}", param=name)


def _check_target(path: Path | None) -> None:
    """Find out before a long run, not after it, that its report cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path}: Is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}")


def _jitter(text: str, spool: Any) -> float:
    if text == "auto":
        steps = spool.steps()
        return float(steps.width_s) if steps.is_coarse else 0.0
    try:
        width_s = 0.0 if text == "none" else float(text)
    except ValueError:
        width_s = -1.0
    if not 0 <= width_s < 1e6:
        raise ConfigError(f"--jitter: {text!r} is none of auto, none, SECONDS")
    return width_s


def _facts(engine: EngineSettings, flags: dict[str, Any]) -> dict[str, str]:
    facts = {
        "replicas": f"{flags['replicas']} x {flags['model']} on {flags['hardware']}",
        "cache": f"{engine.kv_tokens:,} tokens each, in blocks of {engine.block_size}",
        **({"CPU memory": f"{engine.offload.num_blocks * engine.block_size:,} tokens each"} if engine.offload else {}),
        "context": f"{engine.context_tokens:,} tokens",
        "knowledge": flags["knowledge"],
    }
    if flags["routers"] > 1:
        facts["routers"] = f"{flags['routers']}, {'private' if flags['private'] else 'shared'}"
    for option in simulate.params:
        name = option.name or ""
        if name not in SHOWN and flags[name] not in (None, False, (), option.default):
            facts[name] = ", ".join(flags[name]) if option.multiple else str(flags[name])
    facts["seeds"] = (
        f"{flags['seed']} to {flags['seed'] + flags['seeds'] - 1}" if flags["seeds"] > 1 else str(flags["seed"])
    )
    return facts


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Progress | None]:
    """Show a bar on a terminal; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} requests, {task.fields[at]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, at="")
        yield lambda done, at_s: bar.update(task, completed=done, at=f"{at_s:,.0f} s simulated")


def _print_json(report: Report) -> None:
    from msgspec import json

    from kvroute.sim.report import plain

    click.echo(json.format(json.encode(plain(report)), indent=2))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    click.echo(f"wrote {path}", err=True)
