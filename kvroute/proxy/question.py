"""A request made ready for routing: its prompts as chains, what each replica holds of them, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from kvroute.adapters.index import Index, Match, Namespace
from kvroute.kv.chain import PrefixChain, Root
from kvroute.kv.prompt import Prompt
from kvroute.proxy.catalogue import ServedModel
from kvroute.proxy.openai import Inference
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.demand import Demand
from kvroute.routing.honesty import Honesty
from kvroute.routing.replica import Holding, ReplicaId
from kvroute.routing.seen import SeenWindow

SUSPECT_DISCOUNT = 0.5  # of a hit on blocks that may be gone
NOTHING_HELD = Match(holdings=(), source="index")


class Question(Struct, frozen=True):
    """What routing is asked, and what the account wants to know about it later."""

    served: ServedModel
    root: Root  # of the prompts' chains
    prompts: tuple[Prompt, ...]  # in the order of the request; empty where they were not understood
    demand: Demand
    hits: Mapping[ReplicaId, int]  # prompt tokens that each replica need not compute
    stored: Mapping[
        ReplicaId, int
    ]  # of those with slower tiers, what they have on any; where it is more than in `hits`
    match: Match
    reads_cache: bool  # whether its engine looks for cached blocks at all
    seen_tokens: int  # of the prompts, that went through this deployment before

    @property
    def reachable_tokens(self) -> int:
        """How many prompt tokens the best replica holds."""
        return max(self.hits.values(), default=0)


class Asker:
    """Turns requests into questions."""

    def __init__(self, index: Index, seen: SeenWindow, stats: HandlerStats, honesty: Honesty | None = None) -> None:
        self._honesty = honesty or Honesty()
        self._index = index
        self._seen = seen
        self._stats = stats

    async def ask(self, inference: Inference, served: ServedModel, tenant: str, priority: int = 0) -> Question:
        """Read the prompts and look their chains up, in one round trip."""
        entry, root, stats = served.entry, served.root(inference.cache_salt), self._stats
        read, block_size = entry.reader.read, entry.block_size
        prompts = tuple([await read(source, block_size=block_size, root=root) for source in inference.sources])
        match = await self._match(entry.namespace, prompts)
        stats.unread_prompts += not prompts
        hits, stored = self._known(prompts, match) if inference.reads_cache else ({}, {})
        seen_tokens = 0
        if inference.reads_cache:
            seen_tokens = max(sum(map(self._see, prompts)), *hits.values(), 0)  # other routers may have seen more
        return Question(
            served=served,
            root=root,
            prompts=prompts,
            demand=demand_of(inference, served, prompts, tenant, priority),
            hits=hits,
            stored=stored,
            match=match,
            reads_cache=inference.reads_cache,
            seen_tokens=seen_tokens,
        )

    async def again(self, question: Question) -> Question:
        """Return a question with what replicas hold now: it may have waited for long since it was asked."""
        match = await self._match(question.served.entry.namespace, question.prompts)
        hits, stored = self._known(question.prompts, match) if question.reads_cache else ({}, {})
        return replace(question, hits=hits, stored=stored, match=match)

    async def _match(self, namespace: Namespace, prompts: tuple[Prompt, ...]) -> Match:
        chains = [prompt.reusable for prompt in prompts]
        if not any(chains):
            return NOTHING_HELD
        self._stats.lookups += 1
        match = await self._index.match(namespace, chains)
        self._stats.local_lookups += match.source == "local"
        return match

    def _known(
        self, prompts: tuple[Prompt, ...], match: Match
    ) -> tuple[Mapping[ReplicaId, int], Mapping[ReplicaId, int]]:
        """Return the prompt tokens that each replica need not compute, and where slower tiers have more, that."""
        hits = self._honesty.discounted(hits_of(prompts, match.holdings))
        for replica, doubt in match.doubts.items():
            if replica in hits:
                hits[replica] = int(hits[replica] * (1 - SUSPECT_DISCOUNT * doubt))
        if not match.slower:
            return hits, {}
        return hits, self._honesty.discounted(hits_of(prompts, [tiers[-1] for tiers in match.slower]))

    def _see(self, prompt: Prompt) -> int:
        return min(self._seen.see(prompt.chain), prompt.hit_limit_blocks) * prompt.block_size


def demand_of(
    inference: Inference, served: ServedModel, prompts: tuple[Prompt, ...], tenant: str, priority: int = 0
) -> Demand:
    """Return what a request asks of a replica."""
    lengths = [prompt.tokens for prompt in prompts] or [inference.guessed_tokens]
    return Demand(
        model=served.lora or served.entry.base,
        prompt_tokens=sum(lengths),
        longest_prompt=max(lengths),
        sequences=inference.sequences,
        output_tokens=inference.max_tokens,
        tenant=tenant,
        exact=bool(prompts) and all(prompt.exact for prompt in prompts),
        priority=priority,
        streamed=inference.stream,
        chain=prompts[0].chain if len(prompts) == 1 else PrefixChain(b""),
        block_size=served.entry.block_size,
    )


def hits_of(prompts: tuple[Prompt, ...], holdings: Iterable[Holding]) -> dict[ReplicaId, int]:
    """Return for every replica how many prompt tokens it need not compute, summed over the chains."""
    hits: dict[ReplicaId, int] = {}
    for prompt, holding in zip(prompts, holdings, strict=False):
        limit, size = prompt.hit_limit_blocks, prompt.block_size
        for replica, blocks in holding.items():
            hits[replica] = hits.get(replica, 0) + min(blocks, limit) * size
    return hits
