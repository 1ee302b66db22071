"""What the stories of objects share: the server, whose bucket is empty."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from object_rig import ObjectServer


@pytest.fixture
def server(s3: "ObjectServer") -> "ObjectServer":
    s3.empty()
    return s3
