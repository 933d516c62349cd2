"""Pages of real engines (vLLM 0.32.0, histograms cut out) and of older releases, written from the field tables."""

from pathlib import Path

import pytest

from kvroute.adapters.vllm_metrics import read_page

PAGES = Path(__file__).parents[1] / "data" / "metrics"


def test_fresh_engine():
    """A fresh engine's page gives its block size, its capacity in tokens, and a load of nothing."""
    page = read_page((PAGES / "vllm-0.32-fresh.txt").read_text(), now=5.0)
    (report,) = page.engines
    assert (report.engine, report.block_size, report.capacity_tokens) == (0, 32, 262_144)
    assert report.prefix_caching is True
    assert (report.load.running, report.load.waiting, report.load.at_s) == (0, 0, 5.0)
    assert page.started_s == pytest.approx(1.79597822053e09)


def test_engine_after_work():
    """Counters are read under the names that the exposition gives them."""
    (report,) = read_page((PAGES / "vllm-0.32-after.txt").read_text(), now=0.0).engines
    assert report.load.prefix_queries == 7879
    assert report.load.prefix_hits == 6112
    assert report.load.prompt_tokens == 7880
    assert report.load.generation_tokens == 12_876


def test_two_ranks_under_one_url():
    """Each data-parallel rank is reported apart, with its own capacity and not the sum that vLLM repeats."""
    page = read_page((PAGES / "vllm-0.32-dp2.txt").read_text(), now=0.0)
    assert [report.engine for report in page.engines] == [0, 1]
    assert [report.capacity_tokens for report in page.engines] == [262_144, 262_144]


def test_ranks_without_token_capacity():
    """Before kv_cache_size_tokens existed, capacity is the engine's share of the blocks less the null block."""
    text = "".join(
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="2002"}} 1.0\n' for rank in (0, 1)
    )
    assert [report.capacity_tokens for report in read_page(text, 0.0).engines] == [16_000, 16_000]


def test_names_of_older_releases():
    """vLLM 0.9 to 0.11 names gauges and counters after the GPU, and has no engine label at first."""
    text = """\
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="101",num_cpu_blocks="None"} 1.0
"""
    (report,) = read_page(text, 0.0).engines
    assert report.load.kv_used_fraction == 0.25
    assert (report.load.running, report.load.waiting) == (3, 1)
    assert (report.load.prefix_queries, report.load.prefix_hits) == (100, 40)
    assert report.capacity_tokens == 1600


def test_decode_context_parallel_block():
    """Where the attention block differs from the configured one, the effective one counts."""
    text = 'vllm:cache_config_info{block_size="16",effective_attention_block_size="32",engine="0"} 1.0\n'
    assert read_page(text, 0.0).engines[0].block_size == 32


@pytest.mark.parametrize(
    ("before", "after", "is_new"),
    [
        ("process_start_time_seconds 5\n", "process_start_time_seconds 5\n", False),
        ("process_start_time_seconds 5\n", "process_start_time_seconds 6\n", True),
        ('vllm:prompt_tokens_total{engine="0"} 10\n', 'vllm:prompt_tokens_total{engine="0"} 10\n', False),
        ('vllm:prompt_tokens_total{engine="0"} 10\n', 'vllm:prompt_tokens_total{engine="0"} 9\n', True),
        ('vllm:prompt_tokens_total{engine="1"} 10\n', 'vllm:prompt_tokens_total{engine="0"} 20\n', True),
        ("up 1\n", "up 1\n", False),
    ],
)
def test_restart(before, after, is_new):
    """A restart shows in the start time of the process, or where there is none in a total that fell."""
    assert read_page(after, 1.0).is_new_life(read_page(before, 0.0)) is is_new


def test_page_without_engines():
    """A page of another server holds no engine, and is no error."""
    assert read_page("up 1\nprocess_start_time_seconds 12.5\n", 0.0).engines == ()


def test_figures_that_are_none():
    """Infinite gauges and sizes beyond any memory are not taken for figures."""
    text = (
        'vllm:kv_cache_usage_perc{engine="0"} +Inf\nvllm:num_requests_running{engine="0"} NaN\n'
        'vllm:cache_config_info{block_size="99999999999999999999",engine="0"} 1.0\n'
    )
    (report,) = read_page(text, 0.0).engines
    assert (report.load.kv_used_fraction, report.load.running, report.block_size) == (0.0, 0, None)


def test_malformed_line():
    """A line that we need and cannot read is an error, not a silent zero."""
    with pytest.raises(ValueError, match=r".+"):
        read_page('vllm:num_requests_running{engine="0" 3\n', 0.0)


SLEEP = """vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} %d.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} %d.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} %d.0
"""


@pytest.mark.parametrize(
    ("states", "is_asleep"), [((1, 0, 0), False), ((0, 0, 0), True), ((0, 1, 0), True), ((0, 0, 1), True)]
)
def test_sleep(states, is_asleep):
    """Awake, and asleep at each level; a page that does not say is awake."""
    assert read_page(SLEEP % states, 0.0).is_asleep == is_asleep
    assert not read_page("", 0.0).is_asleep
