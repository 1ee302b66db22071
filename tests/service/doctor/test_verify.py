"""`kvtier verify`: what it finds in real slabs with real damage, what it repairs, and what it leaves alone."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from command_rig import kvtier
from rich import console
from rich.console import Console
from slab_rig import BLOCK_SIZE, get, hash_of, put

from kvtier.cli import checks_cli
from kvtier.service.command_line import Exit
from kvtier.service.doctor.doctor import find_slabs, verify_slab
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.file import file_io
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab import Superblock
from kvtier.tiers.file.slab_check import check_slab
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import Outcome

FINGERPRINT = b"verify-tests".ljust(32, b".")
SLOT, NUM_KEYS = 5000, 60
KEYS = range(NUM_KEYS)


def open_store(directory: Path, fingerprint: bytes = FINGERPRINT) -> FileStore:
    return FileStore.open(directory, fingerprint, slot_bytes=SLOT, block_size=BLOCK_SIZE, size=4 << 20, mode="buffered")


def served(directory: Path) -> list[int]:
    """Which keys a fresh opening serves, each with exactly its bytes."""
    store = open_store(directory)
    keys = [key for key, outcome in zip(KEYS, get(store, KEYS), strict=True) if outcome is Outcome.OK]
    store.check()
    store.close()
    return keys


@dataclass
class Slab:
    """A closed slab that holds KEYS, key k in slot k."""

    path: Path
    superblock: Superblock

    def overwrite(self, offset: int, content: bytes) -> None:
        fd = os.open(self.path, os.O_RDWR)
        os.pwrite(fd, content, offset)
        os.close(fd)

    def flip(self, offset: int) -> None:
        """One bit."""
        self.overwrite(offset, bytes([self.path.read_bytes()[offset] ^ 4]))

    def digest(self) -> tuple[str, int]:
        """All of the file, and when it was last written to."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest(), self.path.stat().st_mtime_ns


@pytest.fixture
def slab(disk_dir: Path) -> Slab:
    store = open_store(disk_dir)
    assert set(put(store, KEYS)) == {Outcome.OK}
    store.close()
    return Slab(store.path, store.superblock)


