"""Conversations, recognised from the chains of prompts alone: a prompt that extends an earlier one goes on with it.

A conversation's tip is the last whole block of its latest prompt. A prompt that contains a tip continues that
conversation, unless a request of it is under way: then it is a branch, and a conversation of its own.

To find tips in a long chain without looking at every block, each lies under a mark: the hash of the last block, at or
before the tip, whose number is a multiple of STRIDE. A prompt looks up its blocks at those places, the deepest first,
and only behind one that is a mark the blocks up to the next place.

Not known here: replicas, memory and what comes of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nlargest

from kvroute.kv.chain import blocks_in, hashes_of
from kvroute.routing.demand import Demand, Prefix
from kvroute.routing.news import News

STRIDE = 8
CONVERSATIONS_MAX = 65_536
PREFIXES_MAX = 4096
LENGTHS_MAX = 64  # of shared prefixes that are counted
LENGTHS_EVERY = 32  # conversations after which the most frequent ones are found anew
HEADS_MAX = 16_384
LENGTHS_TRIED = 8  # of these, the most frequent: at so many places a prompt is compared with shared prefixes
ID_BITS = (1 << 63) - 1
ROOT = 0  # the mark of tips before the first place


class Conversation:
    """What is known of one conversation. `tokens` are its latest prompt and, once that has ended, the answer."""

    __slots__ = (
        "_answer_tokens", "first_tokens", "growth_tokens", "id", "is_elsewhere", "is_over", "is_repeated",
        "is_suspended", "is_under_way", "keeps_answers", "last_end_s", "mark", "model", "number", "parent", "prefix",
        "shared_tokens", "since_s", "tenant", "tip", "tokens", "turns",
    )  # fmt: skip

    def __init__(self, number: int, demand: Demand, shared_tokens: int, now_s: float) -> None:
        self.id = number  # the same at all routers
        self.number = number  # in the order of first being seen: the lowest is the oldest
        self.model = demand.model
        self.tenant = demand.tenant
        self.since_s = now_s
        self.shared_tokens = min(shared_tokens, demand.prompt_tokens)  # of its prompts, that others need as well
        self.turns = 0
        self.tokens = self.first_tokens = demand.prompt_tokens
        self.growth_tokens = 0  # of the latest turn: what its prompt added to the one before
        self.keeps_answers = True  # prompts go on behind them; else they are dropped, as reasoning often is
        self._answer_tokens = 0  # of the latest answer, where it is among `tokens`
        self.is_under_way = False
        self.is_elsewhere = False  # by another router, which may not have told yet that it has ended
        self.is_repeated = False  # its latest turn came to nothing: the same prompt again is no further turn
        self.is_suspended = False  # it lost its place to older ones, and its cache is to go first
        self.is_over = False  # it was silent for so long that it was taken to be over
        self.last_end_s: float | None = None  # None while a turn is under way, and before the first has ended
        self.mark = self.tip = ROOT
        self.parent: Prefix | None = None  # of the prefix
        blocks = self.shared_tokens // demand.block_size
        self.prefix = hashes_of(demand.chain)[blocks - 1] if 0 < blocks <= blocks_in(demand.chain) else ROOT

    @property
    def own_tokens(self) -> int:
        """Tokens that nobody else needs."""
        return self.tokens - self.shared_tokens

    @property
    def common(self) -> Prefix | None:
        """What its prompts share with others', None where that is nothing."""
        return None if self.prefix == ROOT else Prefix(self.prefix, self.shared_tokens, self.parent)

    def grow(self, prompt_tokens: int) -> None:
        """Move on to a longer prompt."""
        if prompt_tokens < self.tokens and self._answer_tokens:
            self.keeps_answers = False
            self.tokens -= self._answer_tokens
        self._answer_tokens = 0
        self.growth_tokens = max(prompt_tokens - self.tokens, 0)
        self.is_repeated = self.is_repeated and not self.growth_tokens
        self.tokens = prompt_tokens

    def answered(self, tokens: int) -> None:
        """Take in an answer: it is part of the history, unless an earlier one was not."""
        if self.keeps_answers:
            self._answer_tokens = tokens
            self.tokens += tokens

    def hear(self, news: News) -> None:
        """Move on to a turn that runs elsewhere."""
        self.turns, self.tokens, self.first_tokens = news.turns, news.tokens, news.first_tokens
        self.growth_tokens, self.shared_tokens, self.prefix = news.growth_tokens, news.shared_tokens, news.prefix
        self.mark, self.tip = news.mark, news.tip
        self._answer_tokens, self.parent = 0, None
        self.is_repeated = self.is_suspended = False

    def news(self, replica: str, output_tokens: float) -> News:
        """Return what another router should know."""
        return News(
            self.id, self.model, self.tenant, self.turns, self.tokens, self.first_tokens, self.growth_tokens,
            self.shared_tokens, self.prefix, self.mark, self.tip, replica, output_tokens,
        )  # fmt: skip

    def copy(self) -> Conversation:
        """Return one that is equal and belongs to nobody."""
        twin = Conversation.__new__(Conversation)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def __repr__(self) -> str:
        return f"<Conversation {self.number}: turn {self.turns}, {self.tokens} tokens>"


