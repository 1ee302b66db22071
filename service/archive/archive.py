"""Export blocks to an archive file and import them again, beside a hierarchy that goes on serving."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kvtier.service import archive_format
from kvtier.service.archive_copy import UNKNOWN, Export, Import, Progress
from kvtier.service.archive_format import HEADER_BYTES, Header
from kvtier.service.loop_file import LoopFile
from kvtier.tiers.errors import ConfigError, FingerprintMismatch, FormatError, KVTierError
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.inventory import Run, held_runs
from kvtier.tiers.tier import ChainHash

__all__ = ["Progress", "export_blocks", "import_blocks"]


async def export_blocks(
    hierarchy: Hierarchy,
    fingerprint: bytes,
    block_size: int,
    path: Path,
    hashes: Sequence[ChainHash] | None = None,
    *,
    force: bool = False,
) -> AsyncGenerator[Progress, None]:
    """Write all blocks of L2 and of the tiers that can list theirs, or one prompt's (`hashes`, head first) to `path`.

    `block_size` is the namespace's, in tokens. Blocks that come meanwhile are left out; one that goes meanwhile is
    lost, with those behind it. The file appears whole, under its name, at the end; until then it is `path`.part.
    Takes an eighth of L2 at most, and gives it back. Leave it early by `aclose` (`contextlib.aclosing`); the hierarchy
    stays open until then. Raises ConfigError where the file exists (without `force`) or cannot be made, KVTierError
    where it cannot be written: nothing is left of it then.
    """
    _require_names(fingerprint, hashes)
    path = Path(path)
    await _require_vacant(path, force)
    part = path.with_name(path.name + ".part")
    file = await LoopFile.create(part)
    published = False
    try:
        if hashes is None:
            runs = await asyncio.to_thread(held_runs, hierarchy)
        else:
            runs = [Run(UNKNOWN, list(hashes))]
        header = Header(fingerprint, hierarchy.host.region.slot_bytes, block_size, sum(len(run.hashes) for run in runs))
        export = Export(hierarchy, header, file)
        await export.begin()
        for run in runs:
            async for progress in export.run(run):
                yield progress
        await export.end()
        await _require_vacant(path, force)
        await asyncio.to_thread(_publish, part, path)
        published = True
        yield export.progress()
    except OSError as error:
        raise KVTierError(f"{path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(KVTierError):
            await file.close()
        if not published:
            part.unlink(missing_ok=True)


async def import_blocks(
    hierarchy: Hierarchy, fingerprint: bytes, block_size: int, path: Path
) -> AsyncGenerator[Progress, None]:
    """Store every block of an archive as if it had been computed now; each is verified before anybody finds it.

    Leave it early by `aclose`; the hierarchy stays open until then. Whatever ends it, what was stored is whole and
    stays. Raises FingerprintMismatch for an archive of another model or block size, FormatError where a file is no
    archive, damaged or cut short (it says where), KVTierError where it cannot be read or the tiers were reset.
    """
    path = Path(path)
    file = await LoopFile.open(path)
    work = None
    try:
        encoded = bytearray(HEADER_BYTES)
        encoded = encoded[: await file.read_into(memoryview(encoded))]
        header = archive_format.decode_header(bytes(encoded))
        _require_same(header, Header(fingerprint, hierarchy.host.region.slot_bytes, block_size, 0))
        work = Import(hierarchy, header, bytes(encoded))
        buffer = memoryview(bytearray(work.batch * header.record_bytes))
        while True:
            num_read = await file.read_into(buffer)
            hashes, problem = await asyncio.to_thread(work.store, buffer[:num_read])
            await work.settle(hashes, num_read)
            yield work.progress()
            if problem is not None:
                raise problem
            if num_read < len(buffer):
                break
        if not work.parser.ended:
            raise work.parser.broken_off()
        await work.recount()
        yield work.progress()
    except FormatError as error:
        num_blocks = work.num_blocks if work is not None else 0
        raise FormatError(f"{path}: {error}; {num_blocks} blocks were imported and stay") from None
    except FingerprintMismatch as error:
        raise FingerprintMismatch(f"{path}: {error}") from None
    finally:
        await file.close()


def _publish(part: Path, path: Path) -> None:
    part.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _require_names(fingerprint: bytes, hashes: Sequence[ChainHash] | None) -> None:
    if len(fingerprint) != 32:
        raise ValueError(f"fingerprint of {len(fingerprint)} bytes: must be 32")
    if hashes is not None and any(len(name) != 32 for name in hashes):
        raise ValueError("chain hashes must be 32 bytes")
    if hashes is not None and len(set(hashes)) < len(hashes):
        raise ValueError("a chain hash is given twice")


async def _require_vacant(path: Path, force: bool) -> None:
    if not force and await asyncio.to_thread(os.path.lexists, path):
        raise ConfigError(f"{path}: exists already; choose another name, or overwrite it with --force")


def _require_same(archive: Header, own: Header) -> None:
    if archive.fingerprint != own.fingerprint:
        raise FingerprintMismatch(
            f"an archive of model {archive.fingerprint.hex()}, not of {own.fingerprint.hex()}; "
            "import it where that model is served"
        )
    if (archive.slot_bytes, archive.block_size) != (own.slot_bytes, own.block_size):
        raise FingerprintMismatch(
            f"its blocks are of {archive.block_size} tokens and {archive.slot_bytes} bytes, "
            f"here they are of {own.block_size} and {own.slot_bytes}; export it anew"
        )
