"""What imagined users say: system prompts shared by groups, and conversations that grow turn by turn.

Pure: the same seed gives the same words. Lengths are in words of the list below, each about one token for the usual
tokenizers; nothing here counts tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

VOCABULARY = """
the a of to in is it on that this for with as by at from about into over after before under again then once here there
when where which who what how why all any both each few more most other some such only own same so than too very can
will just should now river stone light paper water table window garden mountain street market letter number answer
question morning evening summer winter story picture music color shape line circle price weight speed engine wheel
bridge harbor island forest village school doctor teacher farmer sailor painter writer friend neighbor family child
book page word sentence language history science nature energy matter force motion time space point value measure
"""
WORDS = VOCABULARY.split()

Message = dict[str, str]


@dataclass(frozen=True)
class Shape:
    """How conversations look."""

    groups: int = 4  # distinct system prompts; a few are popular, the others less so
    system_tokens: int = 1500  # length of each
    turns: int = 4  # requests a conversation
    question_tokens: int = 80  # length of each new user message, on average
    answer_tokens: int = 64  # bound of each answer
    seed: int = 1

    def system_prompt(self, group: int) -> str:
        """Return the instructions that a whole group of conversations shares."""
        return f"You serve group {group}. " + say(random.Random(f"{self.seed}/{group}"), self.system_tokens)

    def pick_group(self, rng: random.Random) -> int:
        """Choose a group; the n-th is chosen 1/n as often as the first."""
        return rng.choices(range(self.groups), [1 / (rank + 1) for rank in range(self.groups)])[0]


@dataclass
class Conversation:
    """One user's dialogue so far."""

    shape: Shape
    rng: random.Random
    messages: list[Message] = field(default_factory=list)

    def ask(self) -> list[Message]:
        """Add a question, and before the first one the system prompt; return what to send."""
        if not self.messages:
            self._add("system", self.shape.system_prompt(self.shape.pick_group(self.rng)))
        length = self.rng.uniform(0.5, 1.5) * self.shape.question_tokens
        self._add("user", say(self.rng, max(1, round(length))))
        return self.messages

    def hear(self, answer: str) -> None:
        """Add what the model said; the next question builds on it."""
        self._add("assistant", answer)

    def _add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def say(rng: random.Random, words: int) -> str:
    """Return so many words."""
    return " ".join(rng.choices(WORDS, k=words))
