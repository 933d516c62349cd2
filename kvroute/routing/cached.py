"""Published rules that look at caches. Each is one short function of what every replica holds and has to do.

`Informed` gives a rule its knowledge: what the index knows, or the record of what it placed itself, with the rule's own
way to forget. Figures named *_DEFAULT are those that the rule's authors ship.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.routing.member import Member
from kvroute.routing.placed import LlmdPrefixes, PlacedPrefixes
from kvroute.routing.policy import Case, Knowledge, MakePolicy, Policy

MATCH_DEFAULT = 0.3  # SGLang gateway and vllm-router: --cache-threshold
SPREAD_DEFAULT = 64  # --balance-abs-threshold
RATIO_DEFAULT = 1.5  # --balance-rel-threshold
TREE_CHARS_DEFAULT = 67_108_864  # --max-tree-size, for each worker
CHARS_PER_TOKEN = 4
DYNAMO_LIFE_DEFAULT_S = 120.0  # Dynamo without events: time to live of a placed block
DYNAMO_BLOCKS_DEFAULT = 1 << 20
BLEND = "blend"
LLMD_BLOCKS_DEFAULT = 31_250  # lruCapacityPerServer
BLEND_BLOCK_TOKENS, BLEND_MATCH_TOKENS = 16, 256 * 16  # 64 characters, maxPrefixBlocksToMatch 256: until 2026
STICKY_BLOCK_TOKENS, STICKY_MATCH_TOKENS = 64, 131_072  # since then
STICKY_SHARE_DEFAULT = 0.8  # llm-d prefix-cache-affinity-filter: affinityThreshold
STICKY_PENALTY_DEFAULT_S = 18.0  # maxTTFTPenalty
TOKEN_LOAD_DEFAULT = 4_194_304  # llm-d token-load-scorer: tokens in flight that count as full


class Known(Struct, frozen=True):
    """A replica as these rules see it, for one request."""

    member: Member
    hit_tokens: int
    miss_tokens: int
    looked_at: int  # tokens of the prompt that were compared

    @property
    def share(self) -> float:
        """Share of what was compared of the prompt that it holds."""
        return min(self.hit_tokens / max(self.looked_at, 1), 1.0)

    @property
    def in_flight(self) -> int:
        """Sequences that it was given and has not finished."""
        return self.member.view.sequences

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that it was given and has not computed."""
        return self.member.view.pending_prefill_tokens


Rule = Callable[[Sequence[Known], Case], Known]


class Informed:
    """A rule with its knowledge."""

    def __init__(self, rule: Rule, placed: PlacedPrefixes | None) -> None:
        self._rule = rule
        self._placed = placed  # None: what the index knows

    def __call__(self, members: Sequence[Member], case: Case) -> Member:
        chosen = self._rule([self._know(member, case) for member in members], case).member
        if self._placed is not None:
            self._placed.add(chosen.replica.id, case.demand, case.now_s)
        return chosen

    def _know(self, member: Member, case: Case) -> Known:
        id, demand = member.replica.id, case.demand
        hit = case.hits.get(id, 0) if self._placed is None else self._placed.hit_tokens(id, demand, case.now_s)
        hit = max(min(hit, demand.prompt_tokens - 1), 0)
        looked_at = demand.prompt_tokens if self._placed is None else self._placed.looked_at(demand)
        return Known(member, hit, demand.prompt_tokens - hit, looked_at)


def cache_threshold(known: Sequence[Known], case: Case) -> Known:
    """The longest match, unless it is short or the pool is out of balance; then the fewest in flight.

    Source: `cache_aware` of sgl-model-gateway and vllm-router, with their command lines' defaults (since December 2025
    a short match goes to the fewest in flight, before to the smallest tree).
    """
    loads = [each.in_flight for each in known]
    is_uneven = max(loads) - min(loads) > SPREAD_DEFAULT and max(loads) > RATIO_DEFAULT * min(loads)
    best = min(known, key=lambda each: (-each.hit_tokens, each.in_flight))
    if is_uneven or best.share <= MATCH_DEFAULT:
        return min(known, key=lambda each: (each.in_flight, each.member.last_chosen))
    return best


def longest_match(known: Sequence[Known], case: Case) -> Known:
    """The longest match, whatever waits there; among equals the fewest in flight."""
    return min(known, key=lambda each: (-each.hit_tokens, each.in_flight, each.member.last_chosen))


def linear(known: Sequence[Known], case: Case) -> Known:
    """The fewest blocks to prefill and to decode: pending + prompt - overlap, + active.

    Source: Dynamo `lib/kv-router/src/scheduling/selector/default.rs`, with credit and prefill scale 1, no decay, no
    weight on requests, temperature 0 and chance among ties. Promised KV stands for its active blocks.
    """

    def blocks(each: Known) -> float:
        size = case.demand.block_size
        return (each.pending_tokens + each.miss_tokens) / size + each.member.view.kv_tokens / size

    return chance_of_least(known, blocks, case)


def lmetric(known: Sequence[Known], case: Case) -> Known:
    """The least product of the prompt tokens to compute, pending ones too, and the batch with this request in it.

    Source: LMetric, arXiv 2603.15202; `lmetric` of Dynamo and of llm-d compute the same product.
    """
    return min(
        known,
        key=lambda each: ((each.pending_tokens + each.miss_tokens) * (each.in_flight + 1), each.member.last_chosen),
    )


