"""What a Redis URL says: one server, Sentinel or Cluster; rediss instead of redis means TLS.

  redis://user:password@host:6379/0          unix:///run/redis.sock?db=0
  redis+sentinel://host:26379,host2:26379/service?db=0&sentinel_password=...
  redis+cluster://host:6379,host2:6379

TLS options: ssl_ca_certs, ssl_certfile, ssl_keyfile (paths), ssl_cert_reqs=none, ssl_check_hostname=false.
"""

from __future__ import annotations

import ssl
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct

from kvroute.errors import ConfigError

Address = str | tuple[str, int]  # path of a Unix socket, or host and port

SCHEMES = "redis, rediss, unix, redis+sentinel, rediss+sentinel, redis+cluster, rediss+cluster"
DEFAULT_PORT, SENTINEL_PORT = 6379, 26379
OPTIONS = {
    "db", "sentinel_username", "sentinel_password",
    "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname",
}  # fmt: skip


class Target(Struct, frozen=True, kw_only=True):
    """Where Redis is and how to log in."""

    kind: Literal["server", "sentinel", "cluster"]
    nodes: tuple[Address, ...]
    describe: str  # the URL without its secrets, for logs and errors
    username: str | None = None
    password: str | None = None
    db: int = 0
    service: str = ""  # Sentinel's name of the master
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    tls: ssl.SSLContext | None = None
    tls_options: dict[str, str] = {}


def parse_redis_url(url: str) -> Target:
    """Read a Redis URL.

    Raises:
        ConfigError: names what is wrong and what is possible.
    """
    parts = urlsplit(url)
    secure, _, kind = parts.scheme.partition("+")
    if parts.scheme not in SCHEMES.split(", "):
        raise ConfigError(f"store.url: {_hidden(url)!r} must begin with one of {SCHEMES}, followed by ://")
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if unknown := set(query) - OPTIONS:
        raise ConfigError(f"store.url: unknown option {min(unknown)!r}; there are {', '.join(sorted(OPTIONS))}")
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    path = unquote(parts.path).strip("/")
    if kind == "sentinel" and not path:
        raise ConfigError(
            "store.url: a Sentinel URL ends with the service's name, redis+sentinel://host:26379/mymaster"
        )
    db = query.get("db", path if parts.scheme in ("redis", "rediss") else "") or "0"
    if not db.isdigit() or (kind == "cluster" and db != "0"):
        raise ConfigError(f"store.url: database {db!r} must be a number, and 0 on a cluster")
    if secure == "unix" and not path:
        raise ConfigError("store.url: a unix URL names the socket's path, unix:///run/redis.sock")
    nodes: tuple[Address, ...] = (f"/{path}",) if secure == "unix" else _hosts(hosts, kind)
    options = {name: value for name, value in query.items() if name.startswith("ssl_")}
    return Target(
        kind="sentinel" if kind == "sentinel" else "cluster" if kind == "cluster" else "server",
        nodes=nodes,
        describe=f"{parts.scheme}://{hosts}{parts.path}",
        username=unquote(username) or None,
        password=unquote(password) if login else None,
        db=int(db),
        service=path if kind == "sentinel" else "",
        sentinel_username=query.get("sentinel_username"),
        sentinel_password=query.get("sentinel_password"),
        tls=_tls(options) if secure == "rediss" else None,
        tls_options=options,
    )


def _hosts(text: str, kind: str) -> tuple[tuple[str, int], ...]:
    default = SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT
    found = []
    for entry in text.split(",") if kind else [text]:
        try:
            one = urlsplit(f"//{entry}")
            found.append((one.hostname or "localhost", one.port or default))
        except ValueError as error:
            raise ConfigError(f"store.url: {entry!r} is no host and port: {error}") from None
    return tuple(found)


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if options.get("ssl_certfile"):
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"store.url: the certificates cannot be read: {error}") from None
    if options.get("ssl_check_hostname", "true").lower() in ("false", "no", "0"):
        context.check_hostname = False
    if options.get("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _hidden(url: str) -> str:
    """The URL without what stands before an @."""
    scheme, found, rest = url.partition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}"
