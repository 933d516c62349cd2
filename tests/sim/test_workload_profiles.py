"""Seeded generators."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from random import Random

import msgspec
import pytest

from kvroute.errors import ConfigError
from kvroute.kv.chain import HASH_BYTES
from kvroute.sim.workload import opened, prompt_chain
from kvroute.sim.workload_profiles import PROFILES, generated, lognormal, staged, stages_of


def sent(name, parameters=None, seed=1, block_size=16):
    """Return (start, turn) of every request of an open loop."""
    workload = opened(generated(name, parameters or {}, block_size, seed))
    return [(script.start_s, turn) for script in workload for turn in script.turns]


@pytest.mark.parametrize("name", PROFILES)
def test_the_same_seed_gives_the_same_requests(name):
    """A seed is all that a run differs by, and starts come in order."""
    one, again, other = (list(islice(sent(name, seed=seed), 300)) for seed in (5, 5, 6))
    assert one == again != other
    assert [at for at, _ in one] == sorted(at for at, _ in one)


def test_the_published_benchmark_repeats_its_prompts():
    """750 prompts of 7,200 tokens, each played in every long stage, the first of them in the short ones too."""
    requests = sent("shared-prefix")
    prompts = Counter(prompt_chain(turn, 16) for _, turn in requests)
    assert len(prompts) == 750
    counts = [int(rate * span) for rate, span in stages_of_default()]
    assert min(prompts.values()) == sum(count // 750 for count in counts)
    assert max(prompts.values()) == sum(-(-count // 750) for count in counts)
    assert {(turn.prompt_tokens, turn.output_tokens) for _, turn in requests} == {(7200, 1000)}
    assert len(requests) == sum(counts)


def stages_of_default():
    return stages_of(PROFILES["shared-prefix"][0]().stages)


def test_fresh_questions_share_the_system_prompt_alone():
    """No two prompts are equal, and those of a group share 6,000 tokens."""
    requests = sent("shared-prefix", {"fresh": "true", "stages": "10x100"})
    assert len({prompt_chain(turn, 16) for _, turn in requests}) == len(requests)
    assert len({turn.chain[: 375 * HASH_BYTES] for _, turn in requests}) == 150


def test_stages_follow_each_other():
    """Each stage has its own rate and as many requests as that promises; what cannot be read is refused by name."""
    found = list(staged(Random(2), [(100.0, 20.0), (10.0, 100.0)]))
    begins = sorted({begin for begin, _, _ in found})
    assert begins == [0.0, pytest.approx(20.0, rel=0.1)]
    assert [sum(begin == one for begin, _, _ in found) for one in begins] == [2000, 1000]
    assert [at for _, at, _ in found] == sorted(at for _, at, _ in found)
    assert found[-1][1] - begins[1] == pytest.approx(100.0, rel=0.1)
    assert [place for _, _, place in found] == [*range(2000), *range(1000)]
    for text in ("", "5", "5x", "x5", "0x5", "5x-1"):
        with pytest.raises(ConfigError, match="stages"):
            stages_of(text)


def test_documents_come_in_another_order_each_time():
    """Shuffled documents share less than ordered ones."""

    def reuse(ordered):
        seen, hits = set(), 0
        for _, turn in sent("rag", {"ordered": ordered}):
            blocks = {turn.chain[n : n + HASH_BYTES] for n in range(0, len(turn.chain), HASH_BYTES)}
            hits += len(blocks & seen)
            seen |= blocks
        return hits

    assert reuse("0") * 1.5 < reuse("1")


def test_agents_of_a_kind_share_their_tools_and_are_compacted():
    """Contexts grow to the limit and fall back to what every run begins with."""
    runs = [list(script.turns) for script in generated("agent", {"turns": "80", "context": "40000"}, 16, 3)]
    assert len({run[0].chain[: 300 * HASH_BYTES] for run in runs}) == 4
    assert max(turn.prompt_tokens for run in runs for turn in run) <= 40_000 + 20_000
    falls = [b.prompt_tokens < a.prompt_tokens for run in runs for a, b in pairwise(run)]
    assert 0 < sum(falls) < len(falls) / 10


def test_long_documents_arrive_together():
    """5 % of the conversations are documents of 64,000 tokens, in four bursts, each asked about twice."""
    long = [(at, turn) for at, turn in sent("peak") if turn.prompt_tokens > 60_000]
    assert len(long) == round(400 * 0.05 / 0.95)
    gaps = sorted(b - a for (a, _), (b, _) in pairwise(long))
    assert (sum(gap > 50 for gap in gaps), gaps[-4] < 2.0) == (3, True)
    assert set(Counter(turn.chain[: 3000 * HASH_BYTES] for _, turn in long).values()) <= {1, 2}


def test_lengths_have_the_stated_mean():
    """Log-normal lengths are what their mean says."""
    rng = Random(4)
    assert sum(lognormal(rng, 500, 1.0) for _ in range(20_000)) / 20_000 == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("poem", {}, "known are shared-prefix"),
        ("rag", {"depth": "3"}, "known are requests"),
        ("rag", {"top": "many"}, r"rag: .*int"),
        ("rag", {"rate": "-1"}, "rate"),
        ("peak", {"chat.colour": "red"}, "peak.chat: .*known are sessions"),
    ],
)
def test_unknown_parameters_are_refused(name, parameters, words):
    """The error names what is wrong and what would be right."""
    with pytest.raises(ConfigError, match=words):
        list(generated(name, parameters, 16, 1))


def test_a_parameter_of_a_part_is_written_with_a_dot():
    """The chat inside the peak mix is set like any other figure."""
    assert len(sent("peak", {"chat.sessions": "10", "share": "0.5"})) > 10


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (kind, _) in PROFILES.items()])
def test_every_figure_is_playable_or_refused_by_name(name, kind):
    """The least figures make a workload or an error that names them, never a failure later."""
    for field in msgspec.structs.fields(kind):
        if field.name in ("stages", "chat"):
            continue
        for value in ("0", "1", "1e-300", "1e12", "nan", "-1"):
            words = ""
            try:
                scripts = list(islice(generated(name, {field.name: value}, 16, 1), 3))
                turns = [turn for script in scripts for turn in islice(script.turns, 3)]
            except ConfigError as error:
                words = error.message
            if words:
                assert field.name in words
                continue
            assert turns, field.name
            assert all(turn.prompt_tokens > 0 and turn.output_tokens > 0 for turn in turns)
            assert all(0 <= script.start_s < 1e9 for script in scripts)


def test_a_day_rises_and_falls():
    """Runs begin rarely at dawn and at dusk, and often at noon."""
    starts = [script.start_s for script in generated("day", {"low": "0.1", "high": "2", "span": "900"}, 16, 3)]
    dawn, noon, dusk = (sum(begin <= at < begin + 300 for at in starts) for begin in (0, 300, 600))
    assert noon > 2 * max(dawn, dusk)
    assert min(dawn, dusk) > 0
    assert starts[-1] < 900


@pytest.mark.parametrize(("drained", "opening"), [("1", 2), ("0", 0)])
def test_stages_wait_for_each_other_unless_told_otherwise(drained, opening):
    """The first request of each stage says when its stage begins; without draining none does."""
    figures = {"stages": "10x5,20x5", "drained": drained}
    scripts = list(generated("shared-prefix", figures, 16, 1))
    assert [script.stage_s is not None for script in scripts].count(True) == opening
