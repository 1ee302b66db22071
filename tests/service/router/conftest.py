"""What several files of the router's stories share: two replicas a worker."""

from collections.abc import Iterator

import pytest
from router_rig import ToldReplica, replicas


@pytest.fixture(scope="session")
def _started() -> Iterator[tuple[ToldReplica, ToldReplica]]:
    with replicas(2) as (one, other):
        yield one, other


@pytest.fixture
def pair(_started: tuple[ToldReplica, ToldReplica]) -> tuple[ToldReplica, ToldReplica]:
    """Two replicas, up and well-behaved, whatever the last story did to them."""
    for replica in _started:
        if replica.is_dead:
            replica.start()
        replica.behave()
    return _started
