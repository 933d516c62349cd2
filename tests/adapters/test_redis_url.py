"""Redis URLs: what they mean, and what is refused."""

from __future__ import annotations

import ssl

import pytest

from kvroute.adapters.redis_url import parse_redis_url
from kvroute.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "kind", "nodes", "login", "db"),
    [
        ("redis://host", "server", (("host", 6379),), (None, None), 0),
        ("redis://user:p%40ss@host:1234/3", "server", (("host", 1234),), ("user", "p@ss"), 3),
        ("redis://:secret@[::1]:1234", "server", (("::1", 1234),), (None, "secret"), 0),
        ("unix:///run/redis.sock?db=2", "server", ("/run/redis.sock",), (None, None), 2),
        ("unix://:secret@/run/redis.sock", "server", ("/run/redis.sock",), (None, "secret"), 0),
        ("redis+sentinel://a:1,b/main?db=4", "sentinel", (("a", 1), ("b", 26379)), (None, None), 4),
        ("redis+cluster://a:1,b", "cluster", (("a", 1), ("b", 6379)), (None, None), 0),
    ],
)
def test_urls_say_where_and_who(url, kind, nodes, login, db):
    """Every kind of URL gives its nodes, its credentials and its database."""
    target = parse_redis_url(url)
    assert (target.kind, target.nodes, (target.username, target.password), target.db) == (kind, nodes, login, db)
    assert target.tls is None


def test_secrets_are_not_described():
    """What is logged of a URL has no password in it."""
    assert "secret" not in parse_redis_url("redis://user:secret@host/1").describe


def test_rediss_is_tls_with_verification_unless_told_otherwise():
    """A rediss URL checks certificate and host name; options relax that one by one."""
    strict = parse_redis_url("rediss://host").tls
    assert strict is not None
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    by_ip = parse_redis_url("rediss://host?ssl_check_hostname=false").tls
    assert by_ip is not None
    assert (by_ip.verify_mode, by_ip.check_hostname) == (ssl.CERT_REQUIRED, False)
    lax = parse_redis_url("rediss+cluster://host?ssl_cert_reqs=none").tls
    assert lax is not None
    assert lax.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://user:secret@host", "must begin with one of redis, rediss"),
        ("redis://host?database=1", "unknown option 'database'; there are db"),
        ("redis://host/one", "database 'one' must be a number"),
        ("redis+cluster://host?db=1", "0 on a cluster"),
        ("redis+sentinel://host:26379", "ends with the service's name"),
        ("unix://", "names the socket's path"),
        ("redis://host:port", "no host and port"),
        ("rediss://host?ssl_ca_certs=/nowhere", "certificates cannot be read"),
    ],
)
def test_wrong_urls_are_refused(url, says):
    """A wrong URL is refused with what is wrong and what is possible, and never with its password."""
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)
