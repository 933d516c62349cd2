"""An engine's event stream over real ZeroMQ sockets: losses, restarts, cuts, both frame forms, rubbish."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from kvroute.adapters.turns import Turns
from kvroute.adapters.vllm_events import EventStream
from kvroute.fake.publisher import EventPublisher
from kvroute.kv.event_sequence import Position, digest_of
from tests.adapters.publishers import Line, Log, OldPublisher, Publisher, batches, connected, raw_publisher, stream_of
from tests.processes import free_port


@pytest.fixture
async def open_stream():
    """Make a publisher, a sink and a stream between them."""
    async with AsyncExitStack() as stack:

        async def start(publisher=None, **settings):
            log = Log()
            publisher = publisher or Publisher()
            stack.callback(lambda: publisher.stop())
            stream = stream_of(publisher, log, **settings)
            stack.push_async_callback(stream.close)
            await stream.start()
            return publisher, log, stream

        yield start


@pytest.mark.parametrize("kind", [EventPublisher, OldPublisher])
async def test_a_late_joiner_hears_all_from_zero_and_what_follows(open_stream, kind):
    """With the replay's frames of every release."""
    publisher = Publisher(kind=kind)
    publisher.publish(5)
    _, log, stream = await open_stream(publisher)
    await connected(stream)
    publisher.publish(3)
    await log.until((7, "a7"))
    assert log.told == batches("a", 0, 7)
    assert stream.position == Position(7, digest_of(b"a7"))


HAS_IPV6 = Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text() != ""


