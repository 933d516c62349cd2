"""The settings: one YAML file, environment overrides by the same names, decoded once into strict Structs.

Only the composition root and the command line read this; every part receives the few values that it needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta, Struct

from kvroute.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
ENV_PREFIX = "KVROUTE_"

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1)]
Policy = Literal[
    "kvroute", "round-robin", "random", "least-request", "power-of-two", "consistent-hash",
    "cache-threshold", "linear", "blend", "sticky", "affinity", "lmetric",
]  # fmt: skip


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the file. Unknown keys are refused."""


class Listen(Settings, frozen=True):
    """Where a listener binds; port 0 takes any free one."""

    host: str = "127.0.0.1"
    port: Port = 8000


class ReplicaSettings(Settings, frozen=True):
    """One vLLM server."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        check_url(self.url, ("http", "https"))
        if self.url.rstrip("/").endswith("/v1"):
            raise ValueError(f"{self.url!r} ends in /v1, which kvroute adds by itself; name the server without it")
        if self.api_key is not None:
            check_key(self.api_key, "api_key")


class StoreSettings(Settings, frozen=True):
    """Where index, ledger and account live."""

    kind: Literal["redis", "memory"] = "redis"
    url: str | None = None
    deployment: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    lookup_deadline_ms: Annotated[float, Meta(gt=0, le=1000)] = 5.0
    shards: Annotated[int, Meta(ge=1, le=256)] = 1

    def __post_init__(self) -> None:
        if self.url is not None:
            schemes = (
                "redis",
                "rediss",
                "unix",
                "redis+sentinel",
                "redis+cluster",
                "rediss+sentinel",
                "rediss+cluster",
            )
            check_url(self.url, schemes)


class HoldSettings(Settings, frozen=True):
    """How long, and how much, is kept at the router until memory fits."""

    enabled: bool = True
    requests_max: Count = 10_000
    bytes_max: Count = 256 << 20
    wait_s: Seconds = 300.0


class SloSettings(Settings, frozen=True):
    """What a request should get."""

    ttft_s: Seconds
    token_s: Seconds


class RoutingSettings(Settings, frozen=True):
    """How a replica is chosen."""

    policy: Policy = "kvroute"
    ttft_weight: Annotated[float, Meta(ge=0, le=1)] = 0.8
    slo: SloSettings | None = None
    shadow: Annotated[tuple[Policy, ...], Meta(max_length=4)] = ()
    holds: HoldSettings = HoldSettings()


class HardwareSettings(Settings, frozen=True):
    """What replicas run on, for what they do not say themselves."""

    gpu: str | None = None
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1


class ProxySettings(Settings, frozen=True):
    """How requests and answers pass."""

    body_bytes_max: Count = 64 << 20
    attempts_max: Annotated[int, Meta(ge=1, le=10)] = 3
    connect_timeout_s: Seconds = 5.0
    first_byte_timeout_s: Seconds = 600.0
    idle_timeout_s: Seconds = 120.0
    no_replica_wait_s: Annotated[float, Meta(ge=0, le=600)] = 10.0
    waiting_comment_s: Annotated[float, Meta(ge=0.1, le=600)] | None = None
    ask_for_usage: bool = True
    expose_prediction: bool = False
    log_requests: bool = True
    tls_verify: bool = True
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if self.tls_ca is not None and not self.tls_verify:
            raise ValueError("tls_verify is false, so nobody would look at tls_ca; delete one of them")
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key is set, tls_certificate is not; name the certificate that belongs to the key")

    @property
    def replica_trust(self) -> bool | str:
        """Whom to believe about https:// replicas: True, False, or a file of authorities."""
        return self.tls_ca or self.tls_verify


