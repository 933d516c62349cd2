"""A stream of events that a test speaks into, in the place of a socket."""

from __future__ import annotations

from typing import Any

from kvroute.adapters.event_feed import EventFeed
from kvroute.kv.event_sequence import EventSink, Position, digest_of
from tests.kv.encoded import encoded


class SpokenStream:
    """One router's end of an engine's stream."""

    def __init__(self, engine: Engine, sink: EventSink, position: Position | None) -> None:
        self.engine, self.sink, self.position = engine, sink, position
        self.is_settled = True
        self.replay_endpoint: str | None = "spoken"

    async def start(self) -> None:
        """Replay what the engine keeps, from the position on, and hear what comes."""
        self.engine.listeners.append(self)
        if self.position is not None and not self.engine.has_said(self.position):
            self.position = None
            self.sink.new_life()
        after = self.position.seq if self.position else -1
        if self.position is not None and self.engine.kept_from > after + 1:
            self.sink.gap(after + 1, self.engine.kept_from - 1)
        for seq in range(max(after + 1, self.engine.kept_from), len(self.engine.batches)):
            self.hear(seq)

    async def close(self) -> None:
        if self in self.engine.listeners:
            self.engine.listeners.remove(self)

    def rewind(self, position: Position | None) -> None:
        """Say again what came after a position, as far as the engine keeps it."""
        after = position.seq if position else -1
        for seq in range(max(after + 1, self.engine.kept_from), len(self.engine.batches)):
            self.hear(seq)

    def hear(self, seq: int) -> None:
        payload = self.engine.batches[seq]
        self.position = Position(seq, digest_of(payload))
        self.sink.batch(seq, payload)


class Engine:
    """What one engine has said; routers follow it with `feed`."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.listeners: list[SpokenStream] = []
        self.kept_from = 0

    def feed(self, model: str = "m", capacity_blocks: int = 1000) -> EventFeed:
        return EventFeed(model, capacity_blocks, lambda sink, position: SpokenStream(self, sink, position))

    def say(self, *events: dict[str, Any]) -> None:
        self.batches.append(encoded(list(events)))
        for listener in list(self.listeners):
            listener.hear(len(self.batches) - 1)

    def has_said(self, position: Position) -> bool:
        """Say whether the batch under a number is the one that was heard."""
        return position.seq < len(self.batches) and digest_of(self.batches[position.seq]) == position.digest

    def lose(self, *events: dict[str, Any]) -> None:
        """Say what nobody hears, and can no longer be asked for."""
        self.batches.append(encoded(list(events)))
        seq = len(self.batches) - 1
        self.kept_from = seq + 1
        for listener in self.listeners:
            listener.sink.gap(seq, seq)

    def restart(self) -> None:
        self.batches, self.kept_from = [], 0
        for listener in self.listeners:
            listener.position = None
            listener.sink.new_life()
