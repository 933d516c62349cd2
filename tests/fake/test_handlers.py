"""The routes of a simulated replica, over a real socket, against recorded answers of a real vLLM."""

from __future__ import annotations

import asyncio

import pytest

from kvroute.fake.handlers import VERSION
from tests.fake.watch import until
from tests.fake.wire import recorded, replayed, shape

TINY = {"model": "tiny", "max_model_len": 8192, "block_size": 32}
HELLO = [{"role": "user", "content": "Hello there, how are you? " * 20}]

WHOLE = ["chat_first", "chat_return_token_ids", "chat_request_id", "completion_text", "completion_list_of_prompts"]
OPEN = ["get_v1_models", "tokenize_chat", "tokenize_completion_strs", "detokenize"]
REFUSED = [
    *("err_bad_json", "err_not_object", "err_empty_body", "err_wrong_model", "err_no_messages", "err_empty_messages"),
    *("err_bad_temperature", "err_max_tokens_zero", "err_max_tokens_over", "err_wrong_content_type"),
    *("err_stream_options_without_stream", "err_method", "get_nothing-here", "tokenize_bad", "get_version"),
]
STREAMS = [
    *("chat_stream", "chat_stream_usage", "chat_stream_usage_continuous", "chat_stream_n2"),
    *("completion_stream_two_prompts", "completion_stream_usage"),
]


async def state(session):
    async with session.get("/_state") as response:
        return await response.json()


async def ask(session, **fields):
    async with session.post("/v1/chat/completions", json={"messages": HELLO, **fields}) as response:
        assert response.status == 200
        return await response.json()


@pytest.mark.parametrize("name", WHOLE + OPEN)
async def test_answers_have_the_recorded_shape(serve, name):
    """Status, content type, every key, its order and its type are those of vLLM's answer to the same request."""
    exchange = recorded(name)
    answer = await replayed(await serve(**TINY), exchange)
    assert (answer.status, answer.content_type) == (exchange.answer.status, exchange.answer.content_type)
    assert shape(answer.json) == shape(exchange.answer.json)


@pytest.mark.parametrize("name", REFUSED)
async def test_errors_are_the_recorded_ones(serve, name):
    """A request that vLLM refuses gets the same status and the same body, word for word."""
    exchange = recorded(name)
    answer = await replayed(await serve(**TINY), exchange)
    assert (answer.status, answer.json) == (exchange.answer.status, exchange.answer.json)


@pytest.mark.parametrize("name", STREAMS)
async def test_streams_have_the_recorded_events(serve, name):
    """The kinds of events, their order and their keys are those of vLLM's stream."""
    exchange = recorded(name)
    answer = await replayed(await serve(**TINY, speed=1), exchange)
    assert answer.content_type == exchange.answer.content_type
    assert answer.body.endswith("\n\n")
    ours, theirs = [[str(shape(event)) for event in found.events] for found in (answer, exchange.answer)]
    # one recorded answer ended on a stop token, which has a number; ours end on their length, with null
    theirs = [event.replace("('stop_reason', 'int')", "('stop_reason', 'NoneType')") for event in theirs]
    assert (ours[0], ours[-2:]) == (theirs[0], theirs[-2:])
    assert set(ours) <= set(theirs)


async def test_version_names_the_vllm_that_is_imitated(serve):
    """The version is that of the recorded answers."""
    assert recorded("get_version").answer.json == {"version": VERSION}


async def test_health_and_ping_are_green_and_empty(serve):
    """Probes get 200 without a body."""
    session = await serve()
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        async with session.request(method, path) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_content_encoding_means_nothing(serve):
    """As to vLLM's own server: a body is read as it came, and what is no JSON then is the client's mistake."""
    session = await serve()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for data, status in ((b'{"prompt": "a", "max_tokens": 1}', 200), (b"\x1f\x8b", 400)):
        async with session.post("/v1/completions", data=data, headers=headers) as answer:
            assert answer.status == status


async def test_half_a_character_is_no_failure(serve):
    """JSON may hold lone surrogates, and an error that quotes one can be written."""
    session = await serve()
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        async with session.post(path, json={**fields, "model": "\ud800"}) as answer:
            assert (answer.status, "\ud800" in (await answer.json())["error"]["message"]) == (404, True)
    tokens = {"prompt": "\ud800", "return_token_strs": True}
    async with session.post("/tokenize", json=tokens) as answer:
        ids = (await answer.json())["tokens"]
    async with session.post("/detokenize", json={"tokens": ids}) as answer:
        assert (answer.status, (await answer.json())["prompt"]) == (200, "\ud800")


