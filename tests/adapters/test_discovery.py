"""From a URL's cards and metrics to replicas."""

from pathlib import Path

from kvroute.adapters.discovery import base_models, replicas_behind
from kvroute.adapters.vllm_metrics import Page, read_page
from kvroute.routing.replica import ModelCard

PAGES = Path(__file__).parents[1] / "data" / "metrics"
CARDS = (ModelCard("tiny", 8192, "model", None), ModelCard("sql", None, "/adapters/sql", "tiny"))


def test_one_engine():
    """A URL with one engine is one replica, named by its URL, without a rank."""
    page = read_page((PAGES / "vllm-0.32-fresh.txt").read_text(), 0.0)
    (replica,) = replicas_behind("http://a:8000", CARDS, page).values()
    assert (replica.id, replica.rank, replica.block_size, replica.capacity_tokens) == (
        "http://a:8000",
        None,
        32,
        262144,
    )


def test_two_ranks():
    """A URL with two engines is two replicas, addressed by rank."""
    page = read_page((PAGES / "vllm-0.32-dp2.txt").read_text(), 0.0)
    found = replicas_behind("http://a:8000", CARDS, page)
    assert {id: replica.rank for id, replica in found.items()} == {"http://a:8000#0": 0, "http://a:8000#1": 1}


def test_no_metrics():
    """A URL without engine metrics is one replica of unknown size."""
    (replica,) = replicas_behind("http://a:8000", CARDS, Page(engines=())).values()
    assert replica.block_size is None
    assert replica.capacity_tokens is None


def test_adapters_are_no_base_models():
    """A card with a parent is an adapter."""
    assert [card.name for card in base_models(CARDS)] == ["tiny"]
