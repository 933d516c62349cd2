"""The way to a Redis Cluster: one lean link to each master, calls sent to the one that owns the prefix's hash slot.

The map of slots is asked again when a node says that it is wrong (MOVED, CLUSTERDOWN), and every half second while a
master cannot be reached, because another node may have taken its place. The call that found out fails; whoever made it
has a way without the index anyway. All keys of one script share a hash tag, so no call touches two nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

import hiredis
import msgspec
from redis.crc import key_slot

from kvroute.adapters.redis_link import CONNECT_TIMEOUT_S, LinkStats, ServerLink, login, open_wire
from kvroute.adapters.redis_url import Address, Target
from kvroute.adapters.redis_wire import Argument, Done, Reply
from kvroute.errors import ConfigError

log = logging.getLogger(__name__)

REFRESH_S = 0.5
SLOTS = 16_384
_STALE_MAP = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN")

SlotMap = tuple[tuple[int, Address], ...]  # (last slot, owner), ascending


class ClusterLink:
    """Scripts on whatever master owns their prefix."""

    def __init__(self, target: Target, rng: random.Random) -> None:
        self.stats = LinkStats()
        self.on_up: list[Callable[[], None]] = []
        self._target = target
        self._rng = rng
        self._nodes: dict[Address, ServerLink] = {}
        self._owners: SlotMap = ()
        self._stale = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return bool(self._nodes) and all(node.is_up for node in self._nodes.values())

    @property
    def describe(self) -> str:
        return self._target.describe

    async def start(self) -> None:
        await self._refresh()
        if not self._nodes:
            log.warning("%s is not reachable: routing on what this router placed itself", self.describe)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="kvroute-redis-cluster")

    async def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        await self._adopt(())

    def run(self, name: str, prefix: bytes, arguments: Sequence[Argument], done: Done) -> bool:
        slot = _slot_of(prefix)
        node = next((self._nodes.get(owner) for last, owner in self._owners if slot <= last), None)

        def settle(reply: Reply) -> None:
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_STALE_MAP):
                self._stale.set()
            done(reply)

        is_sent = node is not None and node.run(name, prefix, arguments, settle)
        self.stats.calls += is_sent
        self.stats.refused += not is_sent
        return is_sent

    def suspect(self) -> None:
        self.stats.suspected += 1
        for node in self._nodes.values():
            node.suspect()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._stale.wait()
            if self._stale.is_set() or not self.is_up:
                self._stale.clear()
                await self._refresh()
                await asyncio.sleep(REFRESH_S / 5)

    async def _refresh(self) -> None:
        """Ask any node that answers for the map of slots, and connect to the masters in it."""
        for address in dict.fromkeys([*self._nodes, *self._target.nodes]):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    owners = await _ask_for_slots(self._target, address)
            except (OSError, ConnectionError, TimeoutError) as error:
                log.debug("%s: node %s does not answer: %s", self.describe, address, error)
                continue
            if owners:
                await self._adopt(owners)
                return

    async def _adopt(self, owners: SlotMap) -> None:
        self._owners = owners
        wanted = {owner for _, owner in owners}
        for address in self._nodes.keys() - wanted:
            await self._nodes.pop(address).close()
        for address in wanted - self._nodes.keys():
            self._nodes[address] = node = self._node(address)
            await node.start()

    def _node(self, address: Address) -> ServerLink:
        described = f"{self.describe} node {address}"
        node = ServerLink(msgspec.structs.replace(self._target, describe=described), _at(address), self._rng)
        node.on_up.append(self._node_is_up)
        return node

    def _node_is_up(self) -> None:
        if self.is_up:
            self.stats.connects += 1
            for tell in self.on_up:
                tell()


def _at(address: Address) -> Callable[[], Awaitable[Address]]:
    async def find() -> Address:
        return address

    return find


async def _ask_for_slots(target: Target, address: Address) -> SlotMap:
    """Return the masters by slot, or nothing while slots are missing."""
    lost = asyncio.Event()
    wire = await open_wire(target, address, lost.set)
    try:
        await login(wire, target)
        reply = await wire.command("CLUSTER", "SLOTS")
    finally:
        wire.abort()
        await lost.wait()
    if isinstance(reply, hiredis.ReplyError):
        raise ConfigError(f"store.url: {target.describe} is no cluster ({reply}); write redis:// instead")
    ranges = sorted((int(first), int(last), node) for first, last, node, *_ in reply)
    if sum(last - first + 1 for first, last, _ in ranges) < SLOTS:
        return ()
    host = address[0] if not isinstance(address, str) else ""
    return tuple((last, (node[0].decode() or host, int(node[1]))) for _, last, node in ranges)


@lru_cache(maxsize=4096)
def _slot_of(prefix: bytes) -> int:
    return key_slot(prefix)
