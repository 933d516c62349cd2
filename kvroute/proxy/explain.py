"""POST /admin/explain: what would become of a request, and why. Nothing is booked, sent or remembered.

The body is a request as a client would send it. Query parameters: `path` (its route; without it, chats and completions
are told apart by their fields), `tenant` and `priority`. The answer has, in this order, how the prompt was read, what
each replica holds of it, what it would cost on each, term by term, and what admission would say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvroute.adapters.index import Index
from kvroute.errors import BadRequest, KvrouteError, NoReplica
from kvroute.kv.block_tree import TIERS
from kvroute.proxy import openai
from kvroute.proxy.catalogue import Catalogue
from kvroute.proxy.question import Asker, Question
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.honesty import Honesty
from kvroute.routing.replica import ReplicaId
from kvroute.routing.router import KVROUTE, Offer, Router
from kvroute.routing.seen import SeenWindow
from kvroute.routing.standing import Foresight

PRIORITY_MAX = 1000
FORGETFUL = 2  # marks of a window in which nothing stays: what is asked here was not sent


class Explain:
    """Answers for one router."""

    def __init__(
        self,
        *,
        router: Router,
        index: Index,
        honesty: Honesty,
        catalogue: Catalogue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._catalogue = catalogue
        self._clock = clock
        self._asker = Asker(index, SeenWindow(FORGETFUL), HandlerStats(), honesty)

    def routes(self) -> list[web.RouteDef]:
        """Return what the admin listener serves of this."""
        return [web.post("/admin/explain", self.answer)]

    async def answer(self, request: web.Request) -> web.Response:
        """Explain one request."""
        try:
            body = await request.read()
            found = await self._explain(body, request.query)
        except KvrouteError as error:
            return web.Response(status=error.status, body=openai.error_body(error), content_type="application/json")
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    async def _explain(self, body: bytes, query: Mapping[str, str]) -> dict[str, Any]:
        inference = openai.parse(_path(query.get("path"), body), body)
        served = self._catalogue.find(inference.model)
        if served is None:
            raise self._no_model(inference.model)
        tenant, priority = query.get("tenant", "default"), _priority(query.get("priority", "0"))
        question = await self._asker.ask(inference, served, tenant, priority)
        now_s, router = self._clock(), self._router
        offers = router.explain(question.demand, question.hits, now_s, stored=question.stored)
        admission, foresight = self._admission(question, now_s)
        return {
            "prompt": _prompt(question, inference, router),
            "holdings": _holdings(question, offers),
            "policy": router.policy,
            "ttft_weight": router.ttft_weight,
            "choice": _choice(router.policy, offers, foresight, is_refused=admission["verdict"] == "refused"),
            "offers": [_offer(offer) for offer in offers],
            "admission": admission,
        }

    def _no_model(self, model: str | None) -> KvrouteError:
        names = self._catalogue.names()
        if not names:
            return NoReplica("No replica has been seen yet; try again")
        return openai.which_model(names) if model is None else openai.unknown_model(model, names)

    def _admission(self, question: Question, now_s: float) -> tuple[dict[str, Any], Foresight | None]:
        try:
            foresight = self._router.foresee(question.demand, question.hits, now_s, question.stored)
        except KvrouteError as error:
            return {"verdict": "refused", "status": error.status, "reason": error.message}, None
        if foresight is None:
            return {"verdict": "goes", "reason": "nothing is ever held: routing.holds or the policy says so"}, None
        verdict = "waits" if foresight.replica is None else "goes"
        return {"verdict": verdict, **msgspec.to_builtins(foresight)}, foresight


def _path(given: str | None, body: bytes) -> str:
    if given is None:
        return "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
    if given not in openai.ROUTES:
        raise BadRequest(f"There is no route {given}; `path` is one of {', '.join(openai.ROUTES)}", param="path")
    return given


def _priority(text: str) -> int:
    try:
        priority = int(text)
    except ValueError:
        priority = PRIORITY_MAX + 1
    if abs(priority) > PRIORITY_MAX:
        raise BadRequest(f"`priority` is a number from -{PRIORITY_MAX} to {PRIORITY_MAX}", param="priority")
    return priority


def _prompt(question: Question, inference: openai.Inference, router: Router) -> dict[str, Any]:
    reader, demand = question.served.entry.reader, question.demand
    return {
        "model": demand.model,
        "kind": inference.kind,
        "prompts": len(question.prompts),  # 0: it was not understood, and only its size was guessed
        "tokens": demand.prompt_tokens,
        "blocks": sum(len(prompt.chain) >> 3 for prompt in question.prompts),
        "block_size": demand.block_size,
        "exact": demand.exact,
        "read_by": reader.mode,
        "why": reader.why,
        "sequences": demand.sequences,
        "expected_output_tokens": router.fleet.outputs.expect(demand),
        "reads_cache": inference.reads_cache,
        "tenant": demand.tenant,
        "priority": demand.priority,
        "index": question.match.source,
    }


def _holdings(question: Question, offers: list[Offer]) -> list[dict[str, Any]]:
    return [_holding(question, offer.placement.replica) for offer in offers]


def _holding(question: Question, replica: ReplicaId) -> dict[str, Any]:
    """Say what one replica holds: leading blocks by tier, each with the faster tiers counted in, and what counts."""
    match = question.match
    blocks = {TIERS[0]: sum(holding.get(replica, 0) for holding in match.holdings)}
    for at, name in enumerate(TIERS[1:]):
        held = sum(tiers[at].get(replica, 0) for tiers in match.slower if at < len(tiers))
        if held:
            blocks[name] = held
    hit_tokens = question.hits.get(replica, 0)
    stored = max(question.stored.get(replica, 0), hit_tokens)
    return {"replica": replica, "blocks": blocks, "hit_tokens": hit_tokens, "stored_tokens": stored}


def _offer(offer: Offer) -> dict[str, Any]:
    placement = offer.placement
    return {
        "replica": placement.replica,
        "cost_s": placement.cost_s,
        "terms_s": placement.terms,
        "hit_tokens": placement.hit_tokens,
        "miss_tokens": placement.miss_tokens,
        "in_flight": offer.in_flight,
        "obstacle": offer.obstacle,
        "is_tied": offer.is_tied,
    }


def _choice(policy: str, offers: list[Offer], foresight: Foresight | None, *, is_refused: bool) -> dict[str, Any]:
    """Say who would get the request now, and why that one."""
    best = next((offer for offer in offers if offer.is_chosen), None)
    if best is None or is_refused:
        return {"replica": None, "why": "no replica may have it"}
    if policy != KVROUTE:
        return {"replica": None, "why": f"{policy} decides, when it is asked; kvroute would take the first offer"}
    if foresight is not None and foresight.replica is None:
        return {"replica": None, "why": f"it would be held ({foresight.rule}): {foresight.reason}"}
    replica = best.placement.replica if foresight is None else foresight.replica
    tied = [offer for offer in offers if offer.is_tied]
    chosen = next(offer for offer in offers if offer.placement.replica == replica)
    if not chosen.is_tied:
        return {"replica": replica, "why": "the cheapest that has room"}
    if len(tied) == 1:
        return {"replica": replica, "why": "the cheapest"}
    return {"replica": replica, "why": f"one of {len(tied)} that cost the same; {_tie_break(chosen, tied)}"}


def _tie_break(chosen: Offer, tied: list[Offer]) -> str:
    fewest = [offer for offer in tied if offer.in_flight == min(offer.in_flight for offer in tied)]
    if chosen not in fewest:
        return "the others have no room"
    return "the fewest in flight" if len(fewest) == 1 else "the least recently chosen of the fewest in flight"
