"""What can go wrong, whose fault it is, whether it may be tried again, and what the client is told.

One tree, one page. Nothing here knows HTTP libraries; `status` and `kind` are what an OpenAI-shaped error body needs.
"""

from __future__ import annotations

EXCERPT_BYTES = 80


def excerpt(line: bytes) -> str:
    """Return the beginning of a line of a file, for a message by which it is to be found."""
    text = line[:EXCERPT_BYTES].decode("utf-8", "replace")
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return shown if len(line) <= EXCERPT_BYTES else f"{shown}..."


class KvrouteError(Exception):
    """Root of everything that kvroute raises on purpose."""

    status = 500
    kind = "InternalServerError"
    retryable = False
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(KvrouteError):
    """The client's fault: the same request fails everywhere, so it is never retried."""

    status = 400
    kind = "BadRequestError"

    def __init__(
        self, message: str, *, param: str | None = None, status: int | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status or self.status
        self.kind = kind or self.kind


class Overloaded(KvrouteError):
    """Ours: more work than may wait here. The client should come back later."""

    status = 429
    kind = "RateLimitError"
    retry_after_s = 1.0


class NoReplica(KvrouteError):
    """Ours: no replica can take the request now."""

    status = 503
    kind = "ServiceUnavailableError"
    retry_after_s = 1.0


class IndexUnavailable(KvrouteError):
    """The shared index did not answer in time. Never reaches a client: it becomes a local answer."""


class ConfigError(KvrouteError):
    """A setting is wrong. The message names its path and the valid choices."""


class ReplicaFailed(KvrouteError):
    """Theirs: the replica did not do its part. `bytes_sent` says whether the client has seen any of its answer."""

    status = 502
    kind = "BadGatewayError"
    retryable = True

    def __init__(self, message: str, *, replica: str, bytes_sent: bool = False, answered: bool = False) -> None:
        super().__init__(message)
        self.replica = replica
        self.bytes_sent = bytes_sent
        self.answered = answered  # it said so itself, in HTTP: perhaps the request's fault, if every replica says it


class ReplicaUnreachable(ReplicaFailed):
    """No connection, or one that was closed before any byte of the answer."""


class ReplicaTimedOut(ReplicaFailed):
    """Connected, but silent past the deadline."""

    status = 504
    kind = "GatewayTimeoutError"


class ReplicaBroke(ReplicaFailed):
    """Answered, then failed: a cut stream, an error event, an `abort`, or a 5xx of its own."""