class TenantSettings(Settings, frozen=True):
    """Who may ask, and under which label they are counted."""

    keys: dict[str, str] = {}
    header: str | None = None
    classes: dict[str, Annotated[int, Meta(ge=-1000, le=1000)]] = {}
    class_of: dict[str, str] = {}
    class_header: str | None = None

    def __post_init__(self) -> None:
        if self.class_header is not None and not self.classes:
            raise ValueError("class_header is set, classes is empty; name the classes that clients may ask for")
        for tenant, name in self.class_of.items():
            if name not in self.classes:
                known = ", ".join(self.classes) or "none is defined"
                raise ValueError(f"class_of gives {tenant!r} the class {name!r}, which is not in classes: {known}")
            if self.keys and tenant not in self.keys:
                raise ValueError(f"class_of names {tenant!r}, which has no key in keys")
        for name, key in self.keys.items():
            check_key(key, f"the key of {name!r}")
        if len(set(self.keys.values())) < len(self.keys):
            raise ValueError("two tenants have the same key; give each its own")


class FeedSettings(Settings, frozen=True):
    """How replicas are watched."""

    metrics_interval_s: Seconds = 1.0
    health_interval_s: Seconds = 1.0
    health_timeout_s: Seconds = 5.0
    unhealthy_after: Count = 3
    healthy_after: Count = 1


class EventSettings(Settings, frozen=True):
    """Whether replicas' KV events are followed, and where they are published."""

    mode: Literal["auto", "on", "off"] | bool = "auto"  # YAML reads on and off as booleans
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    engines_dial: bool = False
    reports: bool = True

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"tcp://[^\s:]+(:[^\s:]+)*:\d{1,5}", value):
                raise ValueError(f"{name} is {value!r}; write tcp://HOST:PORT, or tcp://*:PORT as the engine has it")
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint is set, endpoint is not; name both as --kv-events-config has them")


class Config(Settings, frozen=True):
    """The whole file."""

    listen: Listen = Listen()
    admin: Listen = Listen(port=8001)
    replicas: tuple[ReplicaSettings, ...] = ()
    tokenizer: str = "auto"
    tokenizer_check: bool = True
    store: StoreSettings = StoreSettings()
    routing: RoutingSettings = RoutingSettings()
    hardware: HardwareSettings = HardwareSettings()
    proxy: ProxySettings = ProxySettings()
    tenants: TenantSettings = TenantSettings()
    feeds: FeedSettings = FeedSettings()
    events: EventSettings = EventSettings()
    workers: Annotated[int, Meta(ge=1, le=64)] | None = None
    drain_timeout_s: Seconds = 30.0

    def __post_init__(self) -> None:
        hosts = {self.listen.host, self.admin.host}
        if self.listen.port == self.admin.port != 0 and (len(hosts) == 1 or hosts & {"", "0.0.0.0", "::"}):
            raise ValueError(f"`admin.port` and `listen.port` are both {self.listen.port}; they are two listeners")
        known: dict[tuple[str, str, int | None, str], str] = {}
        for url in (replica.url for replica in self.replicas):
            if (other := known.setdefault(_server_of(url), url)) is not url:
                raise ValueError(f"`replicas` has the same server twice, as {other} and {url}; give each one entry")


def check_key(key: str, what: str) -> None:
    """Refuse what cannot be sent in a header, and what anybody could guess.

    Raises:
        ValueError: with what is wrong.
    """
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{what} must be printable ASCII without spaces, and not empty")


def check_url(url: str, schemes: tuple[str, ...]) -> None:
    """Refuse a URL of another scheme, or without what that scheme needs.

    Raises:
        ValueError: with what is wrong and what is right.
    """
    parts = urlsplit(url)
    if parts.scheme not in schemes:
        raise ValueError(f"{url!r} is not a URL of the kind {' or '.join(f'{scheme}://' for scheme in schemes)}")
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError(f"{url!r} names no socket; write unix:///run/redis.sock")
        return
    if re.search(r"\s", url) or (parts.scheme.startswith("http") and (parts.query or parts.fragment or parts.username)):
        raise ValueError(f"{url!r} has more than scheme, host, port and path; a key goes into api_key")
    if not parts.hostname:
        raise ValueError(f"{url!r} names no host; write {parts.scheme}://HOST:PORT")
    if "sentinel" in parts.scheme or "cluster" in parts.scheme:
        return  # several host:port pairs, which urlsplit cannot take apart
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"{url!r} has a port that is not a number from 0 to 65535") from None


