"""One S3 server for all stories of this folder that a process runs; each starts with an empty bucket."""

from collections.abc import Iterator

import pytest
from object_rig import NO_OBJECTS, ObjectServer, object_server


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    if NO_OBJECTS is not None:
        pytest.skip(NO_OBJECTS)
    with object_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server(running: ObjectServer) -> ObjectServer:
    running.empty()
    return running
