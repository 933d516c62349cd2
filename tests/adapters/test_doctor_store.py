"""A look at real servers: fit, misconfigured, locked, and absent."""

import pytest

from kvroute.adapters.doctor_store import examine_store
from kvroute.errors import ConfigError
from tests import redis_servers


async def test_a_server_that_is_fit():
    """Version, policy, memory and latency are read."""
    with redis_servers.server() as server:
        facts = await examine_store(server.url, 0.005)
    assert (facts.trouble, facts.policy, facts.deadline_s) == ("", "noeviction", 0.005)
    assert facts.version[0].isdecimal()
    assert 0 < facts.ping_s <= facts.slowest_ping_s
    assert facts.used_bytes > 0


async def test_a_server_that_evicts():
    """Its policy and its limit are told; the verdict is another's."""
    with redis_servers.server("--maxmemory-policy", "allkeys-lru", "--maxmemory", "100mb") as server:
        facts = await examine_store(server.url, 0.005)
    assert (facts.policy, facts.maxmemory_bytes) == ("allkeys-lru", 100 << 20)


async def test_a_replica_of_another_server():
    """Writes go to its master: it cannot be used itself."""
    with redis_servers.server("--replicaof", "127.0.0.1", "9") as server:
        assert "replica" in (await examine_store(server.url, 0.005)).trouble


@pytest.mark.parametrize(("password", "usable"), [("s3cret", True), ("wrong", False)])
async def test_a_server_with_a_password(password, usable):
    """A password that is not accepted is trouble, and is not repeated."""
    port = redis_servers.free_port()
    with redis_servers.server(port=port) as server, server.client() as client:
        client.config_set("requirepass", "s3cret")
        facts = await examine_store(f"redis://:{password}@127.0.0.1:{port}", 0.005)
    assert (facts.trouble == "") is usable
    assert password not in facts.trouble + facts.url


async def test_nobody_there():
    """The system's own word for it is the trouble."""
    assert (await examine_store("redis://127.0.0.1:9", 0.005)).trouble == "Connection refused"


async def test_a_wrong_url():
    """It is the user's mistake, not the server's."""
    with pytest.raises(ConfigError, match=r"store\.url"):
        await examine_store("http://127.0.0.1:9", 0.005)
