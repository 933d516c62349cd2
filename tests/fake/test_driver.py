"""The task that runs a simulated engine in real time."""

from __future__ import annotations

import asyncio

import pytest

from kvroute.fake import driver as module
from kvroute.fake.driver import Driver, EngineBusy
from kvroute.kv.pool import BlockPool
from kvroute.sim.engine import default_time
from kvroute.sim.replica import RequestId, SimReplica, SimRequest
from tests.kv.notation import chain


def request(name: str, prompt: int = 4, output: int = 3) -> SimRequest:
    return SimRequest(RequestId(name), chain(f"{name[0]}20"), prompt, output)


@pytest.fixture
async def driver():
    found = Driver(SimReplica(BlockPool(9, 4), time=default_time(50)))
    await found.start()
    yield found
    await found.close()


async def finished(job):
    while not job.is_done:
        await job.changed()
    return [(sequence.produced_tokens, sequence.cached_tokens, sequence.is_aborted) for sequence in job.sequences]


async def test_a_job_is_told_of_its_progress_until_it_is_done(driver):
    """Each sequence of a job gets its tokens, and says what it found in the cache."""
    job = driver.submit([request("a", 9, 3), request("a2", 9, 1)])
    assert await finished(job) == [(3, 0, False), (1, 8, False)]
    assert not driver.replica.has_work


async def test_an_aborted_job_is_gone_at_once(driver):
    """Aborting needs no step: queue and blocks are free when the call returns."""
    job = driver.submit([request("a", 4, 1000)])
    await job.changed()
    driver.abort(job)
    assert (driver.replica.has_work, driver.replica.pool.used_fraction) == (False, 0.0)


async def test_an_abort_makes_room_for_those_behind(driver):
    """A prompt that can never fit holds up the queue until its client leaves."""
    giant, small = driver.submit([request("a", 40)]), driver.submit([request("b")])
    await asyncio.sleep(0.05)
    assert not small.is_done
    driver.abort(giant)
    assert await finished(small) == [(3, 0, False)]


async def test_a_stopping_engine_gives_up_on_old_and_new_jobs(driver):
    """Readers are told, and whoever comes later is aborted on arrival."""
    old = driver.submit([request("a", 4, 1000)])
    driver.abort_all()
    new = driver.submit([request("b")])
    assert [await finished(job) for job in (old, new)] == [[(0, 0, True)], [(0, 0, True)]]


async def test_a_full_queue_refuses_in_vllms_words(driver):
    """The queue has a bound, and what does not fit is refused with 503."""
    driver.hang(True)
    driver.submit([request(f"a{number}") for number in range(module.QUEUE_LIMIT)])
    with pytest.raises(EngineBusy, match="currently busy") as refused:
        driver.submit([request("b")])
    assert (refused.value.status, refused.value.kind) == (503, "Service Unavailable")


async def test_time_passes_as_the_engine_says():
    """A request takes at least the time of its steps."""
    slow = Driver(SimReplica(BlockPool(9, 4), time=default_time(overhead_s=0.05)))
    await slow.start()
    before = asyncio.get_running_loop().time()
    await finished(slow.submit([request("a", 4, 3)]))
    assert asyncio.get_running_loop().time() - before >= 0.14
    await slow.close()
