"""What a comparison of policies found: figures by policy, each as a mean over seeds with its spread.

`METRICS` is the one list of figures: tables, pages and JSON are all made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from msgspec import Struct

from kvroute.sim.simulation_figures import Outcomes, Phase
from kvroute.sizing.words import three_digits

Value = Callable[[Outcomes], float]


class Metric(Struct, frozen=True):
    """One figure of a run."""

    key: str  # in JSON
    label: str
    unit: str  # s, share, tokens/s, tokens, x, or empty for a count
    value: Value
    is_better_low: bool | None = None  # None: neither


def metric(key: str, label: str, unit: str, value: Value, better: str = "") -> Metric:
    """Describe a figure; better is low, high or neither."""
    return Metric(key, label, unit, value, {"low": True, "high": False}.get(better))


METRICS = (
    metric("reached_share", "hits of those reachable", "share", lambda run: run.reached_share, "high"),
    metric("hit_share", "hits of prompt tokens", "share", lambda run: run.hit_share, "high"),
    metric("reachable_share", "reachable of prompt tokens", "share", lambda run: run.reachable_share),
    metric("ttft_mean_s", "first token, mean", "s", lambda run: run.ttft.mean, "low"),
    metric("ttft_p50_s", "first token, p50", "s", lambda run: run.ttft.p50, "low"),
    metric("ttft_p90_s", "first token, p90", "s", lambda run: run.ttft.p90, "low"),
    metric("ttft_p99_s", "first token, p99", "s", lambda run: run.ttft.p99, "low"),
    metric("token_time_mean_s", "time per output token, mean", "s", lambda run: run.token_time.mean, "low"),
    metric("token_time_p99_s", "time per output token, p99", "s", lambda run: run.token_time.p99, "low"),
    metric("end_to_end_mean_s", "end to end, mean", "s", lambda run: run.end_to_end.mean, "low"),
    metric("end_to_end_p99_s", "end to end, p99", "s", lambda run: run.end_to_end.p99, "low"),
    metric("output_tokens_s", "output tokens a second", "tokens/s", lambda run: run.output_tokens_s, "high"),
    metric("preemptions", "preemptions", "", lambda run: run.preemptions, "low"),
    metric("recomputed_tokens", "recomputed after preemption", "tokens", lambda run: run.recomputed_tokens, "low"),
    metric("refault_tokens", "refaults: evicted, then asked for", "tokens", lambda run: run.refault_tokens, "low"),
    metric("imbalance", "imbalance: busiest over mean", "x", lambda run: run.imbalance, "low"),
    metric("held_share", "requests held", "share", lambda run: run.held.count / max(run.requests, 1)),
    metric("held_mean_s", "held time, mean of those held", "s", lambda run: run.held.mean, "low"),
    metric("held_most_s", "held time, longest", "s", lambda run: run.held.most, "low"),
    metric("conversation_mean_s", "whole conversation, mean", "s", lambda run: run.conversation.mean, "low"),
    metric("conversation_p90_s", "whole conversation, p90", "s", lambda run: run.conversation.p90, "low"),
    metric("conversation_most_s", "whole conversation, slowest", "s", lambda run: run.conversation.most, "low"),
    metric("conversations_lost", "conversations lost", "", lambda run: run.lost, "low"),
    metric("requests", "requests", "", lambda run: run.requests),
    metric("failed", "failed", "", lambda run: run.failed, "low"),
)
CONVERSATIONS = {"conversation_mean_s", "conversation_p90_s", "conversation_most_s", "conversations_lost"}
HOLDS = {"held_share", "held_mean_s", "held_most_s"}


class Figure(Struct, frozen=True):
    """A figure over seeds."""

    mean: float
    least: float
    most: float


class Row(Struct, frozen=True):
    """One policy."""

    policy: str
    figures: dict[str, Figure]  # by the key of the metric
    runs: tuple[Outcomes, ...]  # by seed


class Report(Struct, frozen=True):
    """A comparison."""

    title: str
    facts: dict[str, str]  # what was simulated, in the order in which to show it
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what the result ignores


def row_of(policy: str, runs: Sequence[Outcomes]) -> Row:
    """Sum up the runs of one policy."""
    figures = {}
    for one in METRICS:
        values = [one.value(run) for run in runs]
        figures[one.key] = Figure(fmean(values), min(values), max(values))
    return Row(policy, figures, tuple(runs))


def shown(report: Report) -> list[Metric]:
    """Return the figures that say something here: nobody held, no conversations and so on are left out."""
    runs = [run for row in report.rows for run in row.runs]
    has_talks = any(run.scripts and run.requests > run.scripts for run in runs)
    has_holds = any(run.held.count for run in runs)
    hidden = (set() if has_talks else CONVERSATIONS) | (set() if has_holds else HOLDS)
    return [one for one in METRICS if one.key not in hidden]


def best_of(report: Report, one: Metric) -> set[str]:
    """Return who is best by a figure, as it reads; nobody where all read the same, or nothing is better."""
    if one.is_better_low is None:
        return set()
    means = {row.policy: row.figures[one.key].mean for row in report.rows}
    best = number((min if one.is_better_low else max)(means.values()), one.unit)
    found = {policy for policy, mean in means.items() if number(mean, one.unit) == best}
    return found if len(found) < len(means) else set()


def words(figure: Figure, unit: str) -> str:
    """Write a figure, and its spread where seeds differ."""
    text = number(figure.mean, unit)
    reach = (figure.most - figure.least) / 2
    return f"{text} ± {number(float(f'{reach:.2g}'), unit, lambda part: f'{part:g}')}" if reach > 0 else text


def number(value: float, unit: str, digits: Callable[[float], str] = three_digits) -> str:
    """Write a value with the digits that matter."""
    if unit == "share":
        return f"{value:.3f}"
    if unit == "s":
        return (
            f"{value:,.1f} s" if value >= 100 else f"{digits(value)} s" if value >= 1 else f"{digits(value * 1000)} ms"
        )
    if unit == "x":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


PHASE_METRICS: dict[str, Callable[[Phase], float]] = {
    "begin_s": lambda phase: phase.begin_s,
    "completed": lambda phase: phase.completed,
    "failed": lambda phase: phase.failed,
    "hit_share": lambda phase: phase.hit_tokens / max(phase.prompt_tokens, 1),
    "output_tokens_s": lambda phase: phase.output_tokens / max(phase.last_s - phase.begin_s, 1e-9),
    "ttft_mean_s": lambda phase: phase.ttft.mean,
    "ttft_p90_s": lambda phase: phase.ttft.p90,
    "end_to_end_mean_s": lambda phase: phase.end_to_end.mean,
    "held_share": lambda phase: phase.held.count / max(phase.completed, 1),
}


def phases_of(runs: Sequence[Outcomes]) -> list[dict[str, float]]:
    """Return the figures of every phase, as means over seeds."""
    by_phase = zip(*(run.phases for run in runs), strict=True)
    return [{key: fmean(map(value, phases)) for key, value in PHASE_METRICS.items()} for phases in by_phase]


def tenants_of(runs: Sequence[Outcomes]) -> dict[str, dict[str, float]]:
    """Return the figures of every tenant that all runs have, as means over seeds."""
    names = [name for name in runs[0].tenants if all(name in run.tenants for run in runs)]
    return {
        name: {key: fmean(value(run.tenants[name]) for run in runs) for key, value in PHASE_METRICS.items()}
        for name in names
    }


def plain(report: Report) -> dict[str, object]:
    """Return a report as plain values, for JSON."""
    return {
        "title": report.title,
        "settings": report.facts,
        "ignored": report.notes,
        "policies": {
            row.policy: {
                "summary": {key: {"mean": f.mean, "min": f.least, "max": f.most} for key, f in row.figures.items()},
                "runs": [of_run(run) for run in row.runs],
                **({"phases": phases_of(row.runs)} if row.runs[0].phases else {}),
                **({"tenants": tenants_of(row.runs)} if row.runs[0].tenants else {}),
            }
            for row in report.rows
        },
    }


def of_run(run: Outcomes) -> dict[str, object]:
    """Return one run as plain values; of a workload with stages, with those of each."""
    found: dict[str, object] = {"seed": run.seed, **{one.key: one.value(run) for one in METRICS}}
    if run.stages:
        found["stages"] = [
            {
                "requests": stage.requests,
                "seconds": stage.span_s,
                "output_tokens_s": stage.output_tokens_s,
                "ttft_mean_s": stage.ttft.mean,
                "ttft_p90_s": stage.ttft.p90,
            }
            for stage in run.stages
        ]
    return found
