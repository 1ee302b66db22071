"""Chooses the slabs for `kvtier verify`, checks each, and reports the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.service import Exit
from kvtier.tiers import ConfigError, KVTierError
from kvtier.tiers.config import Config
from kvtier.tiers.file import SLAB_NAME, ReportProgress, SlabCheck, check_slab


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one slab: its check, or one line that says why it was refused."""

    path: Path
    check: SlabCheck | None
    refused: str = ""

    @property
    def state(self) -> str:
        if self.check is None:
            return "refused"
        if self.check.is_clean:
            return "clean"
        return "repaired" if self.check.is_repaired else "damaged"

    @property
    def status(self) -> Exit:
        return {"clean": Exit.OK, "repaired": Exit.DEGRADED}.get(self.state, Exit.FAILED)

    def __str__(self) -> str:
        if self.check is None:
            return "not checked"
        hint = ": --repair drops what is bad" if self.state == "damaged" else ""
        header = f"; {self.check.num_bad_headers} of 2 superblock copies damaged" if self.check.num_bad_headers else ""
        return f"{self.state}{hint}{header}"

    def as_json(self) -> dict[str, object]:
        if self.check is None:
            return {"path": str(self.path), "status": self.state, "why": self.refused}
        report, superblock = self.check.report, self.check.superblock
        return {
            "path": str(self.path),
            "status": self.state,
            "fingerprint": superblock.fingerprint.hex(),
            "block_size": superblock.block_size,
            "slot_bytes": superblock.slot_bytes,
            "slots": report.num_slots,
            "blocks": report.num_blocks,
            "bad_superblocks": self.check.num_bad_headers,
            "bad_payloads": [name.hex() for name in report.bad_payloads],
            "bad_rows": [name.hex() for name in report.bad_rows],
            "unreadable": [name.hex() for name in report.unreadable],
        }


def find_slabs(path: Path | None, config: Config) -> list[Path]:
    """The slab at `path`, or those of the directory; [file] path by default. Raises ConfigError if it is neither."""
    directory = path or config.file.path
    if directory is None:
        raise ConfigError("PATH: none given, and no [file] path; name a slab or a directory of slabs")
    field = "PATH" if path else "[file] path"
    try:
        if directory.is_dir():
            return sorted(found for found in directory.iterdir() if SLAB_NAME.fullmatch(found.name))
        directory.stat()
    except OSError as error:
        why = f'{field} "{directory}": {error.strerror}; name a slab or a directory of slabs'
        raise ConfigError(why) from None
    return [directory]


def verify_slab(
    path: Path, *, repair: bool = False, key: bytes | None = None, progress: ReportProgress | None = None
) -> Verdict:
    """Check one slab. A locked, foreign or truncated slab, or one of another version or key, is refused, untouched."""
    try:
        return Verdict(path, check_slab(path, repair=repair, key=key, progress=progress))
    except KVTierError as error:
        return Verdict(path, None, str(error))


def worst(verdicts: Sequence[Verdict]) -> Exit:
    statuses = {verdict.status for verdict in verdicts}
    return next((status for status in (Exit.FAILED, Exit.DEGRADED) if status in statuses), Exit.OK)
