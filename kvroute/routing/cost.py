"""What placing a request on a replica costs, in seconds, term by term.

    cost = wait + copy + prefill + delay + adapter + (1 - ttft_weight) x (stall + decode) + overflow

Every term is a pure function `(view, work, rates) -> seconds`: of what was promised to the replica, what the request
asks of it, and how fast it is. Terms know no policy and no other replica; they are estimates that only have to rank.

    wait      until the step under way has ended, the prompts ahead are computed, and there is room to begin
    copy      of prefix blocks that lie there on a lower tier
    prefill   of what it does not hold, attention's quadratic part included
    delay     what those wait longer who will come while it is computed
    adapter   loading a LoRA adapter that was not used there lately
    stall     what this request takes from those that run there: its prefill, and longer steps while it answers
    decode    its own answer, at the batch and the KV that it meets
    overflow  what is computed again because it does not fit: preempted sequences, evicted prefixes

With `ttft_weight` 0 the sum is the time to the last token that this placement adds, over all requests there.

Not known here: how far a prefill has come; it counts in full until its first byte.
"""

from __future__ import annotations

from msgspec import Struct

from kvroute.routing.rates import ATTENTION_TOKENS, Rates

REUSE_SHARE = 0.25
"""Share of evicted cached tokens that will be asked for again, where conversations have not shown it. Victims are the
least recently used, so it is well under the hit rates of 0.5 to 0.8 that agent traces reach; 0 would make copies of a
prefix free even where caches are full."""

TERMS = ("wait", "copy", "prefill", "delay", "adapter", "stall", "decode", "overflow")
Price = tuple[float, float, float, float, float, float, float, float]  # seconds, in the order of TERMS, weights applied


class View(Struct, frozen=True):
    """A replica as pricing sees it: all routers' promises, and load that no router explains, summed."""

    pending_prefill_tokens: int = 0
    running: int = 0  # sequences that are past their prefill: another prefill slows each of them
    sequences: int = 0  # all sequences there, waiting ones too
    kv_tokens: int = 0  # promised KV, answers included
    capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    pinned_share: float = 1.0  # of a request's hits, that it holds alone, see `pinned`
    busy: float = 0.0  # share of the time that it computes prompts, lately
    reuse_share: float = REUSE_SHARE  # of what is evicted there next, that will be asked for again
    filled_tokens: int = 0  # tokens lying in the cache, running or only kept; 0 where the replica does not report


class Work(Struct, frozen=True):
    """What a request asks of one replica; differs between replicas only by what they hold already.

    Sums are fields because every replica's price needs them: make it with `work_of`.
    """

    hit_tokens: int
    miss_tokens: int
    output_tokens: float  # expected for each sequence
    sequences: int
    compute_tokens: float  # to prefill, with attention over everything before them counted in
    new_tokens: float  # that need room which nothing holds yet
    copy_tokens: int = 0  # of the hits, those that have to be brought back from a lower tier
    loads_adapter: bool = False  # it needs a LoRA adapter that was not used there lately


def work_of(
    hit_tokens: int,
    miss_tokens: int,
    output_tokens: float,
    sequences: int = 1,
    *,
    copy_tokens: int = 0,
    loads_adapter: bool = False,
    attention_tokens: float = ATTENTION_TOKENS,
) -> Work:
    """Describe what a request asks of a replica that holds `hit_tokens` of its prompt, on whatever tier."""
    new_tokens = miss_tokens + copy_tokens + sequences * output_tokens
    compute = compute_tokens(hit_tokens, miss_tokens, attention_tokens)
    return Work(
        hit_tokens, miss_tokens, output_tokens, sequences, compute, new_tokens, copy_tokens, loads_adapter
    )  # fmt: skip


def compute_tokens(hit_tokens: int, miss_tokens: int, attention_tokens: float = ATTENTION_TOKENS) -> float:
    """Return the misses in tokens of equal work: each attends to all tokens before it."""
    return miss_tokens * (1.0 + (hit_tokens + miss_tokens / 2) / attention_tokens)


def kv_tokens(view: View, work: Work) -> float:
    """Return the tokens that the request holds in the cache when it ends, hits that others hold as well apart."""
    return view.pinned_share * (work.hit_tokens - work.copy_tokens) + work.new_tokens


def wait_s(view: View, work: Work, rates: Rates) -> float:
    """Time until the step that runs has ended, the prompts ahead are computed, and there is room to begin."""
    return view.pending_prefill_tokens * rates.token_s + step_s(view, rates) + room_s(view, work, rates)


def step_s(view: View, rates: Rates) -> float:
    """Time of a step of those that run there: nothing begins before it has ended, and prompts share one with it."""
    return rates.step_at(view.running, view.kv_tokens) if view.running else 0.0


def room_s(view: View, work: Work, rates: Rates) -> float:
    """Time until enough running sequences have ended to free a slot each, and KV for the prompt.

    With remaining times spread evenly over one answer, a share f of the sequences has ended after f x one answer.
    """
    if not view.sequences:
        return 0.0
    share = 0.0
    if view.max_num_seqs:
        share = (view.sequences + work.sequences - view.max_num_seqs) / view.sequences
    if view.capacity_tokens and view.kv_tokens:
        prompt_tokens = kv_tokens(view, work) - work.sequences * work.output_tokens
        share = max(share, (view.kv_tokens + prompt_tokens - view.capacity_tokens) / view.kv_tokens)
    if share <= 0.0:
        return 0.0
    batch = min(view.sequences, view.max_num_seqs or view.sequences)
    return share * work.output_tokens * rates.step_at(batch, view.kv_tokens)


def copy_s(view: View, work: Work, rates: Rates) -> float:
    """Time to bring hits back from a lower tier."""
    return work.copy_tokens * rates.copy_token_s


