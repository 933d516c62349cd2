"""How fast replicas are, learnt from what they do.

Three numbers for each base model, pooled over its replicas: the overhead of any request, seconds per prefill token, and
seconds per decode step. Two factors for each replica say how it differs; inside a dead band they count as 1, so that
noise in the estimates neither starves a replica nor favours one. A new replica has factors of 1: it starts with what
its peers have taught.

Each number is a geometric mean that forgets, fed with clamped ratios: an outlier moves it little, it cannot become zero
or negative, and a seed that is wrong by ten is forgotten after some requests.

This file does not know requests or leases, only tokens and seconds.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct
from msgspec.structs import replace

SEED_FIXED_S = 0.015  # request overhead to the first token; 17 ms was seen for a full hit on a small CPU engine
SEED_TOKEN_S = 1 / 20_000  # a third of the roofline of 8B on an H100: 2 x 8e9 FLOP a token at 989 TFLOP/s, 61,000/s
SEED_STEP_S = 0.005  # 16 GB of weights over 3.35 TB/s: 4.8 ms
SEQUENCE_GROWTH = 0.01
"""How much a further sequence lengthens a step, in steps of an empty batch, its cache apart: arithmetic, sampling and
bookkeeping. 8B on an H100: 2 x 8e9 FLOP at 400 TFLOP/s are 40 us, of 4.8 ms."""
KV_GROWTH = 8e-6
"""The same for each token in the cache of those sequences, which a step reads: 131,072 B at 3.35 TB/s, of 4.8 ms."""
ATTENTION_TOKENS = 30_000.0
"""Context at which attention costs a token as much as all weights do: 2 x parameters / (4 x layers x width), FLOP over
FLOP; 8B with 32 layers of width 4,096 gives 30,500, 70B with 80 of 8,192 gives 53,000."""
COPY_TOKEN_S = 131_072 / 55e9  # to bring a token's cache back from CPU memory: 8B over PCIe 5
ADAPTER_S = 0.1  # assumed: to load a LoRA adapter of some 100 MB that the engine does not hold

GAIN_MIN = 0.05  # weight of a new observation once many were seen: the last 20 or so count
RATIO_MAX = 4.0  # an observation counts as at most this many times off
SAME_SPEED = 1.25  # replicas whose speeds differ by less are taken as equal
PUBLISH_AT = 1.02  # smaller moves of an estimate change no decision
MODELS_MAX = 256
SETTLED_AT = 8  # observations after which a pooled number is good enough to compare replicas with
STEPS_MIN = 8  # answers shorter than this say little about the step time


class Rates(Struct, frozen=True):
    """One replica's speed, as pricing uses it. The first three are learnt, the others follow from the model's shape."""

    fixed_s: float = SEED_FIXED_S
    token_s: float = SEED_TOKEN_S  # per token of prefill
    step_s: float = SEED_STEP_S  # per decode step, of an empty batch
    sequence_growth: float = SEQUENCE_GROWTH
    kv_growth: float = KV_GROWTH
    attention_tokens: float = ATTENTION_TOKENS
    copy_token_s: float = COPY_TOKEN_S
    adapter_s: float = ADAPTER_S

    def growth_at(self, sequences: float, kv_tokens: float) -> float:
        """Return how much longer than in an empty batch a step is, in empty steps: 0 is as long."""
        return self.sequence_growth * sequences + self.kv_growth * kv_tokens

    def step_at(self, sequences: float, kv_tokens: float) -> float:
        """Return the time of a step with that many sequences in the batch, which hold `kv_tokens` in all."""
        return self.step_s * (1.0 + self.sequence_growth * sequences + self.kv_growth * kv_tokens)


SEED = Rates()


class Steady:
    """A positive number, learnt from noisy observations."""

    __slots__ = ("seen", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.seen = 0.0  # observations, by their weight

    def learn(self, ratio: float, weight: float = 1.0) -> None:
        """Take in that an observation was `ratio` times the present value; `weight` of it counts, 0 to 1."""
        self.seen += weight
        clamped = min(max(ratio, 1 / RATIO_MAX), RATIO_MAX)
        self.value *= clamped ** (weight * max(1 / (self.seen + 1), GAIN_MIN))


class Speed:
    """How one replica differs from the others of its model: above 1 is slower."""

    __slots__ = ("prefill", "step")

    def __init__(self) -> None:
        self.prefill = Steady(1.0)
        self.step = Steady(1.0)


class ModelRates:
    """What the replicas of one base model have taught. `version` changes when `published` does."""

    def __init__(self, seed: Rates) -> None:
        self.published = seed
        self.version = 0
        self._fixed = Steady(seed.fixed_s)
        self._token = Steady(seed.token_s)
        self._step = Steady(seed.step_s)

    def learn_prefill(self, speed: Speed, tokens: float, seconds: float) -> None:
        """Learn from a first token that had to wait for `tokens` of prefill alone.

        The observation's ratio to the expectation is laid on overhead and tokens by their shares in it, so that long
        prompts teach the rate and short ones the overhead.
        """
        if seconds <= 0.0:
            return
        computing = tokens * self._token.value
        expected = self._fixed.value + computing
        ratio, share = seconds / expected, computing / expected
        if self._token.seen >= SETTLED_AT:
            speed.prefill.learn(ratio / speed.prefill.value, share)
        self._fixed.learn(ratio, 1.0 - share)
        self._token.learn(ratio, share)
        self._publish()

    def learn_step(self, speed: Speed, steps: int, seconds: float, sequences: float, kv_tokens: float) -> None:
        """Learn from an answer of `steps` tokens that took `seconds` in such a batch."""
        if steps < STEPS_MIN or seconds <= 0.0:
            return
        ratio = seconds / steps / (1.0 + self.published.growth_at(sequences, kv_tokens)) / self._step.value
        if self._step.seen >= SETTLED_AT:
            speed.step.learn(ratio / speed.step.value)
        self._step.learn(ratio)
        self._publish()

    def rates_of(self, speed: Speed) -> Rates:
        """Return one replica's rates. The overhead is never a reason to choose, so it is the same for all."""
        known = self.published
        prefill, step = factor(speed.prefill), factor(speed.step)
        if prefill == step == 1.0:
            return known
        return replace(known, token_s=known.token_s * prefill, step_s=known.step_s * step)

    def _publish(self) -> None:
        old, fixed_s, token_s, step_s = self.published, self._fixed.value, self._token.value, self._step.value
        if moved(old.fixed_s, fixed_s) or moved(old.token_s, token_s) or moved(old.step_s, step_s):
            self.published = replace(old, fixed_s=fixed_s, token_s=token_s, step_s=step_s)
            self.version += 1


def factor(difference: Steady) -> float:
    """Return a replica's factor: 1 unless it is clearly faster or slower than the others."""
    value = difference.value
    return 1.0 if 1 / SAME_SPEED < value < SAME_SPEED else value


def moved(old: float, new: float) -> bool:
    """Return whether an estimate has moved enough to matter."""
    return not 1 / PUBLISH_AT < new / old < PUBLISH_AT


class RateBook:
    """The rates of every base model; the least recently joined is forgotten beyond MODELS_MAX."""

    def __init__(self, seed: Rates = SEED) -> None:
        self._seed = seed
        self._models: OrderedDict[str, ModelRates] = OrderedDict()

    def seed(self, base: str, rates: Rates) -> None:
        """Give a model its own seed; one that has been learnt from keeps what it learnt."""
        if base not in self._models:
            self.of(base)
            self._models[base] = ModelRates(rates)

    def of(self, base: str) -> ModelRates:
        """Return the rates of a base model, seeded at first sight."""
        if base not in self._models:
            self._models[base] = ModelRates(self._seed)
            if len(self._models) > MODELS_MAX:
                self._models.popitem(last=False)
        self._models.move_to_end(base)
        return self._models[base]
