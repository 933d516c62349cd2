"""A sizing report as one self-contained HTML page: tables and plots, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvroute.sizing.capacity import cache_bytes, kv_bytes, kv_bytes_per_gpu
from kvroute.sizing.model import Model
from kvroute.sizing.plot import Line, escape, plot
from kvroute.sizing.report import Machine, Report
from kvroute.sizing.words import bytes_words, count, gb, room, seconds, tokens

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .5rem 0 } th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd }
td, th { text-align: right } th:first-child, td:first-child { text-align: left }
.warn { color: #a02020 } .note { color: #666 } svg { max-width: 40rem; width: 100%; font: 12px system-ui, sans-serif }
svg .grid { stroke: #e5e5e5 } svg .title { font-weight: 600; font-size: 13px } svg text { fill: currentColor }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd } th, td { border-color: #333 } svg .grid { stroke: #333 }
  .warn { color: #ff8080 } .note { color: #999 }
}
"""
STEPS = 48  # points of a curve


def page_of(report: Report, model: Model) -> str:
    """Write the page. `model` is the one of the report; its curves are drawn from it."""
    body = [
        f"<h1>{escape(report.model)}: what its KV cache takes</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        _table(("", ""), _facts(report)),
        "<h2>A conversation</h2>",
        plot("Bytes of one conversation", "tokens", "bytes", _bytes_lines(report, model)),
        *(part for machine in report.machines for part in _machine(machine)),
        plot("Conversations that fit", "tokens of each", "conversations", _fit_lines(report, model)),
        plot(
            "Decode floor with the whole batch at one length",
            "tokens of history",
            "tokens/s a user",
            _speed_lines(report),
        ),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(report.model)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _facts(report: Report) -> Iterable[tuple[str, str]]:
    yield "bytes a token of a long conversation", bytes_words(report.kv_bytes_per_token)
    if report.kv_bytes_per_token_all_layers != report.kv_bytes_per_token:
        yield "bytes a token where all layers keep it", bytes_words(report.kv_bytes_per_token_all_layers)
    if report.state_bytes_per_sequence:
        yield "recurrent state of a sequence", bytes_words(report.state_bytes_per_sequence)
    yield (
        "layers: all tokens / window / state",
        f"{report.full_layers} / {report.window_layers} / {report.state_layers}",
    )
    if report.parameters and report.active_parameters:
        yield "parameters (active)", f"{count(report.parameters)} ({count(report.active_parameters)})"
    if report.weights_bytes:
        yield "weights", gb(report.weights_bytes)


def _machine(machine: Machine) -> Iterable[str]:
    yield f"<h2>{machine.gpus} x {escape(machine.gpu)}: {room(machine.usable_bytes)} for the cache</h2>"
    yield from (f'<p class="warn">{escape(warning)}</p>' for warning in machine.warnings)
    yield _table(
        ("tokens each", "conversations", "with an FP8 cache"),
        [(tokens(fit.tokens), f"{fit.conversations:,}", f"{fit.conversations_fp8:,}") for fit in machine.fits],
    )
    if machine.vllm:
        yield "".join(f'<p class="note">{escape(reason)}</p>' for reason in machine.vllm.differs)
    yield _table(
        ("prefix", "prefill floor", *(f"copy from {name}" for name in machine.copy_pays_from_tokens)),
        [
            (tokens(row.tokens), seconds(row.total_s), *(seconds(value) for value in row.copy_s.values()))
            for row in machine.prefill
        ],
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    if not cells:
        return ""
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if any(head) else ""
    return f"<table>{top}{''.join(cells)}</table>"


def _curve(most: int, value: Callable[[int], float]) -> tuple[tuple[float, float], ...]:
    """Sample a function of length at evenly spaced points of a logarithmic axis."""
    lengths = dict.fromkeys(max(1, round(most ** (step / STEPS))) for step in range(STEPS // 4, STEPS + 1))
    return tuple((float(length), float(value(length))) for length in lengths)


def _most(report: Report) -> int:
    return max((report.context_tokens or 0, *(row.tokens for row in report.lengths)))


def _bytes_lines(report: Report, model: Model) -> list[Line]:
    size = cache_bytes(report.cache_dtype, model)
    lines = [Line("this cache", _curve(_most(report), lambda length: kv_bytes(model, length, size)))]
    if report.window_layers:
        whole = _curve(_most(report), lambda length: kv_bytes(model, length, size, windows=False))
        lines.append(Line("windows kept whole", whole, dashed=True))
    if size > 1:
        lines.append(Line("FP8 cache", _curve(_most(report), lambda length: kv_bytes(model, length, 1)), dashed=True))
    return lines


def _fit_lines(report: Report, model: Model) -> list[Line]:
    size = cache_bytes(report.cache_dtype, model)

    def fitting(machine: Machine) -> Callable[[int], float]:
        spread, room = machine.parallel, machine.per_gpu_bytes
        return lambda length: spread.dp * (room // max(1, kv_bytes_per_gpu(model, length, spread, size)))

    return [
        Line(f"{machine.gpus} x {machine.gpu}", _curve(_most(report), fitting(machine)))
        for machine in report.machines
        if machine.per_gpu_bytes > 0
    ]


def _speed_lines(report: Report) -> list[Line]:
    lines = []
    for machine in report.machines:
        for batch in dict.fromkeys(row.batch for row in machine.decode):
            rows = [row for row in machine.decode if row.batch == batch]
            points = tuple((float(row.tokens), row.tokens_per_s_per_user) for row in rows)
            lines.append(Line(f"{machine.gpu}, batch {batch}", points, dashed=not all(row.fits for row in rows)))
    return lines