def _server_of(url: str) -> tuple[str, str, int | None, str]:
    """Return what two spellings of one server's URL have in common."""
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", parts.port or default, parts.path.rstrip("/")


def load(path: Path | None, env: Mapping[str, str] = os.environ, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read the settings: the file, then the environment, then what the command line says.

    Args:
        path: the YAML file, or None for the defaults alone.
        env: variables; KVROUTE_STORE__URL sets `store.url`, values are read as YAML.
        overrides: dotted names -> values.

    Raises:
        ConfigError: names the setting, what is wrong with it, and the valid choices.
    """
    tree = _read(path) if path else {}
    for name, text in sorted(env.items()):
        if path_of := _setting_of(name):
            _put(tree, path_of, _yaml(text, name))
    for name, value in (overrides or {}).items():
        _put(tree, name, value)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        where = str(path) if path else "settings"
        raise ConfigError(f"{where}: {_explain(str(error))}") from None


def _setting_of(name: str) -> str | None:
    """Return the dotted path that a variable sets, None where it is not ours. Names of tenants keep their case."""
    if not name.startswith(ENV_PREFIX):
        return None
    parts = name[len(ENV_PREFIX) :].split("__")
    parts[:2] = [part.lower() for part in parts[:2]]
    return ".".join(parts) if len(parts) > 1 or parts[0] in Config.__struct_fields__ else None


def dump(config: Config) -> str:
    """Return the settings as YAML, with keys and passwords left out."""
    tree = msgspec.to_builtins(config)
    for replica in tree["replicas"]:
        replica["api_key"] = _hidden(replica["api_key"])
    tree["tenants"]["keys"] = {name: _hidden(key) for name, key in tree["tenants"]["keys"].items()}
    if url := tree["store"]["url"]:
        tree["store"]["url"] = re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", url)
    return yaml.safe_dump(tree, sort_keys=False)


def _hidden(secret: str | None) -> str | None:
    return "***" if secret else secret


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX} bytes; this is no kvroute configuration")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    tree = _yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings at the top, found {type(tree).__name__}")
    return tree


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be settings") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{where}{place}: not valid YAML: {what}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"`{parent}` must be a mapping of settings, to set `{name}` in it")
        tree = below
    tree[last] = value


def _explain(message: str) -> str:
    """Turn msgspec's message into a setting's path, the fault and, for an unknown key, the keys that exist."""
    what, _, path = message.partition(" - at ")
    if what == "Expected `object`, got `str`" and "replicas" in path:
        what += "; write `- url: http://HOST:PORT`"
    if not path and what.startswith("`"):
        return what  # one of our own that names its settings
    dotted = re.sub(r"^\$\.?", "", path.strip("`")) or "top level"
    if match := re.search(r"unknown field `(.+?)`", what):
        section = _section(dotted)
        known = ", ".join(sorted(section.__struct_fields__)) if section else "see config/kvroute.yaml"
        return f"`{dotted}` has an unknown key `{match[1]}`; it may have: {known}"
    if match := re.match(r"Invalid enum value (.+)", what):
        choices = _choices(dotted)
        return f"`{dotted}`: {match[1]} is not one of {choices}"
    return f"`{dotted}`: {what}"


def _section(dotted: str) -> type[Struct] | None:
    kind: Any = Config
    for name in re.sub(r"\[\.*\d*\]", "", dotted).split(".") if dotted != "top level" else ():
        kind = _element(_field(kind, name))
        if kind is None:
            return None
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _choices(dotted: str) -> str:
    parent, _, name = dotted.rpartition(".")
    kind = _field(_section(parent or "top level"), name.partition("[")[0])
    while get_origin(kind) in (Annotated, tuple):
        kind = get_args(kind)[0]
    return ", ".join(map(str, get_args(kind)))


def _field(kind: Any, name: str) -> Any:
    if kind is None:
        return None
    return next((f.type for f in msgspec.structs.fields(kind) if f.name == name), None)


def _element(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is tuple else kind
