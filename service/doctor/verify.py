"""Which slabs `kvtier verify` reads, and what it says of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.service.cli_options import Exit
from kvtier.tiers.config import Config
from kvtier.tiers.errors import ConfigError, KVTierError
from kvtier.tiers.slab_check import Progress, SlabCheck, check_slab
from kvtier.tiers.slab_file import SLAB_NAME


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one slab: checked, or refused with one line that says why."""

    path: Path
    check: SlabCheck | None
    refused: str = ""

    @property
    def status(self) -> Exit:
        """OK clean, DEGRADED repaired, FAILED damaged or not checked."""
        if self.check is None:
            return Exit.FAILED
        if self.check.is_clean:
            return Exit.OK
        return Exit.DEGRADED if self.check.is_repaired else Exit.FAILED

    def __str__(self) -> str:
        """The verdict in a few words."""
        if self.check is None:
            return "not checked"
        if self.check.is_clean:
            return "clean"
        header = f"{self.check.num_bad_headers} of 2 superblock copies damaged" if self.check.num_bad_headers else ""
        mend = "repaired" if self.check.is_repaired else "damaged: --repair drops what is bad"
        return "; ".join(filter(None, (mend, header)))

    def as_json(self) -> dict[str, object]:
        """Everything, names of blocks in hex."""
        if self.check is None:
            return {"path": str(self.path), "status": "refused", "why": self.refused}
        report, superblock = self.check.report, self.check.superblock
        damaged = "repaired" if self.check.is_repaired else "damaged"
        return {
            "path": str(self.path),
            "status": "clean" if self.check.is_clean else damaged,
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
    """The slab that `path` names, or those of the directory; [file] path without one. ConfigError: it is neither."""
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


def verify_slab(path: Path, *, repair: bool = False, progress: Progress | None = None) -> Verdict:
    """Check one slab; one that is locked, foreign, of another version or cut short is refused, untouched."""
    try:
        return Verdict(path, check_slab(path, repair=repair, progress=progress))
    except KVTierError as error:
        return Verdict(path, None, str(error))


def worst(verdicts: Sequence[Verdict]) -> Exit:
    """The status of all slabs together: FAILED before DEGRADED before OK."""
    statuses = {verdict.status for verdict in verdicts}
    return next((status for status in (Exit.FAILED, Exit.DEGRADED) if status in statuses), Exit.OK)
