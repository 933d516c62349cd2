"""Whose request it is: a label of the account and of routing, its priority, and, with keys, the right to ask."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from kvroute.errors import BadRequest
from kvroute.proxy.headers import RawHeader, find

DEFAULT = "default"
_NAME = re.compile(rb"[A-Za-z0-9._:@/-]{1,64}")


class Tenants:
    """Maps a request's headers to a tenant."""

    def __init__(
        self,
        keys: Mapping[str, str] | None = None,
        header: str | None = None,
        *,
        classes: Mapping[str, int] | None = None,
        class_of: Mapping[str, str] | None = None,
        class_header: str | None = None,
    ) -> None:
        """Say how tenants and their priorities are told.

        Args:
            keys: API keys by tenant.
            header: names the tenant where there are no keys.
            classes: priorities by class.
            class_of: tenants' classes.
            class_header: names a request's class.
        """
        self._by_digest = {_digest(key.encode()): name for name, key in (keys or {}).items()}
        self._header = header.lower().encode() if header else None
        self._classes = {name.encode(): priority for name, priority in (classes or {}).items()}
        self._priorities = {tenant: (classes or {})[name] for tenant, name in (class_of or {}).items()}
        self._class_header = class_header.lower().encode() if class_header else None

    def tenant(self, headers: Iterable[RawHeader]) -> str:
        """Return the tenant: the key's name, or what the configured header says, or "default".

        Raises:
            BadRequest: keys are configured and the request has none of them (401).
        """
        if self._by_digest:
            return self._owner(headers)
        if self._header is None:
            return DEFAULT
        value = find(headers, self._header)
        return value.decode() if value is not None and _NAME.fullmatch(value) else DEFAULT

    def priority(self, tenant: str, headers: Iterable[RawHeader]) -> int:
        """Return the priority of a tenant's request: of the class that it names, else of the tenant's.

        Who is told by a key cannot rise above the key's own class: a header is the client's word, a key is not.
        """
        own = self._priorities.get(tenant, 0) if self._priorities else 0
        if self._class_header is None:
            return own
        value = find(headers, self._class_header)
        named = None if value is None else self._classes.get(value.strip())
        if named is None:
            return own
        return min(named, own) if self._by_digest else named

    def _owner(self, headers: Iterable[RawHeader]) -> str:
        # Looked up by digest: the time that this takes tells nothing about how much of a guessed key is right.
        name = self._by_digest.get(_digest(_presented(headers)))
        if name is None:
            message = "No valid API key was given; send it as `Authorization: Bearer KEY`"
            raise BadRequest(message, status=401, kind="AuthenticationError")
        return name


def _presented(headers: Iterable[RawHeader]) -> bytes:
    value = find(headers, b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return find(headers, b"x-api-key") or b""  # as clients of /v1/messages send it


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