@pytest.mark.parametrize(
    "host", ["localhost", pytest.param("[::1]", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here"))]
)
async def test_engines_are_found_by_name_and_in_both_families(host):
    """A name may stand for addresses of both families, of which the engine listens on one."""
    log, taken = Log(), "tcp://[::1]:0" if host == "[::1]" else "tcp://*:0"
    publisher = Publisher(endpoint=taken, replay_endpoint=taken)
    publisher.publish(2)
    live, replay = (
        f"tcp://{host}:{endpoint.rpartition(':')[2]}" for endpoint in (publisher.endpoint, publisher.replay_endpoint)
    )
    stream = EventStream(live, sink=log, replay_endpoint=replay)
    await stream.start()
    await log.until((1, "a1"))
    publisher.publish(1)
    await log.until((2, "a2"))
    await stream.close()
    publisher.stop()


@pytest.mark.parametrize("kind", [EventPublisher, OldPublisher])
async def test_lost_batches_are_replayed(open_stream, kind):
    """As soon as a later one shows that some are missing; nothing is handed on twice."""
    publisher, log, stream = await open_stream(Publisher(kind=kind))
    await connected(stream)
    publisher.publish(2)
    publisher.lose(200)
    publisher.publish(2)
    await log.until((203, "a203"))
    assert log.told == batches("a", 0, 203)
    assert stream.sequence_counters.gaps == 0


async def test_a_batch_lost_last_is_found_without_a_later_one(open_stream):
    """An engine that is silent is asked."""
    publisher, log, stream = await open_stream(check_s=0.1)
    await connected(stream)
    publisher.publish(1)
    publisher.lose(1)
    await log.until((1, "a1"))
    assert log.told == batches("a", 0, 1)


@pytest.fixture
async def line():
    """Lay lines to endpoints."""
    laid = []

    async def lay(endpoint):
        laid.append(await Line(endpoint).mend())
        return laid[-1]

    yield lay
    for one in laid:
        await one.cut()


async def test_a_line_that_is_cut_for_200_batches_loses_none(line):
    """It is dialled again and again, and what was sent meanwhile is replayed."""
    publisher, log = Publisher(), Log()
    live, replay = await line(publisher.endpoint), await line(publisher.replay_endpoint)
    stream = EventStream(live.endpoint, sink=log, replay_endpoint=replay.endpoint)
    await stream.start()
    await connected(stream)
    publisher.publish(10)
    await log.until((9, "a9"))
    await live.cut()
    await replay.cut()
    publisher.publish(200)
    await live.mend()
    await replay.mend()
    await log.until((209, "a209"))
    assert log.told == batches("a", 0, 209)
    await stream.close()
    publisher.stop()


async def test_a_stream_resumed_after_200_batches_misses_none(open_stream):
    """It comes back where it was, told only its position."""
    publisher, log, stream = await open_stream()
    await connected(stream)
    publisher.publish(10)
    await log.until((9, "a9"))
    await stream.close()
    publisher.publish(200)
    _, later, back = await open_stream(publisher, position=stream.position)
    await later.until((209, "a209"))
    assert later.told == batches("a", 10, 209)
    assert back.sequence_counters.new_lives == 0


@pytest.mark.parametrize("count", [0, 3, 5, 9])
async def test_an_engine_restarted_on_its_port_is_a_new_life(open_stream, count):
    """Whether the new one has said nothing yet, less than the old one, as much, or more."""
    publisher, log, stream = await open_stream()
    await connected(stream)
    publisher.publish(5)
    await log.until((4, "a4"))
    publisher.stop()
    await publisher.restart("b")
    publisher.publish(count)
    await connected(stream, times=2)
    publisher.publish(1)
    await log.until((count, f"b{count}"))
    assert log.told == [*batches("a", 0, 4), "new life", *batches("b", 0, count)]


async def test_an_engine_restarted_while_nobody_listened_is_a_new_life(open_stream):
    """Past the number that was kept: the digest tells."""
    publisher = Publisher()
    publisher.publish(9)
    _, log, _ = await open_stream(publisher, position=Position(4, digest_of(b"from an earlier life")))
    await log.until((8, "a8"))
    assert log.told == ["new life", *batches("a", 0, 8)]


async def test_without_replay_losses_and_restarts_are_told(open_stream):
    """A gap, then a new life."""
    publisher, log, stream = await open_stream(Publisher(replay_endpoint=None))
    await connected(stream)
    await asyncio.sleep(0.2)  # until the publisher knows of the subscription: without replay nothing else shows it
    publisher.publish(2)
    publisher.lose(3)
    publisher.publish(1)
    await log.until((5, "a5"))
    publisher.stop()
    await publisher.restart("b")
    await connected(stream, times=2)
    await asyncio.sleep(0.2)
    publisher.publish(1)
    await log.until((0, "b0"))
    assert log.told == [*batches("a", 0, 1), "gap 2-4", *batches("a", 5, 5), "new life", *batches("b", 0, 0)]


async def test_a_buffer_that_is_too_short_is_a_gap(open_stream):
    """What the engine no longer keeps is told, and what it keeps is handed on."""
    publisher, log, stream = await open_stream(Publisher(buffer_steps=4))
    await connected(stream)
    publisher.publish(2)
    await log.until((1, "a1"))
    publisher.lose(10)
    publisher.publish(1)
    await log.until((12, "a12"))
    assert log.told == [*batches("a", 0, 1), "gap 2-8", *batches("a", 9, 12)]


async def test_a_replay_socket_that_nobody_answers_stops_nothing(open_stream):
    """The stream goes on without it, and says what it missed."""
    publisher, log, stream = await open_stream(replay_endpoint=f"tcp://127.0.0.1:{free_port()}")
    await connected(stream)
    publisher.publish(1)
    await log.until((0, "a0"))
    publisher.lose(2)
    publisher.publish(1)
    await log.until((3, "a3"), timeout_s=30)
    assert log.told == [*batches("a", 0, 0), "gap 1-2", *batches("a", 3, 3)]


async def test_the_stream_is_bound_where_the_engine_dials(open_stream):
    """And knows a second engine on the same port for a new life."""
    port = free_port()
    publisher = Publisher(endpoint=f"tcp://127.0.0.1:{port}")
    publisher.publish(2)
    _, log, _ = await open_stream(publisher, bind=True)
    await log.until((1, "a1"))
    publisher.publish(1)
    await log.until((2, "a2"))
    publisher.stop()
    await publisher.restart("b")
    publisher.publish(1)
    await log.until((0, "b0"))
    assert log.told == [*batches("a", 0, 2), "new life", *batches("b", 0, 0)]


async def test_rubbish_is_counted_and_skipped(open_stream):
    """Frames that are no batch, and other topics, even those that begin like ours."""
    publisher = Publisher(replay_endpoint=None)
    _, log, stream = await open_stream(publisher)
    await connected(stream)
    await asyncio.sleep(0.2)
    topic, zero = b"kv@r0@tiny", bytes(8)
    for frames in ([topic], [topic, zero], [topic, b"1234567", b"x"], [topic, zero, b"x", b"y"], [topic, b"", b""]):
        publisher.inner._pub.send_multipart(frames)
    publisher.inner._pub.send_multipart([topic + b"2", zero, b"another engine's"])
    publisher.publish(1)
    await log.until((0, "a0"))
    assert log.told == batches("a", 0, 0)
    assert (stream.counters.malformed, stream.counters.received) == (5, 7)


async def test_a_sink_that_fails_once_stops_nothing(open_stream, caplog):
    """What it failed on is told to be lost, what came after it is handed on, and the failure is logged."""
    publisher, log, stream = await open_stream(check_s=0.1)
    await connected(stream)
    take, failed = log.batch, []

    def fail_once(seq, payload):
        if seq == 1 and not failed:
            failed.append(seq)
            raise RuntimeError("a mistake of ours")
        take(seq, payload)

    log.batch = fail_once
    publisher.publish(4)
    await log.until((3, "a3"))
    assert log.told == [(0, "a0"), "gap 1-1", (2, "a2"), (3, "a3")]
    assert "a mistake of ours" in caplog.text
    assert stream.counters.failures == 1


async def test_going_back_hands_on_again(open_stream):
    """What was lost further on is asked for once more."""
    publisher, log, stream = await open_stream()
    await connected(stream)
    publisher.publish(3)
    await log.until((2, "a2"))
    stream.rewind(Position(0, digest_of(b"a0")))
    await connected(stream)
    publisher.publish(1)
    await log.until((3, "a3"))
    assert log.told == [*batches("a", 0, 2), *batches("a", 1, 3)]


async def test_ten_thousand_batches_arrive_in_order_however_short_a_turn_is(open_stream):
    """What is left in the socket is read in the next turn of the loop, without another signal."""
    publisher, log, stream = await open_stream(turns=Turns(turn_s=0.0))
    await connected(stream)
    for _ in range(100):
        publisher.publish(100)
        await asyncio.sleep(0)
    await log.until((9_999, "a9999"))
    assert log.told == batches("a", 0, 9_999)


async def test_two_streams_with_a_backlog_take_turns_with_all_the_rest(open_stream):
    """However much has arrived, what else is ready runs between any two batches where a turn is that short."""
    turns, order = Turns(turn_s=0.0), []
    opened = [await open_stream(Publisher(replay_endpoint=None), replay_endpoint=None, turns=turns) for _ in range(2)]
    for _, log, stream in opened:
        await connected(stream)
        log.batch = lambda *_: order.append("batch")
    await asyncio.sleep(0.2)  # until the publishers know of the subscriptions
    for publisher, _, _ in opened:
        publisher.publish(200)
    async with asyncio.timeout(15):
        while order.count("batch") < 400:
            order.append("other")
            await asyncio.sleep(0)
    assert not any(pair == ("batch", "batch") for pair in pairwise(order))


HUNDREDS = """
import asyncio, resource
from kvroute.adapters.vllm_events import EventStream
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
async def main():
    streams = [EventStream("tcp://127.0.0.1:9", sink=None) for _ in range(400)]
    for stream in streams:
        await stream.start()
    for stream in streams:
        await stream.close()
asyncio.run(main())
"""


def test_hundreds_of_streams_fit_in_one_process():
    """They take more sockets than ZeroMQ gives by default; a process of its own, since the limit is set once."""
    subprocess.run([sys.executable, "-c", HUNDREDS], check=True, timeout=60)


async def test_an_endpoint_that_cannot_be_one_is_an_error():
    """And nothing is left open."""
    socket, endpoint = raw_publisher()
    for wrong in (endpoint, "http://127.0.0.1:1"):
        with pytest.raises(zmq.ZMQError):
            await EventStream(wrong, sink=Log(), bind=True).start()
    socket.close()
