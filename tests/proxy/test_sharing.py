"""What routers tell each other, over stores in memory; real routers meet in tests/compose and tests/contracts."""

import pytest

from kvroute.adapters.redis_ledger import MemoryLedger
from kvroute.adapters.shared_account import MemoryAccount
from kvroute.proxy.sharing import Sharing
from kvroute.routing.account import Account, Entry, bucket_life_s
from kvroute.routing.demand import Demand
from kvroute.routing.fleet import Fleet
from kvroute.routing.replica import ModelCard, Replica, ReplicaId
from kvroute.routing.router import Router

ONE = Replica(id=ReplicaId("r0"), url="http://r0", cards=(ModelCard("m", 4096),), capacity_tokens=10_000, block_size=16)


@pytest.fixture
def parts():
    fleet, account = Fleet(), Account()
    fleet.join(ONE, 0.0)
    ledger, accounts = MemoryLedger(), MemoryAccount(bucket_life_s)
    return fleet, account, accounts, Sharing(fleet=fleet, ledger=ledger, account=account, accounts=accounts)


def test_exchange_says_whether_anything_is_promised(parts):
    """While a request is under way promises are exchanged often, afterwards rarely."""
    fleet, _, _, sharing = parts
    assert not sharing.exchange()
    lease = Router(fleet).place(Demand(model="m", prompt_tokens=100, longest_prompt=100), {}, 1.0)
    assert sharing.exchange()
    lease.refuse(2.0)
    assert not sharing.exchange()


async def test_what_was_counted_is_pushed_once(parts):
    """Counts reach the shared account, and a second push adds nothing."""
    _, account, accounts, sharing = parts
    account.add(Entry("r0", "m", "default", 100, 0, 0, 0), 1_000.0)
    sharing.push()
    sharing.push()
    rows = {(bucket, field): delta for bucket, field, delta in await accounts.read()}
    assert rows[0, "all|prompt_tokens"] == 100


async def test_close_pushes_what_is_left(parts):
    """Nothing that was counted is lost at the end."""
    _, account, accounts, sharing = parts
    await sharing.start()
    account.add(Entry("r0", "m", "default", 7, 0, 0, 0), 1_000.0)
    await sharing.close()
    assert (0, "all|prompt_tokens", 7) in await accounts.read()
