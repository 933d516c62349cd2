"""Names of models."""

import pytest

from kvroute.adapters.index import Namespace
from kvroute.adapters.tokens import PromptReader
from kvroute.proxy.catalogue import Catalogue, ModelEntry, ServedModel

READER = PromptReader(None, None, mode="approximate", why="test")
ONE = ModelEntry("one", 16, Namespace("n1"), READER)
TWO = ModelEntry("two", 32, Namespace("n2"), READER)


@pytest.fixture
def catalogue():
    catalogue = Catalogue()
    catalogue.replace({"one": ServedModel(ONE), "sql": ServedModel(ONE, "sql")})
    return catalogue


def test_adapter_shares_its_base_model(catalogue):
    """An adapter is found by its name, with its base model's reader and a root of its own."""
    served = catalogue.find("sql")
    assert served.entry is ONE
    assert served.root(None) != catalogue.find("one").root(None)


def test_request_without_a_model(catalogue):
    """Without a name the only base model is meant; with two of them nobody can say."""
    assert catalogue.find(None).entry is ONE
    catalogue.replace({"one": ServedModel(ONE), "two": ServedModel(TWO)})
    assert catalogue.find(None) is None


def test_unknown_name(catalogue):
    """A name that nobody serves finds nothing; the known ones can be listed."""
    assert catalogue.find("three") is None
    assert catalogue.names() == ["one", "sql"]
    assert catalogue.entries() == [ONE]


def test_salts_part_roots(catalogue):
    """Two salts of one model have two roots."""
    one = catalogue.find("one")
    assert len({one.root("a"), one.root("b"), one.root(None)}) == 3
