"""The link to a cluster, where it differs from the link to one server."""

from __future__ import annotations

import pytest

from kvroute.adapters.redis_cluster import ClusterLink
from kvroute.adapters.redis_link import ask
from kvroute.adapters.store import open_link
from kvroute.errors import ConfigError
from tests.processes import free_port
from tests.redis_servers import cluster, server, until


async def test_prefixes_reach_the_node_that_owns_them():
    """Scripts run on any prefix, whichever hash slot it has."""
    with cluster() as url:
        link = open_link(url)
        assert isinstance(link, ClusterLink)
        await link.start()
        for i in range(20):
            assert await ask(link, "promises", b"{%d}" % i, ("a",)) == []
        assert link.is_up
        await link.close()
        assert not link.is_up


async def test_one_server_is_no_cluster():
    """A server without cluster mode under a cluster URL is an error of the configuration that says what to write."""
    with server(port=free_port()) as redis:
        link = open_link(redis.url.replace("redis://", "redis+cluster://"))
        with pytest.raises(ConfigError, match=r"no cluster.*write redis://"):
            await link.start()
        await link.close()


async def test_a_cluster_that_is_not_there_yet():
    """Without any node the link starts all the same, and connects when the cluster appears."""
    with cluster() as url:
        link = open_link(f"redis+cluster://127.0.0.1:{free_port()},{url.partition('://')[2]}")
        await link.start()
        await until(lambda: link.is_up)
        await link.close()
    link = open_link(url)
    await link.start()
    assert not link.is_up
    assert not link.run("promises", b"{x}", ("a",), print)
    await link.close()
