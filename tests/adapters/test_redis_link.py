"""The link: which servers it takes, and how it behaves while they are away."""

from __future__ import annotations

import asyncio

import pytest

from kvroute.adapters.redis_link import ask
from kvroute.adapters.store import open_link
from kvroute.errors import ConfigError, IndexUnavailable
from tests.redis_servers import Server, server, until


async def test_an_evicting_server_is_refused():
    """A server that drops keys when it is full is refused, with what to set instead."""
    with server("--maxmemory-policy", "allkeys-lru") as redis:
        link = open_link(redis.url)
        with pytest.raises(ConfigError, match=r"maxmemory-policy allkeys-lru.*noeviction"):
            await link.start()
        await link.close()


@pytest.mark.parametrize(("login", "is_right"), [("", False), (":wrong@", False), (":secret@", True)])
async def test_credentials(login, is_right):
    """The password of the URL is presented; a wrong or missing one is an error of the configuration."""
    with server() as redis, redis.client() as client:
        client.config_set("requirepass", "secret")
        link = open_link(f"unix://{login}{redis.socket}?db=3")
        if is_right:
            await link.start()
            assert await ask(link, "promises", b"{x}", ("a",)) == []
        else:
            with pytest.raises(ConfigError, match="does not accept"):
                await link.start()
        await link.close()


async def test_a_server_that_is_not_there_yet(tmp_path):
    """Without a server the link starts all the same, refuses calls at once, and connects when the server appears."""
    redis = Server(tmp_path)
    link, ups = open_link(redis.url), []
    link.on_up.append(lambda: ups.append(1))
    await link.start()
    assert not link.is_up
    with pytest.raises(IndexUnavailable):
        await ask(link, "promises", b"{x}", ("a",))
    redis.start()
    try:
        await until(lambda: link.is_up)
        assert ups == [1]
        assert await ask(link, "promises", b"{x}", ("a",)) == []
    finally:
        await link.close()
        redis.kill()


async def test_scripts_that_were_flushed_are_loaded_again():
    """A server that has forgotten the scripts gets them again with a new connection."""
    with server() as redis, redis.client() as client:
        link = open_link(redis.url)
        await link.start()
        client.script_flush()
        with pytest.raises(IndexUnavailable, match="NOSCRIPT"):
            await ask(link, "promises", b"{x}", ("a",))
        await until(lambda: link.stats.connects == 2)
        assert await ask(link, "promises", b"{x}", ("a",)) == []
        await link.close()


async def test_a_suspected_link_is_down_until_it_answers():
    """After a call was overdue the link refuses calls, until the server answers its PING."""
    with server() as redis:
        link = open_link(redis.url)
        await link.start()
        link.suspect()
        assert (link.is_up, link.run("promises", b"{x}", ("a",), print)) == (False, False)
        await until(lambda: link.is_up)
        assert link.stats.connects == 1
        await link.close()


async def test_a_replica_is_not_written_to():
    """A server that is a replica of another is not used: it could not be written to."""
    with server() as redis, redis.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        link = open_link(redis.url)
        await link.start()
        await asyncio.sleep(0.1)
        assert not link.is_up
        client.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: link.is_up)
        await link.close()
