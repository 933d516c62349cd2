"""A fleet of simulated engines behind production's own routing, on one heap of due times.

    scripts -> arrivals -> Front (Router, Fleet, ledger, index) -> Pool (engines) -> first token, end -> the next turn

A seed decides a run to the last digit. Scripts are pulled one ahead of the clock, a request is forgotten when it has
ended: memory is bounded by what is in flight and by what the engines' caches hold.

What is left out (`IGNORED` says it to users): networks, the routers' own time, tokenising, clients that leave, and all
that the simulated engine does not model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from kvroute.errors import KvrouteError, NoReplica
from kvroute.kv.chain import PrefixChain
from kvroute.routing.demand import Demand, Outcome, Usage
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.replica import ReplicaId
from kvroute.sim.engine import seconds
from kvroute.sim.replica import RequestId, SimRequest
from kvroute.sim.simulation_clock import Clock, fs_of
from kvroute.sim.simulation_engines import Progress
from kvroute.sim.simulation_figures import Figures, Outcomes, PhaseFigures
from kvroute.sim.simulation_knowledge import ExactView, History, Knowledge, SentView
from kvroute.sim.simulation_pool import Pool
from kvroute.sim.simulation_routers import Front, exchange, id_of, number_of
from kvroute.sim.simulation_settings import EngineSettings, Happening, RouterSettings
from kvroute.sim.workload import Script, Turn, Workload, cached_chain, prompt_chain

IGNORED = (
    "the network, tokenising, and the routers' own time",
    "clients that leave before their answer is complete",
    "speculative decoding, LoRA adapters, images, and prefill on other engines than decode",
)
HISTORY_BLOCKS = 1 << 22  # remembered at the most, to tell what could have been hit
REFAULT_CACHES = 4  # a replica remembers what it evicted for so many times its cache
LOOK_S = 1.0  # between two looks at what is held
PROGRESS_EVERY = 64  # finished requests


class Conversation:
    """A script under way."""

    __slots__ = ("began_fs", "script")

    def __init__(self, script: Script, now_fs: int) -> None:
        self.script = script
        self.began_fs = now_fs


class Flight:
    """One request under way."""

    __slots__ = (
        "arrived_fs", "attempts", "avoid", "began_fs", "conversation", "counts", "demand", "front", "hit_tokens",
        "hold", "id", "known_blocks", "lease", "output_tokens", "turn",
    )  # fmt: skip

    def __init__(self, id: RequestId, conversation: Conversation, turn: Turn, demand: Demand, front: Front) -> None:
        self.id = id
        self.conversation = conversation
        self.turn = turn
        self.demand = demand
        self.front = front
        self.output_tokens = turn.output_tokens
        self.arrived_fs = 0
        self.counts = True  # False: it came while the fleet was warming up
        self.began_fs: int | None = None
        self.attempts = 0
        self.avoid: frozenset[ReplicaId] = frozenset()
        self.known_blocks = 0  # that the router took to be there
        self.hit_tokens = 0  # that were there
        self.hold: Hold | None = None
        self.lease: Lease | None = None


class Simulation:
    """One run. Make it, call `run` once."""

    def __init__(
        self,
        workload: Workload,
        replicas: int,
        engine: EngineSettings,
        routers: RouterSettings,
        *,
        seed: int = 0,
        happenings: tuple[Happening, ...] = (),
        warmup_s: float = 0.0,
        phases_s: tuple[float, ...] = (),
        by_tenant: bool = False,
        at_once: int | None = None,
        skips: bool = True,
        history_blocks: int = HISTORY_BLOCKS,
        on_progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """Build a fleet.

        Args:
            workload: what clients send; it is played to its end.
            replicas: engines at the start, numbered from 0.
            engine: what each of them is.
            routers: who chooses.
            seed: of everything that is left to chance here.
            happenings: what befalls replicas.
            warmup_s: requests that arrive before are not counted.
            phases_s: when phases end that are counted apart; a conversation belongs to the one in which it began.
            by_tenant: whether tenants are counted apart, too.
            at_once: conversations at a time at the most (requests, in an open loop); None = no bound. The next one
                begins when one of them ends, and what it waits for that at its client is in no figure.
            skips: whether runs of decode steps are played as one; the result is the same.
            history_blocks: that are remembered, the most recently used ones, to tell what could have been hit.
            on_progress: called now and then with the requests that have ended, and the simulated time.
        """
        self._workload = workload
        self._engine = engine
        self._routers = routers
        self._seed = seed
        self._rng = Random(seed)
        self._warmup_fs = fs_of(warmup_s)
        self._on_progress = on_progress
        self._figures = Figures(phases_s, by_tenant=by_tenant)
        self._clock = Clock()
        self._asked = self._ended = 0
        self._at_once = at_once
        self._late: Script | None = None  # who waits at its client, for others to end
        self._stage: Script | None = None  # whose stage waits for those before it to end
        self._delay_fs = 0  # by which stages are late
        self._is_open = True  # scripts are still to come
        self._talking = 0  # conversations under way
        self._there: dict[int, dict[RequestId, Flight]] = {}  # by replica
        self._held: dict[Hold, Flight] = {}
        self._is_ticking = False
        self._stranded: dict[Flight, None] = {}  # for which there is no replica
        self._history_blocks = history_blocks
        self._seen = History(history_blocks)
        self._own: dict[int, History] = {}
        ids = [id_of(number) for number in range(max([replicas, *(one.replica + 1 for one in happenings)]))]
        make = ExactView if routers.knowledge == "exact" else SentView
        views: list[Knowledge] = [make(ids) for _ in range(1 if routers.is_shared else routers.count)]
        self._fronts = [
            Front(routers, engine, views[n % len(views)], Random(self._rng.getrandbits(64)))
            for n in range(routers.count)
        ]
        self._ledger_rng = Random(self._rng.getrandbits(64))
        pool_rng = Random(self._rng.getrandbits(64))
        self._pool = Pool(
            self._clock, engine, routers, self._fronts, views, pool_rng, listener=self, skips=skips
        )  # fmt: skip
        self._happenings = happenings
        self._replicas = replicas

    def run(self) -> Outcomes:
        """Play the workload to its end and sum it up."""
        for number in range(self._replicas):
            self.joined(number)
        self._pool.start(self._replicas, self._happenings)
        self._pull()
        self._clock.run()
        counters = [engine.replica.counters for engine in self._pool.all()]
        return self._figures.outcomes(
            self._routers.policy,
            self._seed,
            [one.prompt_tokens - one.prefix_hits + one.generation_tokens for one in counters],
            sum(one.preemptions for one in counters),
            sum(one.resumed_queries - one.resumed_hits for one in counters),
        )

    # Clients

    @property
    def is_over(self) -> bool:
        """Whether nothing is to come any more."""
        return not self._is_open and not self._talking

    def _pull(self) -> None:
        """Schedule the next script's start."""
        script = next(self._workload, None)
        if script is None:
            self._is_open = False
        elif script.stage_s is None:
            self._clock.at(fs_of(script.start_s) + self._delay_fs, self._start, script)
        elif self._talking:
            self._stage = script
        else:
            self._open_stage(script)

    def _open_stage(self, script: Script) -> None:
        assert script.stage_s is not None, "only a stage waits for others"
        begin_fs = fs_of(script.stage_s)
        self._delay_fs = max(self._delay_fs, self._clock.now_fs - begin_fs)
        self._figures.end_stage()
        self._clock.at(fs_of(script.start_s) + self._delay_fs, self._start, script)

    def _start(self, script: Script) -> None:
        if self._at_once is not None and self._talking >= self._at_once:
            self._late = script
            return
        turn = next(script.turns, None)
        self._talking += turn is not None
        self._pull()
        if turn is not None:
            self._ask((Conversation(script, self._clock.now_fs), turn))

    def _ask(self, what: tuple[Conversation, Turn]) -> None:
        """Send a turn's request to one of the routers."""
        conversation, turn = what
        fronts = self._fronts
        front = fronts[0] if len(fronts) == 1 else fronts[self._rng.randrange(len(fronts))]
        self._asked += 1
        flight = Flight(RequestId(f"q{self._asked}"), conversation, turn, self._demand(conversation, turn), front)
        flight.arrived_fs = self._clock.now_fs
        flight.counts = flight.arrived_fs >= self._warmup_fs
        room = self._engine.context_tokens - turn.prompt_tokens
        if 0 < room < flight.output_tokens:
            flight.output_tokens = room
            self._figures.cut += flight.counts
        self._count_arrival(flight)
        self._place(flight)

    def _demand(self, conversation: Conversation, turn: Turn) -> Demand:
        return Demand(
            model=self._engine.model,
            prompt_tokens=turn.prompt_tokens,
            longest_prompt=turn.prompt_tokens,
            output_tokens=turn.output_tokens if self._routers.tells_output else None,
            tenant=conversation.script.tenant,
            chain=prompt_chain(turn, self._engine.block_size),
            block_size=self._engine.block_size,
        )

    def _end(self, flight: Flight, *, why: str = "") -> None:
        """Forget a request, and go on with its conversation; one that lost a turn is over. `why` says how it failed."""
        failed = bool(why)
        figures, conversation = self._figures, flight.conversation
        if flight.hold is not None:
            self._held.pop(flight.hold, None)
            flight.hold = None
        figures.last_s = self._clock.now_s
        self._ended += 1
        if self._on_progress is not None and not self._ended % PROGRESS_EVERY:
            self._on_progress(self._ended, self._clock.now_s)
        figures.failed += failed and flight.counts
        if failed and flight.counts:
            for part in self._parts(flight):
                part.failed += 1
        if flight.counts:
            figures.first_failure = figures.first_failure or why
        turn = None if failed else next(conversation.script.turns, None)
        if turn is not None:
            self._clock.after(turn.think_s, self._ask, (conversation, turn))
            return
        self._talking -= 1
        if conversation.began_fs >= self._warmup_fs:
            figures.lost += failed
            if not failed:
                figures.scripts += 1
                figures.conversation.add(seconds(self._clock.now_fs - conversation.began_fs))
        self._let_in()

    def _let_in(self) -> None:
        """A conversation has ended: whoever waited for that begins."""
        if self._late is not None:
            script, self._late = self._late, None
            self._clock.at(self._clock.now_fs, self._start, script)
        elif self._stage is not None and not self._talking:
            script, self._stage = self._stage, None
            self._open_stage(script)

    # Routing

    def _place(self, flight: Flight) -> None:
        """Have the router place or hold a request."""
        front, now_s = flight.front, self._clock.now_s
        ledger = self._fronts if self._routers.is_shared else (front,)
        try:
            answer = front.place(flight.demand, now_s, flight.avoid, flight.hold, ledger)
        except NoReplica:
            self._strand(flight)
            return
        except KvrouteError as error:
            self._end(flight, why=error.message)
            return
        self._share(front)
        if isinstance(answer, Lease):
            self._let_go(flight)
            self._send(flight, answer)
        elif answer is not flight.hold:
            if flight.hold is not None:
                self._held.pop(flight.hold, None)
            flight.hold = answer
            self._held[answer] = flight
            self._tick()
            self._clock.at(fs_of(answer.until_s), self._look_again, (flight, answer))

    def _let_go(self, flight: Flight) -> None:
        """A request is held no longer."""
        if flight.hold is None:
            return
        self._held.pop(flight.hold, None)
        flight.hold = None
        if flight.counts:
            held_s = seconds(self._clock.now_fs - flight.arrived_fs)
            self._figures.held.add(held_s)
            for part in self._parts(flight):
                part.held.add(held_s)

    def _parts(self, flight: Flight) -> Sequence[PhaseFigures]:
        """Return where a request is counted besides."""
        return self._figures.parts(seconds(flight.conversation.began_fs), flight.demand.tenant)

    def _look_again(self, what: tuple[Flight, Hold]) -> None:
        """Ask about a held request whose time has come."""
        flight, hold = what
        if flight.hold is hold:
            self._place(flight)

    def _tick(self) -> None:
        """Look at what is held every LOOK_S, as long as anything is."""
        if not self._is_ticking:
            self._is_ticking = True
            self._clock.after(LOOK_S, self._look)

    def _look(self, _: None) -> None:
        self._is_ticking = False
        for front in self._fronts:
            self._release(front)
        if self._held:
            self._tick()

    def _release(self, front: Front) -> None:
        """Place what the router need not hold any longer."""
        if self._held:
            for hold in front.router.released(self._clock.now_s):
                if hold in self._held:
                    self._place(self._held[hold])

    def _strand(self, flight: Flight) -> None:
        """Keep a request for which there is no replica, for a bounded time."""
        until_fs = flight.arrived_fs + fs_of(self._routers.wait_s)
        if flight.attempts or self._clock.now_fs >= until_fs:
            self._end(flight, why="there was no replica for it")
        else:
            self._stranded[flight] = None
            self._clock.at(until_fs, self._give_up, flight)

    def _give_up(self, flight: Flight) -> None:
        if flight in self._stranded:
            del self._stranded[flight]
            self._place(flight)

    def _send(self, flight: Flight, lease: Lease) -> None:
        flight.lease = lease
        flight.attempts += 1
        number = number_of(lease.replica.id)
        request = SimRequest(flight.id, flight.turn.chain, flight.turn.prompt_tokens, flight.output_tokens)
        if not self._pool.send(number, request):
            self._fail(flight)
            return
        flight.known_blocks = lease.placement.hit_tokens // self._engine.block_size
        flight.front.knowledge.sent(number, flight.demand.chain, flight.known_blocks)
        self._there[number][flight.id] = flight

    def _fail(self, flight: Flight) -> None:
        """The replica broke: try another one, as long as the client has seen nothing."""
        lease, flight.lease = flight.lease, None
        assert lease is not None, "only what was sent can fail"
        lease.finish(Outcome.FAILED, self._clock.now_s)
        flight.front.is_dirty = True
        self._share(flight.front)
        if flight.began_fs is not None or flight.attempts >= self._routers.attempts_max:
            self._end(flight, why="its replica crashed")
            return
        self._figures.retried += flight.counts
        flight.avoid |= {lease.replica.id}
        self._place(flight)

    def _share(self, front: Front) -> None:
        """Schedule a write of this router's promises, if routers share and none is on its way."""
        if front.is_dirty and len(self._fronts) > 1 and self._routers.is_shared:
            front.is_dirty = False
            self._clock.after(self._routers.ledger_lag_s, self._publish, front)

    def _publish(self, front: Front) -> None:
        loss = self._routers.ledger_loss
        if not loss or self._ledger_rng.random() >= loss:
            exchange(front, self._fronts, self._clock.now_s)

    # Engines

    def progressed(self, number: int, progress: Progress) -> None:
        """A step has ended: prompts were computed, answers finished."""
        here = self._there[number]
        changed: dict[Front, None] = {}
        for id, hit_tokens in progress.hits.items():
            if id in here:
                self._admitted(number, here[id], hit_tokens)
        for id in progress.began:
            changed[here[id].front] = None
            self._began(number, here[id])
        for id in progress.finished:
            flight = here.pop(id)
            changed[flight.front] = None
            self._finished(flight)
        for front in changed:
            front.is_dirty = True
            self._share(front)
            self._release(front)

    def joined(self, number: int) -> None:
        """An engine is there, new and empty."""
        self._there[number] = {}
        self._own[number] = History(min(self._engine.num_blocks * REFAULT_CACHES, self._history_blocks))
        stranded, self._stranded = self._stranded, {}
        for flight in stranded:
            self._place(flight)

    def broke(self, number: int) -> None:
        """An engine crashed, and all that ran there is lost."""
        flights, self._there[number] = self._there[number], {}
        for flight in flights.values():
            if flight.began_fs is None:
                flight.front.knowledge.failed(number, flight.demand.chain, flight.known_blocks)
            self._fail(flight)

    def reported(self, at_s: float, waiting: int, cache_used: float) -> None:
        """All metrics were read."""
        self._figures.waiting.add(at_s, waiting + len(self._held) + len(self._stranded))
        self._figures.cache_used.add(at_s, cache_used)
        for front in self._fronts:
            self._release(front)

    def _admitted(self, number: int, flight: Flight, hit_tokens: int) -> None:
        flight.hit_tokens = hit_tokens
        had = self._own[number].see(flight.demand.chain, self._left_by(flight)) * self._engine.block_size
        if flight.counts:
            self._figures.refault_tokens += max(0, min(had, flight.turn.prompt_tokens - 1) - hit_tokens)

    def _left_by(self, flight: Flight) -> PrefixChain:
        return cached_chain(flight.turn, flight.output_tokens, self._engine.block_size)

    def _began(self, number: int, flight: Flight) -> None:
        assert flight.lease is not None, "only what was sent can begin"
        flight.began_fs = self._clock.now_fs
        flight.lease.began(self._clock.now_s)
        what = (flight, number, self._left_by(flight))
        if self._routers.event_lag_s:
            self._clock.after(self._routers.event_lag_s, tell_computed, what)
        else:
            tell_computed(what)
        if flight.counts:
            figures = self._figures
            figures.begin(seconds(flight.began_fs - flight.arrived_fs))
            figures.prompt_tokens += flight.turn.prompt_tokens
            figures.hit_tokens += flight.hit_tokens
            for part in self._parts(flight):
                part.ttft.add(seconds(flight.began_fs - flight.arrived_fs))
                part.prompt_tokens += flight.turn.prompt_tokens
                part.hit_tokens += flight.hit_tokens

    def _finished(self, flight: Flight) -> None:
        lease, flight.lease = flight.lease, None
        assert lease is not None, "only what was sent can finish"
        assert flight.began_fs is not None, "only what has begun can finish"
        now_fs, now_s = self._clock.now_fs, self._clock.now_s
        usage = Usage(flight.turn.prompt_tokens, flight.output_tokens, flight.hit_tokens)
        lease.finish(Outcome.DONE, now_s, usage)
        if flight.counts:
            figures = self._figures
            figures.completed += 1
            figures.finish(seconds(flight.began_fs), now_s, flight.output_tokens)
            figures.end_to_end.add(seconds(now_fs - flight.arrived_fs))
            for part in self._parts(flight):
                part.end_to_end.add(seconds(now_fs - flight.arrived_fs))
                part.output_tokens += flight.output_tokens
                part.last_s = now_s
            if flight.output_tokens > 1:
                figures.token_time.add(seconds(now_fs - flight.began_fs) / (flight.output_tokens - 1))
        self._end(flight)

    def _count_arrival(self, flight: Flight) -> None:
        size, figures = self._engine.block_size, self._figures
        seen = self._seen.see(flight.demand.chain, self._left_by(flight))
        if not flight.counts:
            return
        figures.arrive(self._clock.now_s)
        figures.reachable_tokens += min(seen, (flight.turn.prompt_tokens - 1) // size) * size


def tell_computed(what: tuple[Flight, int, PrefixChain]) -> None:
    """Have the router know that a prompt was computed, and what its answer will leave in the cache."""
    flight, number, left = what
    flight.front.knowledge.answered(number, flight.demand.chain, flight.known_blocks, left)
