"""Addresses of listeners, as people read them."""

from __future__ import annotations

import errno
import os
import socket

from kvroute.errors import ConfigError


def cannot_listen(error: OSError, host: str, port: int, name: str) -> ConfigError:
    """Say which address cannot be had, and the remedy; `name` is the section of the settings."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES) and not isinstance(error, socket.gaierror):
        remedy = f"set another {name}.port, or 0 for any free one"
    else:
        remedy = f"set {name}.host to an address of this machine"
    return ConfigError(f"`{name}`: cannot listen on {host}:{port}: {_reason(error)}; {remedy}")


def _reason(error: OSError) -> str:
    """Return the system's words: asyncio puts a sentence of its own, with the address in it, in their place."""
    if error.errno is None or isinstance(error, socket.gaierror):  # whose numbers are not the system's
        return error.strerror or str(error)
    return os.strerror(error.errno)


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the URL at which this machine reaches a listener."""
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
