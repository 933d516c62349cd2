"""From a question to an answer: choose, book, send, relay; and again elsewhere, while the client has seen nothing.

What the index is told, and why:

- At dispatch: the replica will hold the prompt. The next request of a burst must see that before the first has ended.
- If no answer began (failed, refused, or the client left in the prefill): the replica holds what it held before. A
  prefill that was cut short leaves some blocks behind; not claiming them costs at most a hit.
- If an answer began: nothing. Whatever part of the prompt the engine took from its cache, it has computed the rest, so
  it holds all of it. `delivered` below `predicted` is the account's to show, and no reason to take anything back.
- After an answer of one chat: the generated blocks as well (see learn.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from kvroute.adapters.connection import Answer
from kvroute.adapters.index import Index
from kvroute.adapters.upstream import Upstream
from kvroute.errors import NoReplica, ReplicaFailed
from kvroute.kv.prompt import Prompt
from kvroute.proxy import headers
from kvroute.proxy.exchange import Exchange
from kvroute.proxy.learn import Learner
from kvroute.proxy.openai import Inference
from kvroute.proxy.placing import Placing
from kvroute.proxy.question import Question
from kvroute.proxy.relay import BUSY, REPLICAS_FAULT, Delivery, Order, refusal, relay
from kvroute.proxy.splice import asks_for_usage, with_usage
from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.visit import Visit
from kvroute.routing.account import Account, Entry
from kvroute.routing.demand import Outcome, Usage
from kvroute.routing.lease import Lease
from kvroute.routing.replica import Replica, ReplicaId

log = logging.getLogger("kvroute.dispatch")

SILENCE = contextlib.nullcontext()


class DispatchSettings(Struct, frozen=True, kw_only=True):
    """Limits of trying, and what the client is told."""

    attempts_max: int = 3
    retry_within_s: float = 60.0  # of the arrival; later a failure is final
    client_stall_s: float = 120.0  # a client that takes nothing for this long has left
    waiting_comment_s: float | None = None  # between two comments to a client that waits for a stream; None = silence
    ask_for_usage: bool = True
    expose_prediction: bool = False  # predicted hits let a tenant probe another's cache


class Errand(Struct, frozen=True):
    """What is carried to a replica, the same at every attempt."""

    exchange: Exchange
    body: bytes
    is_spliced: bool  # usage was asked for on the client's behalf
    inference: Inference
    visit: Visit


class Dispatch:
    """Places requests and carries their answers. Knows no route and no key."""

    def __init__(
        self,
        *,
        placing: Placing,
        upstream: Upstream,
        index: Index,
        account: Account,
        learner: Learner,
        stats: HandlerStats,
        settings: DispatchSettings,
        judge: Callable[[ReplicaId, Prompt, int, int], None] = lambda replica, prompt, held_blocks, cached_tokens: None,
        report: Callable[[Replica, str, bytes], None] = lambda replica, path, body: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._placing = placing
        self._upstream = upstream
        self._index = index
        self._account = account
        self._learner = learner
        self._stats = stats
        self._settings = settings
        self._judge = judge
        self._report = report
        self._clock = clock
        self._wall_clock = wall_clock

    async def answer(
        self, exchange: Exchange, body: bytes, question: Question, inference: Inference, visit: Visit
    ) -> None:
        """Have a replica answer the request.

        Raises:
            KvrouteError: nobody could; the client has seen nothing.
            ConnectionError: the client left.
        """
        spliced = with_usage(body, inference) if self._settings.ask_for_usage else None
        errand = Errand(exchange, body if spliced is None else spliced, spliced is not None, inference, visit)
        failed: dict[ReplicaId, ReplicaFailed] = {}
        doubtful: list[Lease] = []  # of replicas that answered with an error of theirs: is it the request's fault?
        while True:
            try:
                with SILENCE if self._settings.waiting_comment_s is None else self._comments(errand):
                    question, lease = await self._placing.place(question, failed.keys(), len(body))
            except NoReplica:
                if failed:  # everyone else has failed; the last failure says more than "nobody"
                    raise list(failed.values())[-1] from None
                raise
            visit.attempts += 1
            try:
                with lease:
                    status = await self._attempt(lease, question, errand)
                for other in doubtful if status == 200 else ():
                    other.blame()
                return
            except ReplicaFailed as error:
                failed[lease.replica.id] = error
                log.warning("request %s, attempt %s: %s", visit.id, visit.attempts, error.message)
                if error.answered and error.status not in BUSY:
                    doubtful.append(lease)
                late = self._clock() - visit.arrived_s > self._settings.retry_within_s
                if late or visit.attempts >= self._settings.attempts_max:
                    raise
                self._stats.retries += 1
            finally:
                self._placing.changed()

    @contextlib.contextmanager
    def _comments(self, errand: Errand) -> Iterator[None]:
        """Send comments meanwhile, where the client may be sent some."""
        period_s, exchange = self._settings.waiting_comment_s, errand.exchange
        if period_s is None or not errand.inference.stream:
            yield
            return
        loop = asyncio.get_running_loop()
        head = headers.ours(errand.visit.id, b"text/event-stream; charset=utf-8")
        timer: asyncio.TimerHandle

        def comment() -> None:
            nonlocal timer
            timer = loop.call_later(period_s, comment)
            with contextlib.suppress(ConnectionError):  # the client has left, and this request is about to hear of it
                exchange.comment(head)

        timer = loop.call_later(period_s, comment)
        try:
            yield
        finally:
            timer.cancel()

    async def _attempt(self, lease: Lease, question: Question, errand: Errand) -> int:
        """Have one replica answer; return its status. A failure is settled and raised: the client has seen nothing."""
        replica, request, visit = lease.replica, errand.exchange.request, errand.visit
        visit.took(lease)
        for prompt in question.prompts:
            self._index.record(replica.id, prompt.chain, prompt.hit_limit_blocks)
        served, answer = False, None
        try:
            head = headers.to_replica(request.headers, visit.id)
            answer = await self._upstream.send(replica, request.method, request.target, head, errand.body)
            if answer.status in REPLICAS_FAULT:
                raise await refusal(answer, replica.id)
            delivery = await relay(errand.exchange, answer, self._order(lease, errand, answer))
            served = answer.status == 200
        except ReplicaFailed as error:
            if error.answered:  # blamed later, if at all
                lease.refuse(self._clock())
            else:
                lease.finish(Outcome.FAILED, self._clock())
            raise
        except BaseException:  # the client left; what the engine had computed by its first byte, it keeps
            served = visit.began_s is not None
            raise
        finally:
            if answer is not None:
                answer.close()
            if not served:
                self._take_back(question, replica)
        self._settle(lease, question, errand, delivery, answer.status)
        return answer.status

    def _order(self, lease: Lease, errand: Errand, answer: Answer) -> Order:
        inference, placement, visit = errand.inference, lease.placement, errand.visit
        head = headers.to_client(answer.headers, visit.id)
        head.append((headers.REPLICA, lease.replica.id.encode()))
        if self._settings.expose_prediction:
            head.append((headers.PREDICTED_TOKENS, b"%d" % placement.hit_tokens))
            head.append((headers.COST_S, b"%.6f" % placement.cost_s))

        def began() -> None:
            now_s = self._clock()
            lease.began(now_s)
            self._placing.changed()
            if answer.status == 200:
                visit.began_s = now_s

        is_plain_chat = inference.kind == "chat" and inference.sequences == 1 and bool(inference.sources)
        tells_usage = errand.is_spliced or not inference.stream or asks_for_usage(inference)
        return Order(
            replica=lease.replica.id,
            headers=head,
            strips_usage=errand.is_spliced,
            wants_text=is_plain_chat and tells_usage,
            stall_s=self._settings.client_stall_s,
            began=began,
        )

    def _settle(self, lease: Lease, question: Question, errand: Errand, delivery: Delivery, status: int) -> None:
        now_s = self._clock()
        if delivery.failure is None:
            lease.finish(Outcome.DONE, now_s, delivery.usage)
            errand.visit.ended("done")
        else:
            lease.finish(Outcome.FAILED, now_s)
            errand.visit.ended("failed", delivery.failure.message)
        if status != 200:
            return
        entry = entry_of(lease, question, delivery.usage)
        self._account.add(entry, self._wall_clock())
        if entry.delivered is not None and question.demand.exact and errand.inference.reads_cache:
            held_blocks = question.match.held(0, lease.replica.id)
            self._judge(lease.replica.id, question.prompts[0], held_blocks, entry.delivered)
            if entry.delivered and lease.replica.id in question.match.doubts:
                self._report(lease.replica, errand.exchange.request.path, errand.body)
        if delivery.failure is None and len(question.prompts) == 1 and (delivery.events or delivery.text):
            reader = question.served.entry.reader
            self._learner.learn(lease.replica.id, reader, question.prompts[0], question.root, delivery)

    def _take_back(self, question: Question, replica: Replica) -> None:
        for prompt, holding in zip(question.prompts, question.match.holdings, strict=False):
            self._index.correct(replica.id, prompt.chain, holding.get(replica.id, 0))


def entry_of(lease: Lease, question: Question, usage: Usage | None) -> Entry:
    """Return the account of an answered request.

    vLLM counts the cached tokens of the first prompt only, so with several prompts nothing is known of what was
    delivered.
    """
    delivered = usage.cached_tokens if usage is not None and len(question.prompts) == 1 else None
    predicted = lease.placement.hit_tokens
    return Entry(
        replica=lease.replica.id,
        model=question.demand.model,
        tenant=question.demand.tenant,
        prompt_tokens=usage.prompt_tokens if usage is not None else question.demand.prompt_tokens,
        seen=question.seen_tokens,
        reachable=max(question.reachable_tokens, predicted),
        predicted=predicted,
        delivered=delivered,
        # Text chunks and the engine's tokens are not to be compared: only exact prompts tell what was generated.
        generated_hits=max(0, (delivered or 0) - question.seen_tokens) if question.demand.exact else 0,
        completion_tokens=usage.completion_tokens if usage is not None else 0,
    )
