"""What conversations of one model usually do, learnt from those that went by: turns to come, growth, pauses.

    turns    of those that have had k turns, which share ends there; by k, in steps that widen with k
    growth   tokens that a turn adds to the prompt
    pauses   time from the end of an answer to the next prompt, by powers of two

All are means that forget. Before anything was seen the shares say that a conversation which has gone on for long will
go on for long (Lindy): after k turns one in 2k + 1 ends.

A forecast is a vector: for each of HORIZONS turns ahead, the tokens that a conversation will probably hold by then, the
chance that it is over counted in. Sums of such vectors say when the pool will be fullest: runs that began together
peak together, and runs that began one after the other do not.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, inf, log, log2

from kvroute.routing.conversations import Conversation

HORIZONS = (0, 1, 2, 4, 8, 16)  # turns ahead; what comes later can be met by taking a seat away
Forecast = tuple[float, ...]  # tokens, one for each of HORIZONS

FORGET = 0.998  # what an older observation counts for when another comes: the last 500 or so
PRIOR_TURNS = 4.0  # observations that the seed of each step counts for
REFRESH = 16
SHARE_MAX = 0.999
STEPS = 48  # 1, 2, .. 8 turns, then four steps an octave
GROWTH_SEED_TOKENS = 500.0
GROWTH_GAIN = 0.05
GROWTH_PRIOR_TURNS = 3.0  # turns of its own after which a conversation's growth counts as much as everybody's

OVER_SHARE = 0.98  # of pauses, after which a conversation is taken to be over
OVER_MIN_S = 4.0
PAUSE_MIN_S = 1 / 16  # pauses up to this are one step
PAUSE_STEPS = 18  # the last one begins at 4,096 s
PAUSE_SEED_S = 4.0
PAUSE_PRIOR = 4.0
PAUSE_WEIGHT_MAX = 1e6
CHANCES_MAX = 4096
MEMORY_SEED_S = 5.0  # before pauses were seen
MODELS_MAX = 256


class Habits:
    """What was learnt from the conversations of one model."""

    def __init__(self) -> None:
        self.growth_tokens = GROWTH_SEED_TOKENS
        self.prompt_tokens = 0.0  # mean of later turns' prompts; 0 = none was seen
        self.own_tokens = 0.0  # of these, what the conversation does not share
        self.output_tokens = 0.0  # of an answer; 0 = none was seen
        self.turns_seen = 0
        self.ends_seen = 0  # conversations that seem to be over
        self.under_way = 0  # conversations with a turn that runs or waits
        self.silent = 0  # those that pause, or are over and not known to be
        self.memory_s = MEMORY_SEED_S  # how long a pausing conversation's cache should be kept, as planned
        self.planned_s = -inf  # when that was
        self._ended = [PRIOR_TURNS / (2 * first_turn(step) + 1) for step in range(STEPS)]
        self._at_risk = [PRIOR_TURNS] * STEPS
        self._survival = [0.0] * STEPS
        self._logs = [0.0] * STEPS
        self._stale = REFRESH  # observations since these two were computed
        self._chances: dict[int, tuple[float, ...]] = {}  # by turns had: of at least so many more, for each horizon
        self._pauses = [0.0] * PAUSE_STEPS
        self._pauses[pause_step(PAUSE_SEED_S)] = PAUSE_PRIOR
        self._pause_weight = 1.0  # of the next observation: it grows where older ones would have to shrink
        self._quantiles: dict[float, float] = {}
        self._stale_pauses = 0  # observations since these were computed

    def learn_turn(self, conversation: Conversation) -> None:
        """Take in that a conversation has gone on: it has just begun its second turn or a later one."""
        self._observe(conversation.turns - 1, ended=0.0)
        self.turns_seen += 1
        gain = max(GROWTH_GAIN, 1 / (self.turns_seen + 1))
        self.growth_tokens += gain * (conversation.growth_tokens - self.growth_tokens)
        self.prompt_tokens += gain * (conversation.tokens - self.prompt_tokens)
        self.own_tokens += gain * (conversation.own_tokens - self.own_tokens)

    def learn_answer(self, tokens: float) -> None:
        """Take in how long an answer was."""
        gain = GROWTH_GAIN if self.output_tokens else 1.0
        self.output_tokens += gain * (tokens - self.output_tokens)

    def learn_end(self, turns: int) -> None:
        """Take in that a conversation seems to be over after so many turns."""
        self._observe(turns, ended=1.0)
        self.ends_seen += 1

    def learn_pause(self, pause_s: float) -> None:
        """Take in how long a conversation paused before it went on."""
        self._pause_weight /= FORGET
        self._pauses[pause_step(pause_s)] += self._pause_weight
        if self._pause_weight > PAUSE_WEIGHT_MAX:
            self._pauses = [count / self._pause_weight for count in self._pauses]
            self._pause_weight = 1.0
        self._stale_pauses += 1
        if self._stale_pauses >= REFRESH:
            self._stale_pauses = 0
            self._quantiles.clear()

    def _observe(self, turns: int, ended: float) -> None:
        step = turn_step(turns)
        self._ended[step] = FORGET * self._ended[step] + ended
        self._at_risk[step] = FORGET * self._at_risk[step] + 1.0
        self._stale += 1

    def returns_after(self, silent_s: float) -> float:
        """Return the chance that a conversation which has been silent for so long will go on."""
        later = (1.0 - self.ends) * (1.0 - self._within(silent_s))
        return later / (later + self.ends)

    def _within(self, pause_s: float) -> float:
        """Return the share of pauses up to a length, evenly spread within a step."""
        total, shorter_s = 0.0, 0.0
        for end_s, share in self.pauses():
            if pause_s <= end_s:
                return total + share * (pause_s - shorter_s) / (end_s - shorter_s)
            total, shorter_s = total + share, end_s
        return 1.0

    def live(self) -> float:
        """Return how many conversations there probably are.

        Of those that are silent some are over. As many of them are as end while one is waited for; as many others as
        pause at a time.
        """
        pause_s, shorter_s = 0.0, 0.0
        for end_s, share in self.pauses():
            pause_s += share * (shorter_s + end_s) / 2
            shorter_s = end_s
        pausing, over = (1.0 - self.ends) * pause_s, self.ends * self.over_s()
        return self.under_way + self.silent * pausing / (pausing + over)

    def over_s(self) -> float:
        """Return the silence after which a conversation is taken to be over."""
        return max(OVER_MIN_S, 2 * self.pause_quantile_s(OVER_SHARE))

    def ends_after(self, turns: int) -> float:
        """Return the chance that a conversation which has had so many turns has no further one."""
        step = turn_step(turns)
        return self._ended[step] / self._at_risk[step]

    @property
    def ends(self) -> float:
        """Share of all turns that have no further one."""
        return sum(self._ended) / sum(self._at_risk)

    def goes_on_for(self, turns: int, more: int) -> float:
        """Return the chance that a conversation which has had `turns` has at least so many more."""
        start = max(turns, 1)
        return exp(self._log_survival(start + more) - self._log_survival(start))

    def _log_survival(self, turns: int) -> float:
        """Return the logarithm of the chance that a conversation has more than `turns` - 1 turns, since lately."""
        if self._stale >= REFRESH:
            self._refresh()
        step = turn_step(turns)
        return self._survival[step] + (turns - first_turn(step)) * self._logs[step]

    def _refresh(self) -> None:
        """Sum the shares up; done only now and then, since forecasts ask often."""
        self._stale, total = 0, 0.0
        self._chances.clear()
        for step, width in enumerate(STEP_WIDTHS):
            share = min(self._ended[step] / self._at_risk[step], SHARE_MAX)
            self._survival[step], self._logs[step] = total, log(1.0 - share)
            total += width * self._logs[step]

    def growth_of(self, conversation: Conversation) -> float:
        """Return the tokens that a turn of this conversation will probably add."""
        grown = conversation.tokens - conversation.first_tokens
        turns = conversation.turns - 1
        return (grown + GROWTH_PRIOR_TURNS * self.growth_tokens) / (turns + GROWTH_PRIOR_TURNS)

    def forecast(self, conversation: Conversation, output_tokens: float) -> Forecast:
        """Return what a conversation will probably hold, of its own, by each of HORIZONS.

        While a turn is under way it holds its tokens and the answer for certain; between turns only if it goes on.
        """
        own, growth = conversation.own_tokens, self.growth_of(conversation)
        chances = self._chances_after(conversation.turns)
        now = own + output_tokens if conversation.is_under_way else own * chances[0]
        return (now, *[(own + ahead * growth) * chance for ahead, chance in zip(HORIZONS[1:], chances, strict=True)])

    def _chances_after(self, turns: int) -> tuple[float, ...]:
        if self._stale >= REFRESH:
            self._refresh()
        chances = self._chances.get(turns)
        if chances is None:
            chances = tuple([self.goes_on_for(turns, ahead) for ahead in HORIZONS[1:]])
            if len(self._chances) < CHANCES_MAX:
                self._chances[turns] = chances
        return chances

    def pauses(self) -> list[tuple[float, float]]:
        """Return the steps of pauses as (longest in it, share of all), shortest first."""
        total = sum(self._pauses)
        return [(pause_end_s(step), count / total) for step, count in enumerate(self._pauses)]

    def pause_quantile_s(self, share: float) -> float:
        """Return the pause, rounded up to a step's end, that a share of all does not exceed."""
        known = self._quantiles.get(share)
        if known is None:
            known = self._quantiles[share] = self._pause_quantile_s(share)
        return known

    def _pause_quantile_s(self, share: float) -> float:
        below = 0.0
        for end_s, part in self.pauses():
            below += part
            if below >= share - 1e-9:
                return end_s
        return inf


