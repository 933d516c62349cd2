"""Sizing results on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvroute.sizing.engine_log import EngineLog
from kvroute.sizing.remedies import Headroom
from kvroute.sizing.report import Machine, Report
from kvroute.sizing.verdict import Verdict
from kvroute.sizing.words import bytes_words, count, gb, room, seconds, tokens


def print_report(report: Report, console: Console) -> None:
    """Print the whole report: the model, what a conversation takes, and each machine beside the others."""
    console.print(f"[bold]{report.model}[/]: {_layers(report)}", highlight=False)
    console.print(_model(report))
    for note in report.notes:
        console.print(f"  note: {note}", style="dim", highlight=False)
    console.print()
    console.print(_lengths(report))
    if report.machines:
        console.print(_machines(report))
        if any(machine.vllm for machine in report.machines):
            console.print(_plans(report))
            console.print()
        if any(machine.decode for machine in report.machines):
            console.print(_decode(report))
        if any(machine.prefill for machine in report.machines):
            console.print(_prefill(report))
    for machine in report.machines:
        for warning in machine.warnings:
            console.print(f"warning: {machine.gpus} x {machine.gpu}: {warning}", style="yellow", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, min_width=60)
    for number, column in enumerate(columns):
        # A figure that is too wide goes on in the next line: cut off it would look like a smaller one.
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _layers(report: Report) -> str:
    kinds = (
        (report.full_layers, "with all tokens"),
        (report.window_layers, "with a window"),
        (report.state_layers, "with a state"),
    )
    return f"{report.layers} layers, " + ", ".join(f"{count} {words}" for count, words in kinds if count)


def _model(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("bytes a token", f"{bytes_words(report.kv_bytes_per_token)}, {report.cache_dtype} cache")
    if report.kv_bytes_per_token_all_layers != report.kv_bytes_per_token:
        table.add_row("  if windows are kept whole", bytes_words(report.kv_bytes_per_token_all_layers))
    if report.state_bytes_per_sequence:
        table.add_row("bytes a sequence besides", bytes_words(report.state_bytes_per_sequence))
    if report.parameters and report.active_parameters:
        active = f", {count(report.active_parameters)} active" if report.active_parameters < report.parameters else ""
        table.add_row("parameters", f"{count(report.parameters)}{active}")
    if report.weights_bytes:
        table.add_row("weights", gb(report.weights_bytes))
    if report.shared_prefix_bytes:
        unshared, shared = report.shared_prefix_bytes
        table.add_row("common prefix", f"{unshared / 1e9:,.2f} GB unshared, {shared / 1e9:,.2f} GB shared")
    if report.mix_bytes:
        table.add_row("mean conversation of the mix", bytes_words(report.mix_bytes))
    return table


def _lengths(report: Report) -> Table:
    whole = report.window_layers > 0
    table = _table("One conversation", "tokens", "cache", *(["windows kept whole"] if whole else []))
    for row in report.lengths:
        table.add_row(tokens(row.tokens), gb(row.kv_bytes), *([gb(row.kv_bytes_all_layers)] if whole else []))
    return table


def _name(machine: Machine) -> str:
    return f"{machine.gpus} x {machine.gpu}"


def _machines(report: Report) -> Table:
    table = _table(
        "Conversations that fit (with an FP8 cache)", "tokens each", *(_name(one) for one in report.machines)
    )
    table.add_row("for the cache", *(room(one.usable_bytes) for one in report.machines))
    table.add_row("tokens", *(tokens(one.capacity_tokens) for one in report.machines))
    for number, row in enumerate(report.lengths):
        fits = (one.fits[number] for one in report.machines)
        table.add_row(tokens(row.tokens), *(f"{fit.conversations:,} ({fit.conversations_fp8:,})" for fit in fits))
    if any(one.mix_conversations is not None for one in report.machines):
        table.add_row("of the mix", *(f"{one.mix_conversations or 0:,}" for one in report.machines))
    return table


def _plans(report: Report) -> Table:
    planned = [one for one in report.machines if one.vllm]
    length = next((one.vllm.max_model_len for one in planned if one.vllm), 0)
    title = f"As vLLM plans it with --max-model-len {length:,}"
    table = _table(title, "", "tokens", "at once", "blocks", "of tokens", "groups", "starts up to")
    for one in planned:
        if plan := one.vllm:
            table.add_row(
                _name(one),
                tokens(plan.tokens),
                f"{plan.max_concurrency:,.2f}x",
                f"{plan.blocks:,}",
                f"{plan.block_size:,}",
                f"{plan.groups}",
                tokens(plan.longest_start),
            )
    table.caption = "\n".join(_reasons({_name(one): one.vllm.differs for one in planned if one.vllm}))
    table.caption_justify = "left"
    return table


def _reasons(differs: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """Why plans differ from the ideal: what holds for every machine once, the rest with the machine's name."""
    common = set.intersection(*(set(reasons) for reasons in differs.values()))
    for name, reasons in differs.items():
        yield from (f"{name}: {reason}" for reason in reasons if reason not in common)
    yield from (reason for reason in next(iter(differs.values())) if reason in common)


