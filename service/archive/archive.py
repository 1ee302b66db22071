"""Exports blocks to an archive file and imports them again, while the hierarchy goes on serving."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kvtier.service.archive import format as archive_format
from kvtier.service.archive.copying import UNKNOWN, ArchiveProgress, Export, Import
from kvtier.service.archive.format import HEADER_BYTES, Header
from kvtier.service.web import LoopFile
from kvtier.tiers import ChainHash, ConfigError, Encryption, FingerprintMismatch, FormatError, KVTierError, key_id
from kvtier.tiers.hierarchy import HeldRun, Hierarchy, held_runs

__all__ = ["ArchiveProgress", "export_blocks", "import_blocks"]


async def export_blocks(
    hierarchy: Hierarchy,
    fingerprint: bytes,
    block_size: int,
    path: Path,
    hashes: Sequence[ChainHash] | None = None,
    *,
    force: bool = False,
    key: bytes | None = None,
) -> AsyncGenerator[ArchiveProgress, None]:
    """Write all blocks of L2 and of tiers that can list theirs to `path`, or one prompt's only (`hashes`, head first).

    `block_size` is the namespace's, in tokens. With `key` (32 bytes) the archive is encrypted. Blocks stored meanwhile
    are left out. If a block is evicted meanwhile, it and those after it in its chain are lost. The file is written as
    `path`.part, and renamed at the end. The export takes at most an eighth of L2, and gives it back. To leave it early,
    call `aclose` (`contextlib.aclosing`); the hierarchy must stay open until then.

    Raises ConfigError if the file exists (without `force`) or cannot be created. Raises KVTierError if it cannot be
    written; then no file is left.
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
            runs = [HeldRun(UNKNOWN, list(hashes))]
        encryption = Encryption.fresh(key) if key is not None else None
        num_blocks = sum(len(run.hashes) for run in runs)
        header = Header(fingerprint, hierarchy.host.region.slot_bytes, block_size, num_blocks, encryption)
        export = Export(hierarchy, header, file, key)
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
    hierarchy: Hierarchy,
    fingerprint: bytes,
    block_size: int,
    path: Path,
    key: bytes | None = None,
    *,
    unsealed: bool = False,
) -> AsyncGenerator[ArchiveProgress, None]:
    """Store every block of an archive as if it had been computed now. Each is verified before it can be found.

    With `key` an archive that is not encrypted by it is refused, unless `unsealed`: anybody may have made it. To leave
    the import early, call `aclose`; the hierarchy must stay open until then. However it ends, blocks stored so far are
    whole and stay.

    Raises FingerprintMismatch for another model or block size, and ConfigError for another key. Raises FormatError if
    the file is not an archive, damaged or cut short, and KVTierError if it cannot be read or the tiers were reset.
    """
    path = Path(path)
    file = await LoopFile.open(path)
    work = None
    try:
        encoded = bytearray(HEADER_BYTES)
        encoded = encoded[: await file.read_into(memoryview(encoded))]
        header = archive_format.decode_header(bytes(encoded))
        _require_same(header, Header(fingerprint, hierarchy.host.region.slot_bytes, block_size, 0))
        _require_key(header, key, path, unsealed=unsealed)
        work = Import(hierarchy, header, bytes(encoded), key)
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


def _require_key(header: Header, key: bytes | None, path: Path, *, unsealed: bool) -> None:
    if header.encryption is None and key is not None and not unsealed:
        raise ConfigError(
            f"{path}: not encrypted, and [file] key_file is set: anybody may have made it; import it by --unsealed"
        )
    if header.encryption is None or (key is not None and key_id(key) == header.encryption.key_id):
        return
    there = header.encryption.key_id.hex()
    why = f"encrypted with key {there}, and no [file] key_file is set"
    if key is not None:
        why = f"encrypted with key {there}, [file] key_file holds {key_id(key).hex()}"
    raise ConfigError(f"{path}: {why}; set the key it was exported with")


def _require_same(archive: Header, own: Header) -> None:
    if archive.fingerprint != own.fingerprint:
        raise FingerprintMismatch(
            f"an archive of model {archive.fingerprint.hex()}, not of {own.fingerprint.hex()}; "
            "import it on a daemon that serves that model"
        )
    if (archive.slot_bytes, archive.block_size) != (own.slot_bytes, own.block_size):
        raise FingerprintMismatch(
            f"its blocks have {archive.block_size} tokens and {archive.slot_bytes} bytes, "
            f"but here they have {own.block_size} and {own.slot_bytes}; export it again"
        )
