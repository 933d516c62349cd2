"""One simulated replica for all tests of workers, and what tests ask of routers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import SimulatedReplica


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedReplica]:
    log = tmp_path_factory.mktemp("replica") / "replica.log"
    with SimulatedReplica("--speed", "1", "--kv-tokens", "200000", log=log) as replica:
        yield replica
