"""GET and POST /admin/policy, and GET /admin/shadow: which policy is followed, which are asked beside it.

A policy is switched without a restart: replicas, leases, the index and what was learnt stay. It lasts until the process
ends or its settings are read again.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from kvroute.errors import BadRequest, ConfigError
from kvroute.proxy.admin_site import refusal
from kvroute.proxy.placing import Placing
from kvroute.routing.router import POLICIES, Router
from kvroute.routing.shadow import Tally

log = logging.getLogger("kvroute.policy")

SUMS = tuple(name for name in Tally.__struct_fields__ if name not in ("policy", "placed"))


class Order(Struct, frozen=True, forbid_unknown_fields=True):
    """What to change; absent stays as it is."""

    policy: str | None = None
    ttft_weight: Annotated[float, Meta(ge=0, le=1)] | None = None
    shadow: tuple[str, ...] | None = None


class Policies:
    """Answers for one router."""

    def __init__(self, *, router: Router, placing: Placing) -> None:
        self._router = router
        self._placing = placing

    def routes(self) -> list[web.RouteDef]:
        """Return what the admin listener serves of this."""
        return [
            web.get("/admin/policy", self.answer),
            web.post("/admin/policy", self.order),
            web.get("/admin/shadow", self.shadow),
        ]

    async def answer(self, _request: web.Request) -> web.Response:
        """Say what is followed, and what could be."""
        return _json(self._state() | {"choices": POLICIES})

    async def order(self, request: web.Request) -> web.Response:
        """Switch, all of it or, where something is wrong, nothing."""
        try:
            self.follow(_order(await request.read()))
        except (BadRequest, ConfigError) as error:
            return refusal(400, error.message, error.param)
        return _json(self._state())

    def follow(self, order: Order) -> None:
        """Switch.

        Raises:
            ConfigError: there is no such policy.
        """
        router = self._router
        router.switch(
            router.policy if order.policy is None else order.policy,
            ttft_weight=router.ttft_weight if order.ttft_weight is None else order.ttft_weight,
            shadows=self._shadows() if order.shadow is None else order.shadow,
        )
        self._placing.changed()  # what was held goes where the new policy says
        log.info("routing by %s, ttft_weight %s, beside it %s", *self._state().values())

    async def shadow(self, _request: web.Request) -> web.Response:
        """Compare what others would have chosen with what was followed."""
        return _json(report(self._router.policy, [msgspec.to_builtins(tally) for tally in self._tallies()]))

    def _state(self) -> dict[str, Any]:
        return {
            "policy": self._router.policy,
            "ttft_weight": self._router.ttft_weight,
            "shadow": self._shadows(),
        }

    def _tallies(self) -> tuple[Tally, ...]:
        return () if self._router.shadows is None else self._router.shadows.tallies

    def _shadows(self) -> tuple[str, ...]:
        return tuple(tally.policy for tally in self._tallies())


def _order(body: bytes) -> Order:
    try:
        return msgspec.json.decode(body, type=Order)
    except msgspec.DecodeError as error:
        fields = ", ".join(f"`{name}`" for name in Order.__struct_fields__)
        raise BadRequest(f"{error}; the body is a JSON object of any of {fields}") from None


def report(policy: str, tallies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return sums with the means and shares that they make. Costs are predicted ones, in seconds."""
    return {"policy": policy, "shadows": [row | _means(row) for row in tallies]}


def _means(row: dict[str, Any]) -> dict[str, float | None]:
    placements, tokens = row["placements"], row["prompt_tokens"]
    return {
        "same_share": row["same"] / placements if placements else None,
        "mean_cost_s": row["cost_s"] / placements if placements else None,
        "our_mean_cost_s": row["our_cost_s"] / placements if placements else None,
        "hit_share": row["hit_tokens"] / tokens if tokens else None,
        "our_hit_share": row["our_hit_tokens"] / tokens if tokens else None,
    }


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several processes' reports as one."""
    sums: dict[str, dict[str, Any]] = {}
    for row in (row for each in reports for row in each["shadows"]):
        known = sums.setdefault(row["policy"], {"policy": row["policy"], **dict.fromkeys(SUMS, 0), "placed": {}})
        for name in SUMS:
            known[name] += row[name]
        for replica, count in row["placed"].items():
            known["placed"][replica] = known["placed"].get(replica, 0) + count
    return report(reports[0]["policy"], list(sums.values()))


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
