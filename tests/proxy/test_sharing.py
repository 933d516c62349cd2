"""What routers tell each other, over stores in memory; real routers meet in tests/compose and tests/contracts."""

from random import Random

import pytest

from kvroute.adapters.redis_ledger import MemoryLedger
from kvroute.adapters.shared_account import MemoryAccount
from kvroute.proxy.sharing import Sharing
from kvroute.routing.account import Account, Entry, bucket_life_s
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.demand import Demand, Outcome, Usage
from kvroute.routing.fleet import Fleet
from kvroute.routing.replica import ModelCard, Replica, ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import chain

ONE = Replica(id=ReplicaId("r0"), url="http://r0", cards=(ModelCard("m", 4096),), capacity_tokens=10_000, block_size=16)


@pytest.fixture
def parts():
    fleet, account = Fleet(), Account()
    fleet.join(ONE, 0.0)
    ledger, accounts = MemoryLedger(), MemoryAccount(bucket_life_s)
    return (
        fleet,
        account,
        accounts,
        Sharing(fleet=fleet, router=Router(fleet), ledger=ledger, account=account, accounts=accounts),
    )


def test_exchange_says_whether_anything_is_promised(parts):
    """While a request is under way promises are exchanged often, afterwards rarely."""
    fleet, _, _, sharing = parts
    assert not sharing.exchange()
    lease = Router(fleet).place(Demand(model="m", prompt_tokens=100, longest_prompt=100), {}, 1.0)
    assert sharing.exchange()
    lease.refuse(2.0)
    assert not sharing.exchange()


class Grapevine(MemoryLedger):
    """A ledger through which everybody hears what anybody else told, and once something that nobody understands."""

    def __init__(self, told: dict[str, list[bytes]], name: str) -> None:
        super().__init__()
        self._told, self._name = told, name
        self.stats.routers = 2
        told[name] = [b"not for us"]

    def tell(self, text: bytes) -> None:
        for name, texts in self._told.items():
            if name != self._name:
                texts.append(text)

    def heard(self) -> list[bytes]:
        texts, self._told[self._name] = self._told[self._name], []
        return texts


def test_conversations_are_known_to_all_routers():
    """A conversation that began at one router has a seat at the other too, and goes on there as what it is."""
    told: dict[str, list[bytes]] = {}
    routers = {}
    for name in ("a", "b"):
        fleet = Fleet()
        fleet.join(ONE, 0.0)
        router = Router(fleet, rng=Random(name), admission=AdmissionSettings())
        parts = {"account": Account(), "accounts": MemoryAccount(bucket_life_s)}
        ledger = Grapevine(told, name)
        routers[name] = router, Sharing(fleet=fleet, router=router, ledger=ledger, clock=lambda: 1.0, **parts)
    (a, sharing_a), (b, sharing_b) = routers["a"], routers["b"]

    def ask_for(blocks: int) -> Demand:
        tokens = 16 * blocks
        return Demand(model="m", prompt_tokens=tokens, longest_prompt=tokens, chain=chain(blocks), block_size=16)

    lease = a.admit(ask_for(20), {}, 1.0)
    sharing_a.exchange(), sharing_b.exchange()
    (live,) = b.admission.standing().live
    assert (live.conversations, live.under_way) == (1, 1)
    lease.finish(Outcome.DONE, 1.0, Usage(320, 16, 0))
    sharing_a.exchange(), sharing_b.exchange()
    (live,) = b.admission.standing().live
    assert (live.conversations, live.under_way) == (1, 0)
    assert b.foresee(ask_for(30), {}, 1.0).turn == 2
    b.admit(ask_for(30), {ONE.id: 320}, 1.0)
    sharing_b.exchange(), sharing_a.exchange()
    (live,) = a.admission.standing().live
    assert (live.conversations, live.under_way) == (1, 1)
    assert a.admission.standing().learnt[0].turns_seen == b.admission.standing().learnt[0].turns_seen == 1


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
