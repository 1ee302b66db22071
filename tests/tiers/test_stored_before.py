"""Blocks that commit 8547b276 stored, before the core was rewritten, are found and verified: no name, no byte changed.

`stored_before.xz` holds a slab, an archive, Redis's records and a bucket's objects, as that commit wrote them.
"""

import asyncio
import lzma
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import object_rig
import pytest
import redis_stories
from doubles import BLOCK_SIZE, hierarchy_of
from fault_rig import FINGERPRINT, fetch, over_slab
from object_rig import NO_OBJECTS, object_server
from redis_rig import NO_REDIS, standalone

from kvtier.service.archive.archive import import_blocks
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.tier import Outcome

FILE = Path(__file__).with_name("stored_before.xz")


def chains() -> list[TokenChain]:
    """A few of each kind: both schemes, a tenant's salt, an adapter, an image."""
    image = {1: [("image", b"1")]}
    made = [
        TokenChain(root_hash(b"f" * 32), BLOCK_SIZE),
        TokenChain(root_hash(b"f" * 32, cache_salt="t1", lora_name="a", lora_digest=b"w"), BLOCK_SIZE, "xxh3"),
        TokenChain(root_hash(b"f" * 32), BLOCK_SIZE, extra_keys=image),
    ]
    for number, chain in enumerate(made):
        chain.extend(range(1000 * number, 1000 * number + 2 * BLOCK_SIZE))
    return made


def held() -> Any:
    return msgpack.unpackb(lzma.decompress(FILE.read_bytes()))


def test_every_name_is_what_it_was() -> None:
    assert [chain.hashes for chain in chains()] == held()["names"]


def test_a_slab() -> None:
    with TemporaryDirectory() as folder:
        for name, content in held()["slab"].items():
            (Path(folder) / name).write_bytes(content)
        hierarchy = over_slab(Path(folder), size=1 << 20)
        assert [fetch(hierarchy, chain) for chain in chains()] == [2, 2, 2]
        hierarchy.close()


def test_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(held()["archive"])
    hierarchy = hierarchy_of(slots=16)

    async def bring() -> None:
        async for _ in import_blocks(hierarchy, FINGERPRINT, BLOCK_SIZE, path):
            pass

    asyncio.run(bring())
    assert [fetch(hierarchy, chain) for chain in chains()] == [2, 2, 2]
    hierarchy.close()


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
def test_records_in_redis() -> None:
    with standalone() as server:
        for key, value in held()["redis"].items():
            server.cli("SET", key, stdin=value)
        with redis_stories.opened(server.url) as tier:
            assert [redis_stories.read(tier, chain) for chain in chains()] == [[Outcome.OK] * 2] * 3


@pytest.mark.skipif(NO_OBJECTS is not None, reason=str(NO_OBJECTS))
def test_objects_in_a_bucket(tmp_path: Path) -> None:
    with object_server(tmp_path) as server:
        for key, content in held()["objects"].items():
            server.put(key, content)
        with object_rig.opened(server.endpoint) as tier:
            assert [tier.locate(chain.hashes) for chain in chains()] == [2, 2, 2]
            assert [object_rig.read(tier, chain) for chain in chains()] == [[Outcome.OK] * 2] * 3
