"""GET /admin/holds: who waits for memory and for how long, which conversations live where, and what was learnt."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import msgspec
from aiohttp import web

from kvroute.proxy.stats import HoldStats
from kvroute.routing.router import Router

ROWS_MAX = 500  # held requests that are listed, the longest first; the counters know all of them


class Holds:
    """Answers for one router."""

    def __init__(self, *, router: Router, stats: HoldStats, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._stats = stats
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """Return what the admin listener serves of this."""
        return [web.get("/admin/holds", self.answer)]

    async def answer(self, _request: web.Request) -> web.Response:
        """Describe what is held now, and what became of holds."""
        return web.Response(body=msgspec.json.encode(self.report()), content_type="application/json")

    def report(self) -> dict[str, Any]:
        """Return the answer as values."""
        admission, stats = self._router.admission, self._stats
        counts = {
            "now": stats.now,
            "begun": stats.begun,
            **stats.ended,
            "refused": stats.refused,
            "longest_s": stats.longest_s,
        }
        if admission is None:
            return {"is_on": False, "counts": counts, "held": [], "live": [], "learnt": []}
        admission.advance(self._clock())
        standing = msgspec.to_builtins(admission.standing())
        standing["held"] = standing["held"][:ROWS_MAX]
        return {"is_on": True, "counts": counts, **standing}


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several processes' reports as one: what waits side by side, what lives added up.

    Each process learns for itself. Of what they learnt, the one that has seen most speaks for all.
    """
    counts = {name: sum(report["counts"][name] for report in reports) for name in reports[0]["counts"]}
    counts["longest_s"] = max(report["counts"]["longest_s"] for report in reports)
    held = sorted((row for report in reports for row in report["held"]), key=lambda row: -row["waited_s"])
    live: dict[str, dict[str, Any]] = {}
    for row in (row for report in reports for row in report["live"]):
        known = live.setdefault(row["replica"], dict.fromkeys(row, 0) | {"replica": row["replica"]})
        for name in ("conversations", "under_way", "now_tokens", "peak_tokens"):
            known[name] += row[name]
        for name in ("capacity_tokens", "limit_tokens"):
            known[name] = max(known[name], row[name])
    learnt: dict[str, dict[str, Any]] = {}
    for row in (row for report in reports for row in report["learnt"]):
        if row["turns_seen"] >= learnt.get(row["model"], row)["turns_seen"]:
            learnt[row["model"]] = row
    figures: dict[str, Any] = {}
    if on := [report for report in reports if report["is_on"]]:
        figures = {name: fmean(report[name] for report in on) for name in ("fill", "lost")}
        figures["held_bytes"] = sum(report["held_bytes"] for report in on)
    tables = {"held": held[:ROWS_MAX], "live": list(live.values()), "learnt": list(learnt.values())}
    return {"is_on": bool(on), "counts": counts, **tables, **figures}