class HabitBook:
    """The habits by model. Bounded: the one that was asked for the longest ago goes."""

    def __init__(self) -> None:
        self._habits: OrderedDict[str, Habits] = OrderedDict()
        self._last: tuple[str, Habits] | None = None  # asked for: nearly always of one model, several times a request

    def items(self) -> list[tuple[str, Habits]]:
        """Return every model with its habits."""
        return list(self._habits.items())

    def of(self, model: str) -> Habits:
        """Return a model's habits, unlearnt at first sight."""
        if self._last is not None and self._last[0] == model:
            return self._last[1]
        habits = self._habits.get(model)
        if habits is None:
            habits = self._habits[model] = Habits()
            if len(self._habits) > MODELS_MAX:
                self._habits.popitem(last=False)
        self._habits.move_to_end(model)
        self._last = (model, habits)
        return habits


def turn_step(turns: int) -> int:
    """Return the step that a number of turns belongs to: 0 for 1, .. 7 for 8, then four an octave."""
    if turns <= 8:
        return max(turns, 1) - 1
    octave = turns.bit_length() - 4
    return min(3 + octave * 4 + (turns >> (octave + 1)), STEPS - 1)


def first_turn(step: int) -> int:
    """Return the lowest number of turns of a step."""
    if step <= 7:
        return step + 1
    octave, part = divmod(step - 7, 4)
    return (4 + part) << (octave + 1)


STEP_WIDTHS = tuple([first_turn(step + 1) - first_turn(step) for step in range(STEPS)])  # in turns


def pause_step(pause_s: float) -> int:
    """Return the step that a pause belongs to."""
    if pause_s <= PAUSE_MIN_S:
        return 0
    return min(int(log2(pause_s / PAUSE_MIN_S)) + 1, PAUSE_STEPS - 1)


def pause_end_s(step: int) -> float:
    """Return the longest pause of a step."""
    return PAUSE_MIN_S * 2.0**step