class Weights(Struct, frozen=True):
    """How much each part of llm-d's blend counts; the defaults are those of its guides until 2026."""

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0


def blend_of(knowledge: Knowledge, weights: Weights = Weights()) -> Rule:  # noqa: B008 - a frozen value
    """Return llm-d's rule until 2026: the highest of 3 x matched share + 2 x queue score + 2 x free KV, ties by chance.

    Source: prefix-cache-scorer, queue-scorer and kv-cache-utilization-scorer of llm-d-router. The original reads queue
    and KV from the engines' gauges, which lag; exact knowledge has what was promised.
    """

    def blend(known: Sequence[Known], case: Case) -> Known:
        queues = [waiting(each.member, knowledge) for each in known]
        low, high = min(queues), max(queues)

        def badness(each: Known) -> float:
            queue = (high - waiting(each.member, knowledge)) / (high - low) if high > low else 1.0
            free = 1.0 - kv_share(each.member, knowledge)
            return -(weights.prefix * each.share + weights.queue * queue + weights.kv * free)

        return chance_of_least(known, badness, case)

    return blend


def weights_of(policy: str) -> Weights | None:
    """Read `blend` or `blend:PREFIX:QUEUE:KV`; None where it is another policy.

    Raises:
        ConfigError: these are not three weights, or all of them are 0.
    """
    name, colon, text = policy.partition(":")
    if name != BLEND:
        return None
    if not colon:
        return Weights()
    try:
        weights = [float(part) for part in text.split(":")]
    except ValueError:
        weights = []
    if len(weights) != 3 or not all(0 <= weight <= 1e6 for weight in weights) or not any(weights):
        raise ConfigError(f"{policy!r}: after {BLEND}: come the weights of prefix, queue and KV, such as {BLEND}:3:2:2")
    return Weights(*weights)


def waiting(member: Member, knowledge: Knowledge) -> int:
    """Return the sequences that wait there: by its gauge, or those that have not begun."""
    view = member.view
    return member.load.waiting if knowledge == "original" else max(view.sequences - view.running, 0)


def kv_share(member: Member, knowledge: Knowledge) -> float:
    """Return the share of the cache in use: by its gauge, or what was promised."""
    view = member.view
    if knowledge == "original":
        return member.load.kv_used_fraction
    return min(view.kv_tokens / view.capacity_tokens, 1.0) if view.capacity_tokens else 0.0


def sticky(known: Sequence[Known], case: Case) -> Known:
    """Among the replicas that hold 80 % of the prompt the fewest pending tokens; all are open when these are saturated.

    Source: prefix-cache-affinity-filter with token-load-scorer of llm-d-router. Saturated: the best of the warm ones
    would start 18 s later than the best of the others, at the peak rate of prefill, which here is the learnt one.
    """

    def pending_s(each: Known) -> float:
        return each.pending_tokens * each.member.rates.token_s

    warm = [each for each in known if each.share >= STICKY_SHARE_DEFAULT]
    others = [each for each in known if each.share < STICKY_SHARE_DEFAULT]
    is_late = warm and others and (min(map(pending_s, warm)) - min(map(pending_s, others)) > STICKY_PENALTY_DEFAULT_S)
    open_ = known if is_late or not warm else warm
    return chance_of_least(open_, lambda each: min(each.pending_tokens, TOKEN_LOAD_DEFAULT), case)


def chance_of_least(known: Sequence[Known], size: Callable[[Known], float], case: Case) -> Known:
    """Return one of the least, with equal chances."""
    sizes = [size(each) for each in known]
    low = min(sizes)
    least = [each for each, value in zip(known, sizes, strict=True) if value == low]
    return least[0] if len(least) == 1 else case.rng.choice(least)


def informed(rule: Rule, limit_tokens: float = inf, life_s: float = inf) -> MakePolicy:
    """Return what makes a policy of a rule; without the index it remembers so many tokens, or seconds."""
    return lambda knowledge: Informed(rule, None if knowledge == "exact" else PlacedPrefixes(limit_tokens, life_s))


def make_blend(weights: Weights) -> MakePolicy:
    """Return what makes llm-d's former rule, with the record that it had then."""

    def make(knowledge: Knowledge) -> Policy:
        record = LlmdPrefixes(LLMD_BLOCKS_DEFAULT * BLEND_BLOCK_TOKENS, BLEND_MATCH_TOKENS)
        return Informed(blend_of(knowledge, weights), None if knowledge == "exact" else record)

    return make


def make_sticky(knowledge: Knowledge) -> Policy:
    """Make llm-d's present rule, with its present record."""
    record = LlmdPrefixes(LLMD_BLOCKS_DEFAULT * STICKY_BLOCK_TOKENS, STICKY_MATCH_TOKENS)
    return Informed(sticky, None if knowledge == "exact" else record)


CACHED: dict[str, MakePolicy] = {
    "cache-threshold": informed(cache_threshold, TREE_CHARS_DEFAULT / CHARS_PER_TOKEN),
    "linear": informed(linear, life_s=DYNAMO_LIFE_DEFAULT_S),
    BLEND: make_blend(Weights()),
    "sticky": make_sticky,
    "affinity": informed(longest_match),
    "lmetric": informed(lmetric, life_s=DYNAMO_LIFE_DEFAULT_S),
}
