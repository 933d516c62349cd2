"""`kvroute doctor` on real engines: one as it should be, and one without what a router needs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import KVROUTE, free_port
from tests.vllm.engines import BLOCK_SIZE, CONTEXT, SERVED_NAME, Engines

LACKING = ("--no-enable-prefix-caching", "--no-enable-prompt-tokens-details", "--kv-events-config", "{}")


@pytest.fixture(scope="module")
def poor(run_dir: Path, model_dir: Path) -> Iterator[str]:
    """An engine without prefix caching, usage details and events. Of flags given twice vLLM takes the last."""
    with Engines(model_dir, run_dir / "poor") as engines:
        yield engines.start([(free_port(), free_port(), free_port())], *LACKING).urls[0]


def examined(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and what --json prints."""
    done = subprocess.run(
        [*KVROUTE, "doctor", "--json", *arguments], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def levels(replica: dict[str, Any]) -> dict[str, str]:
    """Return the findings that are not well: check -> level."""
    return {one["check"]: one["level"] for one in replica["findings"] if one["level"] != "ok"}


def test_an_engine_as_it_should_be(engines: Engines) -> None:
    """Nothing is found wrong: tokens, hits, events and replay are as predicted, with the model's own files."""
    status, found = examined(engines.urls[0])
    [replica] = found["replicas"]
    facts = replica["facts"]
    assert (status, levels(replica)) == (0, {})
    assert (facts["model"], facts["cards"][0]["max_model_len"]) == (SERVED_NAME, CONTEXT)
    assert facts["tokens_by"] == "local"
    assert [(one["ours"] == one["theirs"], one["differs_at"]) for one in facts["tokens"]] == [(True, None)] * 4
    [probe], [events] = facts["probes"], facts["events"]
    assert probe["cached_tokens"] == [0, probe["predicted_tokens"]]
    assert probe["counted_hits"] == probe["predicted_tokens"] > 0
    assert events["heard"] >= 1
    assert (events["block_sizes"], events["is_replayed"]) == ([BLOCK_SIZE], True)


def test_an_engine_that_lacks_everything(poor: str) -> None:
    """Prefix caching, usage details and events are missed, each with its flag; routing is blind there."""
    status, found = examined(poor)
    [replica] = found["replicas"]
    assert (status, found["blind"]) == (1, True)
    assert levels(replica) == {
        "prefix caching": "fail", "hash probe": "fail", "usage details": "warn", "kv events": "warn"
    }  # fmt: skip
    remedies = " ".join(one["remedy"] for one in replica["findings"])
    for flag in ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config"):
        assert flag in remedies


def test_files_of_another_model(engines: Engines, model_dir: Path, tmp_path: Path) -> None:
    """A template that is not the engine's is found out, and where its tokens begin to differ."""
    for file in model_dir.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    status, found = examined(engines.urls[0], "--tokenizer", str(tmp_path))
    [replica] = found["replicas"]
    assert (status, levels(replica)["tokens"]) == (1, "fail")
    differing = {one["prompt"] for one in replica["facts"]["tokens"] if one["differs_at"] is not None}
    assert "a chat" in differing
    assert "a completion" not in differing


def test_endpoints_that_are_given(engines: Engines) -> None:
    """--kv-events says where an engine publishes that cannot be asked; one that is wrong is not heard."""
    engine = engines.engines[0]
    given = f"tcp://*:{engine.events_port},tcp://*:{engine.replay_port}"
    for endpoint, expected in ((given, {}), (f"tcp://*:{free_port()}", {"kv events": "warn"})):
        status, found = examined(engine.url, "--kv-events", endpoint)
        assert (status, levels(found["replicas"][0])) == (0, expected)
