"""The outside, turned into values: one watcher a URL keeps fleet, catalogue and index in step with what is there.

A watcher asks three things in turn: /health (with hysteresis), /v1/models (when a replica is new or was restarted, and
every half minute), /metrics (every interval). It logs changes, not repetitions. Stale answers degrade, they never stop:
a replica whose metrics fail keeps its last load, and its health decides whether it is used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from kvroute.adapters.discovery import base_models, replicas_behind
from kvroute.adapters.index import Index, Namespace, namespace_of
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.adapters.sized import Sized
from kvroute.adapters.tls import session_tls
from kvroute.adapters.tokens import PromptReader, open_reader
from kvroute.adapters.vllm_metrics import Page
from kvroute.errors import ConfigError, ReplicaBroke, ReplicaFailed
from kvroute.kv.chain import blocks_in
from kvroute.kv.prompt import Prompt
from kvroute.proxy.catalogue import Catalogue, ModelEntry, ServedModel
from kvroute.proxy.followers import EventSettings, Followers
from kvroute.proxy.reports import Reporter
from kvroute.routing.fleet import Fleet
from kvroute.routing.honesty import Honesty, Record
from kvroute.routing.replica import ModelCard, Replica, ReplicaId

log = logging.getLogger("kvroute.feeds")

CARDS_EVERY_S = 30.0
BLOCK_SIZE_UNKNOWN = 16  # vLLM's default, until a replica says otherwise
CAPACITY_UNKNOWN_TOKENS = 1 << 18  # a guess that bounds the index for replicas that do not tell
FORGIVE_AFTER_S = 10.0  # a hung engine answers /health: probes alone must not bring it back after failed requests
ASK_TIMEOUT_S = 2.0  # the replica's /tokenize, where it is the tokenizer


class FeedSettings(Struct, frozen=True):
    """Intervals in seconds, and how many answers in a row change a replica's health."""

    metrics_interval_s: float = 1.0
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    unhealthy_after: int = 3
    healthy_after: int = 1


class Hysteresis:
    """Health that changes only after several equal answers in a row, so that one lost probe ejects nobody."""

    def __init__(self, unhealthy_after: int, healthy_after: int) -> None:
        self.is_healthy = False
        self._needed = {True: healthy_after, False: unhealthy_after}
        self._streak = 0

    def observe(self, ok: bool) -> bool:
        """Take one answer in; return whether the health changed."""
        if ok == self.is_healthy:
            self._streak = 0
            return False
        self._streak += 1
        if self._streak < self._needed[ok]:
            return False
        self.is_healthy, self._streak = ok, 0
        return True


class FeedStats(Struct):
    """Counters of all watchers."""

    scrapes: int = 0
    scrape_errors: int = 0
    health_changes: int = 0
    restarts: int = 0


