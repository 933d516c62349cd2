"""A transport without a socket: hands bytes to a protocol, keeps what the protocol writes, obeys it when it pauses."""

from __future__ import annotations

import asyncio
from collections import deque


class Wire(asyncio.Transport):
    """One connection as the protocol sees it. The other side says things with `say` and may hang up with `hang_up`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_over = False
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._said: deque[bytes] = deque()
        self._is_paused = self._is_closing = False
        protocol.connection_made(self)

    def say(self, data: bytes) -> None:
        self._said.append(data)
        self._deliver()

    def hang_up(self) -> None:
        """Close from the other side, in order, as a server does at the end of its answer."""
        if not self._is_closing and not self._protocol.eof_received():
            self.close()

    def _deliver(self) -> None:
        while self._said and not self._is_paused and not self._is_closing:
            self._protocol.data_received(self._said.popleft())

    def _end(self) -> None:
        self.is_over = True
        self._protocol.connection_lost(None)

    # The protocol's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert isinstance(data, bytes)
        if not self._is_closing:
            self.written += data

    def write_eof(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._end)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._deliver)