class Conversations:
    """The conversations lately heard of. Bounded: the one that was silent for longest is forgotten."""

    def __init__(self, limit: int = CONVERSATIONS_MAX, name: int = 0) -> None:
        self._limit = limit
        self._name = name  # from which ids are counted that no other router gives
        self._by_id: dict[int, Conversation] = {}
        self._count = 0
        self._known: OrderedDict[int, Conversation] = OrderedDict()
        self._tips: dict[int, dict[int, list[Conversation]]] = {}
        self._prefixes: OrderedDict[int, None] = OrderedDict()  # that conversations shared with others when they began
        self._lengths: dict[int, int] = {}  # of these, in blocks, and how many conversations began with such a one
        self._heads: OrderedDict[int, None] = OrderedDict()  # blocks at which new prompts had one of these lengths
        self._noted = 0  # of such conversations
        self._usual: tuple[int, ...] = ()  # the most frequent ones, shortest first

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def recognise(self, demand: Demand, shared_tokens: int, now_s: float) -> Conversation:
        """Return the conversation that a prompt continues, moved on to it, or a new one.

        Args:
            demand: the request.
            shared_tokens: of the prompt, that some replica holds already; counts where the conversation is new.
            now_s: the router's clock.
        """
        hashes = hashes_of(demand.chain)
        found = self._find(hashes)
        if found is None:
            self._count += 1
            shared_tokens = max(shared_tokens, self._begun_alike(hashes) * demand.block_size)
            found = Conversation(self._count, demand, shared_tokens, now_s)
            found.id = (self._name + self._count) & ID_BITS
            self._known[found.number] = self._by_id[found.id] = found
            found.parent = self._shared(hashes, demand.block_size, found.shared_tokens)
            self._note_heads(hashes)
            self._note_prefix(found, demand.block_size)
        else:
            if found.prefix == ROOT and self._usual:
                prefix = self._shared(hashes, demand.block_size, found.tokens)
                if prefix is not None:
                    found.prefix, found.shared_tokens = prefix.hash, prefix.tokens
            self._untip(found)
            self._known.move_to_end(found.number)
            found.grow(demand.prompt_tokens)
        found.turns += not found.is_repeated or not found.turns
        self._tip(found, hashes)
        self._forget()
        return found

    def hear(self, news: News, now_s: float) -> Conversation | None:
        """Take on what another router tells of a conversation; None where more is known already."""
        found = self._by_id.get(news.id)
        if found is None:
            if not news.replica:
                return None
            self._count += 1
            demand = Demand(model=news.model, tenant=news.tenant, prompt_tokens=news.tokens, longest_prompt=news.tokens)
            found = Conversation(self._count, demand, news.shared_tokens, now_s)
            found.id = news.id
            self._known[found.number] = self._by_id[found.id] = found
            if news.prefix != ROOT:
                self._prefixes[news.prefix] = None
        elif not news.replica:
            is_that_turn = found.is_under_way and found.is_elsewhere and found.turns == news.turns
            return found if is_that_turn else None
        elif news.turns <= found.turns:
            return None
        self._untip(found)
        self._known.move_to_end(found.number)
        found.hear(news)
        if found.tip != ROOT:
            self._tips.setdefault(found.mark, {}).setdefault(found.tip, []).append(found)
        self._forget()
        return found

    def _forget(self) -> None:
        while len(self._known) > self._limit:
            gone = self._known.popitem(last=False)[1]
            del self._by_id[gone.id]
            self._untip(gone)

    def _note_prefix(self, conversation: Conversation, block_size: int) -> None:
        """Remember what a new conversation has in common with others."""
        if conversation.prefix == ROOT:
            return
        self._prefixes[conversation.prefix] = None
        self._prefixes.move_to_end(conversation.prefix)
        if len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        lengths, length = self._lengths, conversation.shared_tokens // block_size
        lengths[length] = lengths.get(length, 0) + 1
        if len(lengths) > LENGTHS_MAX:  # what is rare goes, and what was frequent long ago counts less
            self._lengths = lengths = {one: count // 2 for one, count in lengths.items() if count > 1}
        self._noted += 1
        if len(lengths) <= LENGTHS_TRIED:
            self._usual = tuple(sorted(lengths))
        elif not self._noted % LENGTHS_EVERY:
            self._usual = tuple(sorted(nlargest(LENGTHS_TRIED, lengths, key=lengths.__getitem__)))

    def _begun_alike(self, hashes: Sequence[int]) -> int:
        """Return how many blocks a new prompt shares with an earlier one that may not have come into any cache yet."""
        return max((one for one in self._usual if one <= len(hashes) and hashes[one - 1] in self._heads), default=0)

    def _note_heads(self, hashes: Sequence[int]) -> None:
        for length in self._usual:
            if length <= len(hashes):
                self._heads[hashes[length - 1]] = None
                self._heads.move_to_end(hashes[length - 1])
        while len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)

    def _shared(self, hashes: Sequence[int], block_size: int, below_tokens: int) -> Prefix | None:
        """Return what a prompt shares with conversations that came later than one like it: the least that any does."""
        for length in self._usual:
            if length > len(hashes) or length * block_size >= below_tokens:
                return None
            if hashes[length - 1] in self._prefixes:
                return Prefix(hashes[length - 1], length * block_size)
        return None

    def foresee(self, demand: Demand, shared_tokens: int, now_s: float) -> Conversation:
        """Return what `recognise` would return, as a copy; nothing changes."""
        hashes = hashes_of(demand.chain)
        found = self._find(hashes)
        if found is None:
            shared_tokens = max(shared_tokens, self._begun_alike(hashes) * demand.block_size)
            twin = Conversation(self._count + 1, demand, shared_tokens, now_s)
            twin.parent = self._shared(hashes, demand.block_size, twin.shared_tokens)
        else:
            twin = found.copy()
            twin.grow(demand.prompt_tokens)
        twin.turns += not twin.is_repeated or not twin.turns
        return twin

    def _find(self, hashes: Sequence[int]) -> Conversation | None:
        count = len(hashes)
        for place in range(count // STRIDE * STRIDE, -1, -STRIDE):
            tips = self._tips.get(hashes[place - 1] if place else ROOT)
            if not tips:
                continue
            for at in range(min(place + STRIDE - 2, count - 1), max(place - 2, -1), -1):
                for conversation in tips.get(hashes[at], ()):
                    if not conversation.is_under_way or conversation.is_elsewhere:
                        return conversation
        return None

    def _tip(self, conversation: Conversation, hashes: Sequence[int]) -> None:
        count = len(hashes)
        if not count:
            conversation.tip = ROOT  # too short to be recognised again
            return
        place = count // STRIDE * STRIDE
        conversation.mark, conversation.tip = hashes[place - 1] if place else ROOT, hashes[count - 1]
        self._tips.setdefault(conversation.mark, {}).setdefault(conversation.tip, []).append(conversation)

    def _untip(self, conversation: Conversation) -> None:
        if conversation.tip == ROOT:
            return
        tips = self._tips[conversation.mark]
        tips[conversation.tip].remove(conversation)
        if not tips[conversation.tip]:
            del tips[conversation.tip]
        if not tips:
            del self._tips[conversation.mark]