async def test_a_request_id_is_kept_or_made(serve):
    """The client's X-Request-Id comes back and names the answer; without one the replica makes one."""
    session = await serve()
    for headers, expected in (({"X-Request-Id": "mine"}, "mine"), ({}, None)):
        body = {"prompt": "a", "max_tokens": 1}
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            made = response.headers["X-Request-Id"]
            assert made == (expected or made)
            assert len(made) == (4 if expected else 32)
            assert (await response.json())["id"] == "cmpl-mine" or not expected


async def test_a_repeat_is_served_from_the_cache_and_answered_alike(serve):
    """The same prompt hits its whole blocks the second time, and gets the same answer."""
    session = await serve()
    first, second = await ask(session, max_tokens=8), await ask(session, max_tokens=8)
    assert first["choices"] == second["choices"]
    tokens = first["usage"]["prompt_tokens"]
    hits = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert hits == [0, tokens // 16 * 16]


async def test_a_conversation_hits_the_blocks_of_its_own_answer(serve):
    """Where the answer is fed back, the next turn hits the prompt and what was generated, but for the last block."""
    session = await serve()
    first = await ask(session)
    assert first["choices"][0]["finish_reason"] == "stop"
    history = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = await ask(session, messages=history, max_tokens=1)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["usage"]["total_tokens"] - 1) // 16 * 16


async def test_a_salt_separates_caches(serve):
    """Requests with different salts share nothing; those with the same salt do."""
    session = await serve()
    answers = [await ask(session, max_tokens=1, cache_salt=salt) for salt in ("x", "y", "x")]
    hits = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


async def test_n_answers_share_their_prompt(serve):
    """Two answers to one prompt differ, count its tokens once, and compute it once."""
    answer = await ask(await serve(), max_tokens=8, n=2)
    first, second = (choice["message"]["content"] for choice in answer["choices"])
    assert first != second
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("fields", [{}, {"tools": [{"type": "function"}]}, {"add_generation_prompt": False}])
async def test_tokenize_agrees_with_what_chat_computes(serve, fields):
    """The ids of /tokenize are the prompt ids of the chat, whatever changes them."""
    session = await serve()
    answer = await ask(session, max_tokens=1, return_token_ids=True, **fields)
    async with session.post("/tokenize", json={"messages": HELLO, **fields}) as response:
        assert (await response.json())["tokens"] == answer["prompt_token_ids"]


async def test_a_client_that_leaves_frees_the_engine(serve):
    """A disconnect aborts the request, mid-stream and in a plain request alike, and gives its blocks back."""
    session = await serve(speed=0.5)
    body = {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        await response.content.readany()
    plain = asyncio.ensure_future(ask(session, **body | {"stream": False}))
    await until(lambda: state(session), lambda now: now["running"] + now["aborted"] == 2)
    plain.cancel()
    await asyncio.gather(plain, return_exceptions=True)
    left = await until(lambda: state(session), lambda now: now["aborted"] == 2)
    assert left == {"running": 0, "waiting": 0, "aborted": 2, "finished": 0, "used_blocks": 0}


async def test_the_cache_is_reset_only_where_it_is_idle(serve):
    """A reset of a busy replica does nothing; of an idle one it forgets every prompt."""
    session = await serve()

    async def reset():
        async with session.post("/reset_prefix_cache") as response:
            return (await response.json())["success"]

    body = {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        await response.content.readany()
        assert await reset() is False
    assert await until(reset, bool)
    assert (await ask(session, max_tokens=1))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_many_streams_at_once_are_all_answered_in_full(serve):
    """Concurrent streams share the engine, and each gets all of its tokens."""
    session = await serve(speed=200)

    async def stream(number):
        body = {"prompt": f"{number} " * 50, "max_tokens": 30, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with session.post("/v1/completions", json=body) as response:
            return (await response.text()).count('"completion_tokens":30')

    assert await asyncio.gather(*map(stream, range(50))) == [1] * 50