def _decode(report: Report) -> Table:
    batches = list(dict.fromkeys(row.batch for machine in report.machines for row in machine.decode))
    table = _table(
        "Decode floor: tokens/s a user ([dim]dim[/]: does not fit)",
        "GPUs, history",
        *(f"batch {one}" for one in batches),
    )
    for machine in report.machines:
        for length in dict.fromkeys(row.tokens for row in machine.decode):
            cells = [
                f"{row.tokens_per_s_per_user:,.0f}" if row.fits else f"[dim]{row.tokens_per_s_per_user:,.0f}[/]"
                for row in machine.decode
                if row.tokens == length
            ]
            table.add_row(f"{_name(machine)}, {tokens(length)}", *cells)
    return table


def _prefill(report: Report) -> Table:
    names = next((list(machine.copy_pays_from_tokens) for machine in report.machines if machine.prefill), [])
    table = _table("Prefill floor, or a copy from", "GPUs, prefix", "compute", *names)
    for machine in report.machines:
        for row in machine.prefill:
            copies = [seconds(value) for value in row.copy_s.values()]
            table.add_row(f"{_name(machine)}, {tokens(row.tokens)}", seconds(row.total_s), *copies)
        if machine.prefill:
            pays = (_pays(value) for value in machine.copy_pays_from_tokens.values())
            table.add_row(f"{_name(machine)}: a copy pays from", "", *pays)
    return table


def _pays(value: int | None) -> str:
    if value is None:
        return "never"
    return f"{value:,} token{'s' if value > 1 else ''}"


def print_verdict(log: EngineLog, verdict: Verdict, console: Console) -> None:
    """Say whether a start-up log's figures agree with its configuration."""
    version = f"vLLM {log.version}: " if log.version else ""
    reported = f"{log.tokens:,} tokens reported" if log.tokens is not None else "no token count"
    console.print(f"{version}{reported}", highlight=False)
    if verdict.expected_tokens:
        least, most = verdict.expected_tokens
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        console.print(f"expected from this model and the memory in the log: {span} tokens", highlight=False)
    words = {True: "[green]agrees[/]", False: "[red]does not agree[/]", None: "[yellow]cannot be compared[/]"}
    console.print(words[verdict.agrees])
    _listed("finding", verdict.findings, console)
    _listed("assumed", verdict.assumed, console)


def print_headroom(found: Headroom, console: Console, title: str = "") -> None:
    """Say how close an engine is to its limit, and what would help."""
    console.print(f"{title}{found.state}", style="red" if found.close else "green", highlight=False)
    if found.mean_tokens and found.fitting is not None:
        console.print(f"a conversation holds {found.mean_tokens:,} tokens; {found.fitting:,} such fit", highlight=False)
    table = _table("Remedies", "", "conversations", "what it does")
    for remedy in found.remedies:
        count = "" if remedy.conversations is None else f"{remedy.conversations:,}"
        table.add_row(remedy.name, count, remedy.what)
    table.columns[2].justify = "left"
    console.print(table)


def _listed(word: str, lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(f"  {word}: {line}", highlight=False)