class Feeds:
    """All watchers, and what they share: the readers of models and the catalogue made of them."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: Index,
        catalogue: Catalogue,
        tokenizer: str,
        checks_tokenizer: bool = True,
        settings: FeedSettings,
        size: Callable[[ModelCard], Sized | None] = lambda card: None,
        events: EventSettings | None = None,
        honesty: Honesty | None = None,
    ) -> None:
        self.stats = FeedStats()
        self.readers: dict[str, PromptReader] = {}
        self.followers = Followers(index, events or EventSettings(is_wanted=False))
        self.honesty = honesty or Honesty()
        self.reporter = Reporter()
        self._asks_reports = events is not None and events.reports
        self._fleet = fleet
        self._index = index
        self._catalogue = catalogue
        self._tokenizer = tokenizer
        self._checks_tokenizer = checks_tokenizer
        self._settings = settings
        self._size = size
        self._sizes: dict[str, Sized | None] = {}
        self._session: aiohttp.ClientSession | None = None
        self._watchers: list[Watcher] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._opening = asyncio.Lock()
        self.changed = asyncio.Event()  # set when a replica joins or gets well; whoever waits for one clears it

    async def start(self, replicas: list[tuple[str, str | None]], tls_verify: bool | str = True) -> None:
        """Watch every (url, API key); `tls_verify` as `session_tls` takes it.

        Raises:
            ConfigError: the authorities to believe cannot be read.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ssl=session_tls(tls_verify))
        self._session = aiohttp.ClientSession(connector=connector)
        for url, key in replicas:
            client = ReplicaClient(self._session, url, key, self._settings.health_timeout_s)
            watcher = Watcher(client, self, self._fleet, self._index, self._settings)
            self._watchers.append(watcher)
            self._tasks.append(asyncio.get_running_loop().create_task(watcher.run(), name=f"watch {url}"))

    async def close(self) -> None:
        """Stop watching and release the readers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.reporter.close()
        for reader in self.readers.values():
            await reader.close()
        if self._session:
            await self._session.close()

    async def first_round(self, timeout_s: float) -> None:
        """Wait until every replica was asked once, or the time is over."""
        waits = [watcher.asked.wait() for watcher in self._watchers]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            silent = [watcher.url for watcher in self._watchers if not watcher.asked.is_set()]
            log.warning("no answer yet from %s", ", ".join(silent))

    async def namespace(self, replica: Replica) -> Namespace | None:
        """Return where a replica's blocks live in the index, opening its model's reader at first sight."""
        bases = base_models(replica.cards)
        if not bases:
            return None
        async with self._opening:  # two replicas of a new model must not open two readers
            if bases[0].name not in self.readers:
                await self._open(bases[0])
        reader = self.readers[bases[0].name]
        return namespace_of(bases[0].name, replica.block_size or BLOCK_SIZE_UNKNOWN, reader.fingerprint)

    async def _open(self, card: ModelCard) -> None:
        reader = await open_reader(self._tokenizer, card.root, card.name, self._asker(card.name))
        await reader.start(compares=self._checks_tokenizer)
        self.readers[card.name] = reader
        log.info("model %s: tokens by %s: %s", card.name, reader.mode, reader.why)
        size = self._sizes[card.name] = await asyncio.to_thread(self._size, card)
        if size is not None:
            self._fleet.seed(card.name, size.rates)

    def capacity_tokens(self, replica: Replica) -> int | None:
        """Return what a replica holds: what it reports, else what its model's size leaves of the GPU's memory."""
        size = self._sizes.get(base_models(replica.cards)[0].name)
        return replica.capacity_tokens or (size.capacity_tokens if size else None)

    def _asker(self, model: str) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def ask(path: str, body: bytes) -> bytes:
            for watcher in self._watchers:
                if watcher.serves(model):
                    async with asyncio.timeout(ASK_TIMEOUT_S):
                        return await watcher.client.ask(path, body)
            raise ReplicaBroke(f"no healthy replica serves {model}", replica="none")

        return ask

    async def follow(self, client: ReplicaClient, replica: Replica, blocks: int) -> None:
        """Follow a replica's KV events; chunks of text have nothing in common with an engine's tokens."""
        model = base_models(replica.cards)[0].name
        if self.readers[model].mode != "approximate":
            await self.followers.follow(client, replica, model, replica.block_size or BLOCK_SIZE_UNKNOWN, blocks)

    def judge(self, replica: ReplicaId, prompt: Prompt, held_blocks: int, cached_tokens: int) -> None:
        """Compare what the index said about an answered request with what the engine found in its cache."""
        found = min(cached_tokens // prompt.block_size, blocks_in(prompt.chain))  # it may have counted other tokens
        self._index.delivered(replica, prompt.chain, found)
        predicted = min(held_blocks, prompt.hit_limit_blocks) * prompt.block_size
        if self.honesty.observe(replica, predicted, cached_tokens):
            share = self.honesty.records[replica].share
            log.warning(
                "%s delivers %.0f %% of the hits that the index predicts: it counts for less", replica, 100 * share
            )
            self.followers.rebuild(replica)

    def report(self, replica: Replica, path: str, body: bytes) -> None:
        """Have a replica that events were lost of tell again what a request found there."""
        for watcher in self._watchers if self._asks_reports else ():
            if replica.id in watcher.known:
                self.reporter.ask(watcher.client, replica, path, body)

    def knowledge(self) -> list[dict[str, Any]]:
        """Return, for each replica, where what is known of its cache comes from, and how right that was."""
        return [
            {"replica": id, **self.followers.describe(id), **_record(self.honesty.records.get(id))}
            for watcher in self._watchers
            for id in watcher.known
        ]

    def forget(self, replica: ReplicaId) -> None:
        """Forget what a replica held: it has left, or restarted."""
        self._index.leave(replica)
        self.followers.leave(replica)
        self.honesty.forget(replica)
        self.reporter.forget(replica)

    async def emptied(self, client: ReplicaClient, replica: Replica) -> bool:
        """Take in that a replica gave up its cache; return whether it is to be admitted anew.

        An engine publishes that only with its next step: a prompt of one token makes it take one. Whoever listens to
        the events hears it in its place among them; where nobody does, what the replica was sent counts no more.

        Raises:
            ReplicaFailed: it does not answer.
        """
        probe = {"model": base_models(replica.cards)[0].name, "prompt": [0], "max_tokens": 1}
        headers = {} if replica.rank is None else {"X-data-parallel-rank": str(replica.rank)}
        await client.answered("POST", "/v1/completions", body=msgspec.json.encode(probe), headers=headers)
        if self._index.is_exact(replica.id):
            return False
        self.forget(replica.id)
        return True

    async def reset(self, replica: ReplicaId) -> list[ReplicaId]:
        """Have a replica empty its prefix cache, and forget what it held. All replicas of its URL do; return them.

        Raises:
            ReplicaFailed: it did not, and the message says why.
        """
        for watcher in self._watchers:
            if replica in watcher.known:
                return await watcher.reset()
        raise ReplicaBroke(f"{replica} is just being admitted: try again", replica=replica)

    def publish(self) -> None:
        """Rebuild the catalogue from the replicas that are known."""
        served: dict[str, ServedModel] = {}
        for watcher in self._watchers:
            for replica, namespace in watcher.known.values():
                served |= self._served_by(replica, namespace, served)
        self._catalogue.replace(served)
        self.changed.set()

    def _served_by(
        self, replica: Replica, namespace: Namespace, served: dict[str, ServedModel]
    ) -> dict[str, ServedModel]:
        bases = base_models(replica.cards)
        entry = ModelEntry(
            base=bases[0].name,
            block_size=replica.block_size or BLOCK_SIZE_UNKNOWN,
            namespace=namespace,
            reader=self.readers[bases[0].name],
        )
        known = served.get(entry.base)
        if known and known.entry.namespace != namespace:
            log.warning(
                "%s uses blocks of %s tokens, other replicas of %s use %s: its cache cannot be predicted",
                replica.id, entry.block_size, entry.base, known.entry.block_size,
            )  # fmt: skip
            entry = known.entry
        names = {base.name: ServedModel(entry) for base in bases}
        return names | {card.name: ServedModel(entry, card.name) for card in replica.cards if card.parent is not None}


_WORDS = {True: "sleeps: it gets no requests until it is woken", False: "is awake again"}


def _record(record: Record | None) -> dict[str, Any]:
    record = record or Record()
    return {
        "predicted_tokens": round(record.predicted),
        "delivered_tokens": round(record.delivered),
        "delivered_unpredicted_tokens": round(record.unpredicted),
        "distrusted": record.is_distrusted,
    }


class Watcher:
    """Watches one URL: the replicas behind it, their health and their load."""

    def __init__(self, client: ReplicaClient, feeds: Feeds, fleet: Fleet, index: Index, settings: FeedSettings) -> None:
        self.client = client
        self.url = client.url
        self.asked = asyncio.Event()
        self.known: dict[ReplicaId, tuple[Replica, Namespace]] = {}
        self._feeds = feeds
        self._fleet = fleet
        self._index = index
        self._settings = settings
        self._health = Hysteresis(settings.unhealthy_after, settings.healthy_after)
        self._cards: tuple[ModelCard, ...] = ()
        self._follows_due = False  # where events are published may have changed, or was not answered
        self._cards_due = 0.0
        self._scrape_due = 0.0
        self._forgive_due = 0.0
        self._life: Page | None = None  # the last scrape: a server that restarted shows in the next one
        self._trouble = ""
        self._is_asleep = False
        self._is_emptied = False  # it gave up its cache, and what it held is not forgotten yet

    def serves(self, model: str) -> bool:
        """Return whether this URL is well and serves the model."""
        return self._health.is_healthy and any(card.name == model for card in self._cards)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self._round()
                self._say("")
            except (ReplicaFailed, ConfigError) as error:
                self._feeds.stats.scrape_errors += 1
                self._say(str(error))
            except Exception:
                self._feeds.stats.scrape_errors += 1
                log.exception("watching %s", self.url)
            self.asked.set()
            await asyncio.sleep(min(self._settings.health_interval_s, self._settings.metrics_interval_s))

    async def _round(self) -> None:
        ailment = await self.client.ailment()
        ok = not ailment
        if not ok and not self.known:
            raise ReplicaBroke(f"{self.url} is not healthy yet: {ailment}", replica=self.url)
        changed = self._health.observe(ok)
        if changed:
            self._feeds.stats.health_changes += 1
            if ok:
                log.info("%s is healthy", self.url)
            else:
                log.warning("%s is unhealthy: %s", self.url, ailment)
            self._cards_due = 0.0  # it may have come back with other models
        now = time.monotonic()
        restarted, was_asleep = False, self._is_asleep
        if ok and (now >= self._scrape_due or not self.known):
            self._scrape_due = now + self._settings.metrics_interval_s
            restarted = await self._learn(now)
        if changed or restarted or was_asleep != self._is_asleep:
            self._mark(self._health.is_healthy and not self._is_asleep)
        else:
            self._forgive(now)

    def _forgive(self, now: float) -> None:
        """Try a replica again that answers probes but failed requests: after a while, not with every probe."""
        failing = (
            self._health.is_healthy and not self._is_asleep and any(self._fleet.is_failing(id) for id in self.known)
        )
        if not failing:
            self._forgive_due = now + FORGIVE_AFTER_S
        elif now >= self._forgive_due:
            self._mark(True)

    def _mark(self, healthy: bool) -> None:
        for id in self.known:
            self._fleet.set_health(id, healthy)
        if healthy:
            self._feeds.changed.set()

    async def _learn(self, now: float) -> bool:
        """Take in models and metrics; return whether the server was restarted since the last time."""
        page = await self.client.page(now)
        self._feeds.stats.scrapes += 1
        restarted = self._life is not None and page.is_new_life(self._life)
        if not self._cards or restarted or now >= self._cards_due:
            self._cards = await self.client.cards()
            self._follows_due = True
            self._cards_due = now + CARDS_EVERY_S
        if restarted:
            self._feeds.stats.restarts += 1
            log.info("%s was restarted: its cache is empty", self.url)
            for id in self.known:
                self._feeds.forget(id)
            self.known.clear()
            self._is_emptied = False
        self._life = page
        await self._heed_sleep(page)
        await self._sync(page, now)
        return restarted

    async def _heed_sleep(self, page: Page) -> None:
        """An engine that sleeps is not used; once it is awake, what it held is forgotten before it is.

        Its metrics do not tell a pause, which keeps the cache, from memory that was released.
        """
        self._is_emptied |= page.is_asleep
        if page.is_asleep != self._is_asleep:
            log.log(logging.WARNING if page.is_asleep else logging.INFO, "%s %s", self.url, _WORDS[page.is_asleep])
        if self._is_emptied and not page.is_asleep:
            await self._forget_all()
        self._is_asleep = page.is_asleep

    async def _forget_all(self) -> None:
        for id, (replica, _) in list(self.known.items()):
            if await self._feeds.emptied(self.client, replica):
                self.known.pop(id, None)
        self._is_emptied = False

    async def reset(self) -> list[ReplicaId]:
        """Have the server empty its prefix cache, and forget what its replicas held.

        Raises:
            ReplicaFailed: it did not.
        """
        ids = list(self.known)
        answer = await self.client.answered("POST", "/reset_prefix_cache")
        if answer.status in (404, 405):
            raise ReplicaBroke(
                f"{self.url} has no /reset_prefix_cache: vLLM has it only where it runs with VLLM_SERVER_DEV_MODE=1",
                replica=self.url,
            )
        if answer.status != 200:
            raise ReplicaBroke(f"/reset_prefix_cache answered {answer.status}", replica=self.url)
        if b"false" in answer.body:
            raise ReplicaBroke(f"{self.url} is busy and kept its cache: drain it first", replica=self.url)
        self._is_emptied = True  # should it not answer now, the next round goes on
        await self._forget_all()
        return ids

    async def _sync(self, page: Page, now: float) -> None:
        found = replicas_behind(self.url, self._cards, page)
        changed = False
        for id, replica in found.items():
            if id not in self.known or self.known[id][0] != replica:
                changed |= await self._admit(replica, now)
        for id in self.known.keys() - found.keys():
            self._feeds.forget(id)
            self._fleet.leave(id)
            del self.known[id]
            changed = True
        if changed:
            self._feeds.publish()
        if self._follows_due:
            self._follows_due = False
            for replica, _ in list(self.known.values()):
                await self._feeds.follow(self.client, replica, self._blocks(replica))
        for report, id in zip(page.engines, found, strict=False):
            self._fleet.report(id, report.load, now)
            self._feeds.followers.observe(id, report.load, now)

    async def _admit(self, replica: Replica, now: float) -> bool:
        namespace = await self._feeds.namespace(replica)
        if namespace is None:
            raise ReplicaBroke(f"{self.url} serves no model", replica=self.url)
        tokens = self._feeds.capacity_tokens(replica)
        self._index.join(replica.id, namespace, self._blocks(replica))
        self._follows_due = True
        self.known[replica.id] = (replica, namespace)
        self._fleet.join(msgspec.structs.replace(replica, capacity_tokens=tokens), now)
        log.info(
            "%s serves %s: %s tokens of KV cache in blocks of %s",
            replica.id, ", ".join(card.name for card in replica.cards), tokens, replica.block_size,
        )  # fmt: skip
        return True

    def _blocks(self, replica: Replica) -> int:
        tokens = self._feeds.capacity_tokens(replica) or CAPACITY_UNKNOWN_TOKENS
        return tokens // (replica.block_size or BLOCK_SIZE_UNKNOWN)

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.warning("%s", trouble)