def run(*arguments: str, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`kvtier verify ARGUMENTS`; behind a `prefix` in a process of its own."""
    if not prefix:
        return kvtier("verify", *arguments, columns="200")
    command = [*prefix, sys.executable, "-m", "kvtier.cli", "verify", *arguments]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=wide)


def as_json(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_whole_slab_is_clean_and_stays_as_it_is(slab: Slab) -> None:
    before = slab.digest()
    done = run(str(slab.path))
    assert done.returncode == Exit.OK, done.stderr
    assert "clean" in done.stdout
    assert str(NUM_KEYS) in done.stdout
    assert done.stderr == ""  # no bar where there is no terminal
    (found,) = as_json(run(str(slab.path.parent), "--json"))
    assert found["status"] == "clean"
    assert found["fingerprint"] == FINGERPRINT.hex()  # nobody named the model
    assert (found["slots"], found["blocks"]) == (slab.superblock.num_slots, NUM_KEYS)
    assert slab.digest() == before
    # Nor has a repair anything to change.
    assert run(str(slab.path), "--repair").returncode == Exit.OK
    assert slab.digest()[0] == before[0]


def test_damage_is_named_left_alone_then_repaired(slab: Slab) -> None:
    # One bit of a payload, another's padding, one bit of a row, and rubbish in a slot that was never used.
    row, payload = slab.superblock.row_offset, slab.superblock.payload_offset
    slab.flip(payload(3) + 1234)
    slab.flip(payload(4) + SLOT + 7)  # beyond the block's bytes: nobody's
    slab.flip(row(7) + 50)
    slab.overwrite(row(NUM_KEYS + 5) + 20, b"rubbish")
    before = slab.digest()

    done = run(str(slab.path), "--json")
    assert done.returncode == Exit.FAILED
    (found,) = as_json(done)
    assert found["status"] == "damaged"
    assert found["bad_payloads"] == [hash_of(3).hex()]
    assert len(found["bad_rows"]) == 2
    assert found["unreadable"] == []
    assert found["blocks"] == NUM_KEYS - 1  # the row of 7 names nothing any more
    assert slab.digest() == before

    # Repaired: exactly those are gone, and a second look finds nothing.
    done = run(str(slab.path), "--repair")
    assert done.returncode == Exit.DEGRADED, done.stderr
    assert "repaired" in done.stdout
    after = slab.path.read_bytes()
    assert after[row(3) : row(4)] == bytes(row(4) - row(3))
    assert run(str(slab.path)).returncode == Exit.OK
    assert served(slab.path.parent) == [key for key in KEYS if key not in (3, 7)]


@pytest.mark.parametrize("offset", [20, 4096 + 20])
def test_a_damaged_copy_of_the_superblock_is_written_anew(slab: Slab, offset: int) -> None:
    whole = slab.path.read_bytes()
    slab.flip(offset)
    done = run(str(slab.path))
    assert done.returncode == Exit.FAILED
    assert "1 of 2" in done.stdout
    assert run(str(slab.path), "--repair").returncode == Exit.DEGRADED
    assert slab.path.read_bytes() == whole


def test_what_a_reset_disowned_is_no_damage(slab: Slab) -> None:
    store = open_store(slab.path.parent)
    store.reset()
    store.close()
    assert any(slab.path.read_bytes()[slab.superblock.row_offset(0) :][:100])  # the rows are still there
    check = check_slab(slab.path, repair=True)
    assert check.is_clean
    assert check.num_blocks == 0
    assert any(slab.path.read_bytes()[slab.superblock.row_offset(0) :][:100])


def test_blocks_the_disk_does_not_give_are_named_each(slab: Slab) -> None:
    # A bad sector under block 9: the others of the same large call are read all the same.
    bad = slab.superblock.payload_offset(9)
    sizes = []

    class BadSector(FileIO):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            length = sum(buffer.nbytes for buffer in buffers)
            sizes.append(length)
            if offset <= bad < offset + length:
                raise OSError(5, "Input/output error")
            return super().preadv(fd, buffers, offset)

    check = check_slab(slab.path, io=BadSector())
    assert check.unreadable == [hash_of(9)]
    assert check.bad_payloads == check.bad_rows == []
    assert max(sizes) > 20 * slab.superblock.stride  # in large calls
    check_slab(slab.path, io=BadSector(), repair=True)
    assert served(slab.path.parent) == [key for key in KEYS if key != 9]


def test_progress_is_told_and_ends_at_all(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "CALL_BYTES", 10 * slab.superblock.stride)
    told: list[tuple[int, int]] = []
    verify_slab(slab.path, progress=lambda done, total: told.append((done, total)))
    total = NUM_KEYS * slab.superblock.stride
    assert [done for done, _ in told] == [total * step // 6 for step in range(1, 7)]
    assert {all_ for _, all_ in told} == {total}


def test_a_bar_is_drawn_on_a_terminal(
    slab: Slab, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "Console", lambda stderr=False: Console(stderr=stderr, force_terminal=True))
    checks_cli._verify_all([slab.path], repair=False)
    shown = capfd.readouterr()
    assert "━" in shown.err
    assert shown.out == ""


def test_a_slab_in_use_is_refused_with_the_pid(slab: Slab) -> None:
    store = open_store(slab.path.parent)
    for repair in ([], ["--repair"]):
        done = run(str(slab.path), *repair)
        assert done.returncode == Exit.FAILED
        assert len(done.stderr.splitlines()) == 1
        assert f"in use by process {os.getpid()};" in done.stderr
    store.close()
    assert run(str(slab.path)).returncode == Exit.OK


def test_foreign_other_and_short_files_are_reported_and_untouched(slab: Slab) -> None:
    directory = slab.path.parent
    whole = slab.path.read_bytes()
    newer = bytearray(whole)
    for start in (0, 4096):
        newer[start + 8] = 3
        body = bytes(newer[start : start + 2040])
        newer[start + 2040 : start + 2048] = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    files = {
        "aa" * 32 + ".slab": b"somebody else's" * 1000,
        "bb" * 32 + ".slab": bytes(newer),
        "cc" * 32 + ".slab": whole[:-4096],
        "notes.slab": b"not named as ours: none of our business",
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    done = run(str(directory), "--repair")
    assert done.returncode == Exit.FAILED
    assert [line.split(": ", 2)[2].split(";")[0].split(",")[0] for line in done.stderr.splitlines()] == [
        "not a kvtier slab",
        "format version 3",
        "cut short",
    ]
    assert done.stdout.count("not checked") == 3
    assert done.stdout.count("clean") == 1  # ours
    assert {name: (directory / name).read_bytes() for name in files} == files


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="setpriv is not installed")
def test_reading_needs_no_right_to_write(slab: Slab) -> None:
    # Root may write anywhere, unless it gives that up.
    bound = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    before = slab.digest()
    slab.path.chmod(0o444)
    slab.path.parent.chmod(0o555)
    done = run(str(slab.path), prefix=bound)
    assert (done.returncode, done.stderr) == (Exit.OK, "")
    done = run(str(slab.path), "--repair", prefix=bound)
    assert done.returncode == Exit.FAILED
    assert (
        done.stderr
        == f"kvtier: {slab.path}: Permission denied; could not repair all of it: run it as the slab's owner\n"
    )
    slab.path.parent.chmod(0o700)
    assert slab.digest() == before


def test_what_is_to_be_verified(tmp_path: Path) -> None:
    # Nothing named anywhere, a path that is not there, an empty directory, and the configuration's.
    with pytest.raises(ConfigError, match=r"PATH: none given, and no \[file\] path; name a slab"):
        find_slabs(None, Config())
    done = run(str(tmp_path / "nowhere"))
    assert done.returncode == Exit.USAGE
    assert (
        done.stderr
        == f'kvtier: PATH "{tmp_path}/nowhere": No such file or directory; name a slab or a directory of slabs\n'
    )
    done = run(str(tmp_path))
    assert (done.returncode, done.stdout) == (Exit.OK, "no slabs there\n")
    store = open_store(tmp_path)
    store.close()
    assert find_slabs(None, Config.load(file={"path": tmp_path})) == [store.path]


def test_an_encrypted_slab_needs_its_key(tmp_path: Path) -> None:
    key = bytes(range(32))
    store = FileStore.open(tmp_path, FINGERPRINT, slot_bytes=SLOT, block_size=BLOCK_SIZE, size=4 << 20,
                           mode="buffered", key=key)  # fmt: skip
    assert set(put(store, KEYS)) == {Outcome.OK}
    store.close()
    slab = Slab(store.path, store.superblock)
    (tmp_path / "key").write_text(key.hex())
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "kvtier.toml").write_text(f'[file]\nkey_file = "{tmp_path}/key"\n')
    config = ("--config", str(tmp_path / "kvtier.toml"))
    before = slab.digest()
    # Without the key it is left alone, with one line.
    done = run(str(slab.path), "--repair")
    assert done.returncode == Exit.FAILED
    assert "encrypted, and no [file] key_file is set; it was left untouched" in done.stderr
    assert slab.digest() == before
    # With it, from the configuration or the environment, it is read whole.
    assert run(str(slab.path), *config).returncode == Exit.OK
    in_environment = ("env", f"KVTIER_FILE__KEY_FILE={tmp_path}/key")
    assert run(str(slab.path), prefix=in_environment).returncode == Exit.OK
    assert slab.digest() == before
    # Damage is named as ever, and repaired: a payload's and a row's.
    slab.flip(slab.superblock.payload_offset(3) + 1234)
    slab.flip(slab.superblock.row_offset(7) + 140)
    (found,) = as_json(run(str(slab.path), *config, "--json"))
    assert found["bad_payloads"] == [hash_of(3).hex()]
    assert found["bad_rows"] == [hash_of(7).hex()]
    assert run(str(slab.path), *config, "--repair").returncode == Exit.DEGRADED
    assert run(str(slab.path), *config).returncode == Exit.OK
    # A key file that holds none is one line, and status 2.
    (tmp_path / "key").write_text("secret")
    done = run(str(slab.path), *config)
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith(f'kvtier: [file] key_file "{tmp_path}/key": holds no key of 32 bytes')
    assert done.stderr.count("\n") == 1
