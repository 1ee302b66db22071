"""`kvtier serve` looks at what it will use before anybody waits for it: a wrong setting is one line and status 2."""

from pathlib import Path

from command_rig import kvtier
from service_rig import DaemonProcess

from kvtier.service.command_line import Exit

SECRET = "hunter2"


def refused(home: Path, **options: str) -> str:
    """What `kvtier serve` says of these options."""
    done = kvtier("serve", "--socket", home / "s", "--http", "127.0.0.1:0", host__size="1MiB", **options)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    (line,) = done.stderr.splitlines()
    assert SECRET not in line
    assert not (home / "s").exists()  # nobody could have connected
    return line.removeprefix("kvtier: ")


def test_settings_that_no_model_could_use_end_the_start(home: Path, disk_dir: Path) -> None:
    (disk_dir / "file").write_text("mine")
    (disk_dir / "loop").symlink_to("loop")
    path = disk_dir / "file"
    name_another = "name a directory that this user can write in"
    in_its_place = f"a file is in its place; {name_another}"
    assert refused(home, file__path=str(path)) == f'[file] path "{path}": {in_its_place}'
    assert refused(home, file__path=str(path / "kv")) == f'[file] path "{path / "kv"}": {in_its_place}'
    assert refused(home, file__path=str(disk_dir / "loop")).startswith(f'[file] path "{disk_dir / "loop"}": ')
    assert refused(home, file__path="/proc/kv") == f'[file] path "/proc/kv": it cannot be made; {name_another}'
    assert path.read_text() == "mine"
    line = refused(home, file__path=str(disk_dir / "kv"), file__size="900TiB")
    assert line.startswith('[file] size "900TiB": the directory has ')
    assert line.endswith(" free; lower size or choose another path")
    assert refused(home, file__path=str(disk_dir), file__size="5") == (
        '[file] size "5": 5 bytes are less than a block of any model; did you mean "5GiB"?'
    )
    assert refused(home, redis__url=f"redis://:{SECRET}@cache:sixty") == (
        '[redis] url "redis://…@cache:…": its port is no number from 1 to 65535; '
        "write it as in redis://HOST:6379/0, and / and # of a password as %2F and %23"
    )
    assert refused(home, redis__url="redis://cache", redis__key_file=str(path)).startswith('[redis] key_file "')


def test_a_redis_server_that_is_away_ends_nothing_and_the_log_says_what_is_used(home: Path, disk_dir: Path) -> None:
    options = {"host__size": "1MiB", "file__path": str(disk_dir / "new" / "kv"), "file__size": "4m"}
    daemon = DaemonProcess(home / "s", redis__url="redis://127.0.0.1:1", **options)
    assert "ready on" in daemon.first_line
    assert daemon.end(15) == 0
    told = "".join(daemon.lines)
    assert f"INFO kvtier: [file] 0 slabs in {disk_dir / 'new' / 'kv'}, 0 B of [file] size 4MiB; " in told
    assert "INFO kvtier: [redis] standalone at 127.0.0.1:1\n" in told
