"""`kvroute doctor`'s eyes: asks one URL everything that the diagnosis wants to know, and judges nothing.

Every question has a deadline and a bound. The replica answers two short prompts for each of its engines; nothing else
of it is used or changed.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime

import aiohttp
import msgspec
from msgspec import Struct

from kvroute.adapters.discovery import base_models
from kvroute.adapters.doctor_events import EventEndpoints, hearing, sources_of
from kvroute.adapters.doctor_probe import Prober
from kvroute.adapters.doctor_tokens import Readers, Tokens
from kvroute.adapters.event_sources import EventSource
from kvroute.adapters.replica_client import Answered, ReplicaClient
from kvroute.adapters.vllm_metrics import Page
from kvroute.errors import ReplicaFailed
from kvroute.routing.findings import EngineFacts, EventsFacts, ProbeFacts, ReplicaFacts
from kvroute.routing.replica import ModelCard

LOOK_TIMEOUT_S = 5.0  # of each small question
PROBE_TIMEOUT_S = 120.0  # a busy engine lets a prompt wait
GREETINGS = 5  # asks of /health, for the quickest
DATE_MIDDLE_S = 0.5  # a Date header is cut to whole seconds
REFUSALS = (401, 403)
EXAMINED_AT_ONCE = 8
NOT_GIVEN = EventEndpoints()


class _Version(Struct):
    version: str


class Doctor:
    """Examines URLs with what they share: the session, the readers of models, and what the caller says about all.

    `events` None: the router is not to follow any, so nothing is said about them.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        readers: Readers,
        model: str | None = None,
        events: EventEndpoints | None = NOT_GIVEN,
    ) -> None:
        self._session = session
        self._readers = readers
        self._model = model
        self._events = events
        self._room = asyncio.Semaphore(EXAMINED_AT_ONCE)

    async def examine(self, url: str, api_key: str | None) -> ReplicaFacts:
        """Return everything that can be seen of one URL.

        Raises:
            ConfigError: the tokenizer that was named cannot be used.
        """
        async with self._room:
            client = ReplicaClient(self._session, url, api_key, LOOK_TIMEOUT_S)
            facts = await _greeted(client, ReplicaFacts(url=url, has_key=api_key is not None))
            if facts.ailment:
                return facts
            facts = await self._described(client, facts)
            card = next((card for card in facts.cards if card.name == facts.model), None)
            if card is None:
                return facts
            patient = ReplicaClient(self._session, url, api_key, PROBE_TIMEOUT_S)
            return await self._tried(client, patient, facts, card)

    async def _described(self, client: ReplicaClient, facts: ReplicaFacts) -> ReplicaFacts:
        """Add what the replica says about itself."""
        version = await _version(client)
        cards, cards_trouble, is_refused = await _cards(client)
        page, metrics_trouble = await _page(client)
        bases = base_models(cards)
        started_s = page.started_s if page else None
        return msgspec.structs.replace(
            facts,
            version=version,
            cards=cards,
            cards_trouble=cards_trouble,
            is_refused=is_refused,
            metrics_trouble=metrics_trouble,
            up_s=None if started_s is None else time.time() - started_s,
            engines=tuple(
                EngineFacts(one.engine, one.block_size, one.capacity_tokens, one.prefix_caching)
                for one in (page.engines if page else ())
            ),
            model=self._model or (bases[0].name if bases else None),
        )

    async def _tried(
        self, client: ReplicaClient, patient: ReplicaClient, facts: ReplicaFacts, card: ModelCard
    ) -> ReplicaFacts:
        """Add what prompts show."""
        reader = await self._readers.of(card)
        tokens = Tokens(reader, client, card.name)
        compared = await tokens.compared()
        prober = Prober(patient, tokens, card.name, card.max_model_len)
        ranks = facts.engines or (EngineFacts(),)
        given = self._events
        sources = await sources_of(client, given, [one.engine for one in ranks]) if given else {}
        is_told = sources is not None and given is not None and given.endpoint is None
        tried = [await _tried_rank(prober, one, len(ranks), sources or {}, is_told) for one in ranks]
        return msgspec.structs.replace(
            facts,
            tokens_by="none" if self._readers.setting == "none" else reader.mode,
            tokens_why=reader.why,
            tokens=compared,
            probes=tuple(probe for probe, _ in tried),
            events=tuple(events for _, events in tried) if given else (),
        )


async def _tried_rank(
    prober: Prober, engine: EngineFacts, engines: int, sources: dict[int, EventSource], is_told: bool
) -> tuple[ProbeFacts, EventsFacts]:
    """Probe one engine, and listen to its events meanwhile."""
    number = engine.engine
    source = sources.get(number)
    events = EventsFacts(number, source is not None if is_told else None)
    async with hearing(source, events) as heard:
        probe = await prober.probe(number, number if engines > 1 else None, engine.block_size)
    return probe, heard.facts


async def _greeted(client: ReplicaClient, facts: ReplicaFacts) -> ReplicaFacts:
    """Ask for its health several times: the quickest answer is the way there, the others are its work."""
    times: list[float] = []
    ahead_s = None
    for _ in range(GREETINGS):
        asked_s, start_s = time.time(), time.monotonic()
        try:
            answer = await client.answered("GET", "/health")
        except ReplicaFailed as error:
            return msgspec.structs.replace(facts, ailment=error.message)
        times.append(time.monotonic() - start_s)
        if answer.status != 200:
            return msgspec.structs.replace(facts, ailment=f"/health answered {answer.status}")
        if ahead_s is None:
            ahead_s = _ahead(answer, asked_s + times[0] / 2)
    return msgspec.structs.replace(facts, latency_s=min(times), clock_ahead_s=ahead_s)


def _ahead(answer: Answered, now_s: float) -> float | None:
    """Return how far the other clock is ahead of ours, by the Date header."""
    try:
        date = parsedate_to_datetime(answer.date or "")
    except ValueError:
        return None
    return date.timestamp() + DATE_MIDDLE_S - now_s


async def _version(client: ReplicaClient) -> str | None:
    try:
        answer = await client.answered("GET", "/version")
        return msgspec.json.decode(answer.body, type=_Version).version if answer.status == 200 else None
    except (ReplicaFailed, msgspec.MsgspecError):
        return None


async def _cards(client: ReplicaClient) -> tuple[tuple[ModelCard, ...], str, bool]:
    """Return the models, why there are none, and whether another key is wanted."""
    try:
        answer = await client.answered("GET", "/v1/models")
        if answer.status in REFUSALS:
            return (), f"/v1/models answered {answer.status}", True
        return await client.cards(), "", False
    except ReplicaFailed as error:
        return (), error.message, False


async def _page(client: ReplicaClient) -> tuple[Page | None, str]:
    try:
        return await client.page(time.monotonic()), ""
    except ReplicaFailed as error:
        return None, error.message