def prefill_s(view: View, work: Work, rates: Rates) -> float:
    """Time to compute what the replica does not hold, with the overhead of any request."""
    return rates.fixed_s + work.compute_tokens * rates.token_s


def delay_s(view: View, work: Work, rates: Rates) -> float:
    """Time that this prefill takes from requests which are still to come, summed over them.

    Where prompts keep a replica busy for a share of the time, so much work comes while this one is computed, and waits
    for it. That those behind wait longer too is left out: they can go elsewhere.
    """
    return work.compute_tokens * rates.token_s * view.busy


def adapter_s(view: View, work: Work, rates: Rates) -> float:
    """Time to load the adapter where it was not used lately."""
    return rates.adapter_s if work.loads_adapter else 0.0


def first_token_s(view: View, work: Work, rates: Rates) -> float:
    """Time until the first token of the answer."""
    time_s = wait_s(view, work, rates) + prefill_s(view, work, rates)
    if work.copy_tokens or work.loads_adapter:
        time_s += copy_s(view, work, rates) + adapter_s(view, work, rates)
    return time_s


def stall_s(view: View, work: Work, rates: Rates) -> float:
    """Time that this request takes from the sequences which run there, summed over them.

    Its prefill stands in their way once; while it answers, each of their steps is longer by what it adds to the batch.
    """
    if not view.running:
        return 0.0
    growth = rates.growth_at(work.sequences, work.hit_tokens + work.miss_tokens)
    return view.running * (work.compute_tokens * rates.token_s + work.output_tokens * rates.step_s * growth)


def decode_s(view: View, work: Work, rates: Rates) -> float:
    """Time from first token to last, at the batch that this request makes larger."""
    tokens = view.kv_tokens + work.hit_tokens + work.miss_tokens
    return work.output_tokens * rates.step_at(view.sequences + work.sequences, tokens)


def overflow_s(view: View, work: Work, rates: Rates) -> float:
    """Time to recompute what will not fit.

    An engine that runs out of blocks preempts the sequence that it admitted last, and that one is computed again from
    its beginning: too many promised tokens cost at least one sequence of average length there. Cached tokens that make
    room for new ones are computed again only if somebody asks for them.
    """
    if not view.capacity_tokens:
        return 0.0
    needed = kv_tokens(view, work)
    live = view.kv_tokens + needed - view.capacity_tokens
    evicted = view.filled_tokens + work.new_tokens - view.capacity_tokens
    if live <= 0.0 and evicted <= 0.0:
        return 0.0
    evicted = min(max(evicted, 0.0), work.new_tokens)
    if live <= 0.0:
        return view.reuse_share * evicted * rates.token_s
    live = min(live, needed)  # what was over before is not this request's doing
    preempted = max(live, (view.kv_tokens + needed) / (view.sequences + work.sequences))
    return (preempted + view.reuse_share * max(evicted - live, 0.0)) * rates.token_s


def price(view: View, work: Work, rates: Rates, ttft_weight: float) -> Price:
    """Return all terms; their sum is the cost.

    Args:
        view: the replica.
        work: what it would have to do.
        rates: how fast it is.
        ttft_weight: 0 counts the time to the last token and the others' delay in full, 1 not at all.
    """
    rest = 1.0 - ttft_weight
    return (
        wait_s(view, work, rates),
        copy_s(view, work, rates) if work.copy_tokens else 0.0,
        prefill_s(view, work, rates),
        delay_s(view, work, rates),
        rates.adapter_s if work.loads_adapter else 0.0,
        rest * stall_s(view, work, rates),
        rest * decode_s(view, work, rates),
        overflow_s(view, work, rates),
    )


def total_s(view: View, work: Work, rates: Rates, ttft_weight: float) -> float:
    """Return the sum of `price` without its parts: of every replica it is asked for, of the chosen one the parts."""
    sequences, kv, capacity = view.sequences + work.sequences, view.kv_tokens, view.capacity_tokens
    prompt_tokens, answer_s = work.hit_tokens + work.miss_tokens, work.output_tokens * rates.step_s
    prefill, rest = work.compute_tokens * rates.token_s, 1.0 - ttft_weight
    by_sequence, by_token = rates.sequence_growth, rates.kv_growth
    total = view.pending_prefill_tokens * rates.token_s + rates.fixed_s + prefill * (1.0 + view.busy)
    total += rest * answer_s * (1.0 + by_sequence * sequences + by_token * (kv + prompt_tokens))
    if view.running:
        total += rates.step_s * (1.0 + by_sequence * view.running + by_token * kv)
        total += rest * view.running * (prefill + answer_s * (by_sequence * work.sequences + by_token * prompt_tokens))
    if work.copy_tokens or work.loads_adapter:
        total += copy_s(view, work, rates) + adapter_s(view, work, rates)
    if capacity:
        needed = view.pinned_share * (work.hit_tokens - work.copy_tokens) + work.new_tokens
        if kv + needed > capacity or view.filled_tokens + work.new_tokens > capacity:
            return total + room_s(view, work, rates) + overflow_s(view, work, rates)
    if view.max_num_seqs and sequences > view.max_num_seqs:
        total += room_s(view, work, rates)
    return total


class Slo(Struct, frozen=True):
    """What a request should get. With one, as many requests as possible get it, and the cost decides among equals."""

    ttft_s: float  # to the first token
    step_s: float  # from one token to the next

    def is_met(self, view: View, work: Work, rates: Rates) -> bool:
        """Return whether a request would get it there, and those that run there would keep it."""
        tokens = view.kv_tokens + work.hit_tokens + work.miss_tokens
        return (
            first_token_s(view, work, rates) <= self.ttft_s
            and rates.step_at(view.sequences + work.sequences, tokens) <= self.step_s
        )
