"""Stories of an operator at a running daemon: its verbs over HTTP, and the commands that say them."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_rig import kvtier
from doubles import SLOT_BYTES, chain_of, payload_of, wait_until
from http_rig import MODEL
from service_rig import FINGERPRINT, DaemonProcess, ask, attach, load, store, where
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvtier.cli import admin_cli
from kvtier.connector.daemon.client import RemoteTiers
from kvtier.service.observe import DaemonStatus, statuses
from kvtier.service.observe.top import daemon_row, hit_share
from kvtier.service.traces import read_trace
from kvtier.tiers.naming.chain import TokenChain

pytestmark = pytest.mark.timeout(300)  # every command is a process that imports everything anew

OTHER = b"another model".ljust(32, b".")


@pytest.fixture
def daemon(home: Path, disk_dir: Path) -> Iterator[DaemonProcess]:
    """With a slab."""
    process = DaemonProcess(
        home / "s", host__size="1MiB", file__path=str(disk_dir), file__size="4MiB", file__mode="buffered"
    )
    yield process
    assert process.end(signal.SIGTERM) == 0
    assert all(" kvtier: [file] " in line for line in process.lines)  # a second slab has less of the disk


@pytest.fixture
def client_of(home: Path, daemon: DaemonProcess) -> Iterator[Callable[..., RemoteTiers]]:
    """Clients of the daemon; in the end its laws hold (I3), and they say goodbye."""
    clients: list[RemoteTiers] = []

    def start(**options: Any) -> RemoteTiers:
        clients.append(attach(home / "s", **options))
        return clients[-1]

    yield start
    for client in clients:
        client.check()
        client.close()


@pytest.fixture
def tiers(client_of: Callable[..., RemoteTiers]) -> RemoteTiers:
    return client_of()


def post(daemon: DaemonProcess, path: str, **body: object) -> httpx2.Response:
    return httpx2.post(f"http://{daemon.http}/admin/{path}", json=body, timeout=60, headers=daemon.operator)


def prompt(num_blocks: int, first_token: int = 0, salt: str | None = None) -> TokenChain:
    return chain_of(num_blocks, first_token, salt, fingerprint=FINGERPRINT)


def says(daemon: DaemonProcess, *arguments: str, stdin: str = "") -> str:
    """What the command prints; it must end well."""
    ended = kvtier(*arguments, "--http", daemon.http, stdin=stdin)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


# forgetting


def test_a_reset_of_one_model_or_all_reaches_clients(
    daemon: DaemonProcess, client_of: Callable[..., RemoteTiers]
) -> None:
    one, other = client_of(size=32 * SLOT_BYTES), client_of(size=32 * SLOT_BYTES, fingerprint=OTHER)
    chain = chain_of(4)
    for tiers in (one, other):
        store(tiers, chain)
        assert tiers.drain(60)
    before = one.epoch
    nameless = post(daemon, "reset")
    assert nameless.status_code == 400
    ambiguous = post(daemon, "evict", tokens=[1, 2, 3, 4])
    assert ambiguous.status_code == 400
    assert re.fullmatch(r"none is named: 2 models are open; name one of \w{16}, \w{16}", ambiguous.json()["error"])
    assert post(daemon, "reset", model=MODEL).json() == {"reset": [MODEL]}
    assert where(one, chain).miss == 4
    assert where(other, chain)["l2"] == 4

    def heard() -> bool:
        one.tick()
        return one.epoch > before

    wait_until(heard)
    assert sorted(post(daemon, "reset", all=True).json()["reset"]) == sorted([MODEL, OTHER.hex()[:16]])
    assert where(other, chain).miss == 4
    unknown = post(daemon, "reset", model="abcdef")
    assert unknown.status_code == 404


def test_an_evicted_prompt_leaves_every_tier_and_no_other_does(daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    secret, other = prompt(4, salt="alice"), prompt(4, salt="bob")
    for chain in (secret, other):
        store(tiers, chain)
    assert tiers.drain(60)
    tokens = json.dumps(list(range(16)))
    shown = says(daemon, "purge", "--blocks", "-", "--cache-salt", "alice", stdin=tokens)
    assert shown == "evicted 4 from l2, 4 from file; 0 pins removed\n"
    assert where(tiers, secret).miss == 4
    assert load(tiers, other) == 4


def test_a_prompt_is_named_by_its_text_as_well(daemon: DaemonProcess, tiers: RemoteTiers, home: Path) -> None:
    words = Tokenizer(WordLevel({f"t{number}": number for number in range(16)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    words.enable_truncation(8)  # as some checkpoints have it
    words.enable_padding(length=24)
    (home / "model").mkdir()
    words.save(str(home / "model" / "tokenizer.json"))
    text, named = home / "prompt.txt", ["--tokenizer", str(home / "model"), "--cache-salt", "alice"]
    text.write_text(" ".join(f"t{number}" for number in range(16)))
    store(tiers, prompt(4, salt="alice"))
    assert tiers.drain(60)
    assert "pin 1: 4 blocks stay" in says(daemon, "pin", "--text", str(text), *named)
    assert says(daemon, "export", str(home / "one.kva"), "--text", str(text), *named).startswith(
        "exported 4 of 4 blocks"
    )
    shown = says(daemon, "purge", "--text", "-", *named, stdin=text.read_text())
    assert shown == "evicted 4 from l2, 4 from file; 1 pins removed\n"


def test_blocks_evicted_while_an_engine_loads_them_stay_right(daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    chain = prompt(4)
    store(tiers, chain)
    claim, promised = ask(tiers, chain)
    assert promised == 4
    lease = tiers.lease(claim)
    names = [name.hex() for name in chain.hashes]
    assert post(daemon, "evict", hashes=names).json()["evicted"]["l2"] == 4
    for number in range(1, 8):
        store(tiers, prompt(8, 1000 * number))  # all of L2 is written over, but for what is leased
    assert tiers.region is not None
    for slot, name in zip(lease.slots, lease.hashes, strict=True):
        assert bytes(tiers.region.slot(slot)) == payload_of(name)
    lease.release()


# pins and quotas, by command


def test_pins_by_command(daemon: DaemonProcess, tiers: RemoteTiers, home: Path) -> None:
    chain = prompt(4, salt="alice")
    store(tiers, chain)
    file = home / "tokens.json"
    file.write_text(json.dumps(list(range(16))))
    assert says(daemon, "pin", "--blocks", str(file), "--cache-salt", "alice", "--ttl", "900s") == (
        "pin 1: 4 blocks stay for 900 s\n"
    )
    names = json.dumps([name.hex() for name in chain.hashes[:2]])
    assert json.loads(says(daemon, "pin", "--blocks", "-", "--json", stdin=names))["blocks"] == 2
    listed = json.loads(says(daemon, "pin", "--json"))["pins"]
    assert [(pin["pin"], pin["blocks"], pin["model"]) for pin in listed] == [(1, 4, MODEL), (2, 2, MODEL)]
    assert "seconds left" in says(daemon, "pin")
    for number in ("1", "2"):
        assert says(daemon, "unpin", number) == f"pin {number} is removed\n"
    assert json.loads(says(daemon, "pin", "--json")) == {"pins": []}


def test_quotas_by_command_hold_for_models_to_come(
    daemon: DaemonProcess, client_of: Callable[..., RemoteTiers], tiers: RemoteTiers
) -> None:
    assert says(daemon, "quota", "alice", "8KiB") == "alice may have 8KiB of each model's host memory\n"
    chain = prompt(6, salt="alice")
    assert store(tiers, chain) == 2
    assert store(tiers, prompt(6, salt="bob")) == 6
    later = client_of(fingerprint=OTHER, size=16 * SLOT_BYTES)
    assert store(later, chain_of(6, salt="alice", fingerprint=OTHER)) == 2
    [listed] = json.loads(says(daemon, "quota", "--json"))["quotas"]
    assert (listed["cache_salt"], listed["size"], listed["slab"]) == ("alice", 8192, None)
    assert listed["used"] == {MODEL: 8192, OTHER.hex()[:16]: 8192}
    status = httpx2.get(f"http://{daemon.http}/status").json()
    assert {model["model"]: model["dropped"]["l2"].get("quota") for model in status["models"]} == {
        MODEL: 4,
        OTHER.hex()[:16]: 4,
    }
    assert "alice" not in httpx2.get(f"http://{daemon.http}/summary").text  # a salt is not for everybody
    assert "alice" not in httpx2.get(f"http://{daemon.http}/metrics").text
    assert says(daemon, "quota", "alice", "--remove") == "alice has no quota now\n"
    assert store(tiers, chain, 2) == 4
    again = kvtier("quota", "alice", "--remove", "--http", daemon.http)
    assert (again.returncode, again.stderr) == (
        1,
        "kvtier: cache_salt: this tenant has no quota; `kvtier quota` lists those that have one\n",
    )


# to a file and back


def test_a_served_model_is_exported_and_imported(home: Path, daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    chains = [prompt(6, 100 * number) for number in range(4)]
    for chain in chains:
        store(tiers, chain)
    file = home / "all.kva"
    shown = says(daemon, "export", str(file))
    assert re.fullmatch(rf"exported 24 of 24 blocks of {MODEL}, \d+ KiB\n", shown)
    refused = kvtier("export", str(file), "--http", daemon.http)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"kvtier: {file}: exists already; choose another name, or overwrite it with --force\n",
    )
    says(daemon, "export", str(file), "--force")
    assert says(daemon, "purge", "--all") == f"forgot everything of {MODEL}\n"
    assert [where(tiers, chain).miss for chain in chains] == [6] * 4
    assert json.loads(says(daemon, "import", str(file), "--json"))["blocks"] == 24
    assert [load(tiers, chain) for chain in chains] == [6] * 4  # every byte is right


def test_with_a_key_file_neither_slab_nor_archive_tells_a_prompt(home: Path, disk_dir: Path) -> None:
    key = home / "key"
    options = {"host__size": "1MiB", "file__path": str(disk_dir), "file__size": "4MiB", "file__key_file": str(key)}
    # A file that holds no key stops the daemon, not its first engine.
    key.write_text("secret")
    key.chmod(0o600)
    ended = kvtier("serve", "--socket", str(home / "s"), **options)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f'kvtier: [file] key_file "{key}": holds no key of 32 bytes')
    assert ended.stderr.count("\n") == 1
    # With a key an engine's prompt goes through slab and archive, and comes back from both.
    key.write_text(bytes(range(32)).hex())
    daemon = DaemonProcess(home / "s", **options)
    tiers, chain = attach(home / "s"), prompt(6, 70_000)
    store(tiers, chain)
    assert tiers.drain(60)
    file = home / "all.kva"
    says(daemon, "export", str(file))
    (slab,) = disk_dir.glob("*.slab")
    tiers.close()
    assert daemon.end(signal.SIGTERM) == 0
    for path in (file, slab):
        content = path.read_bytes()
        assert not any(chain.block_tokens(i) in content for i in range(6))
        assert not any(payload_of(name)[:16] in content or name[:16] in content for name in chain.hashes)
    daemon = DaemonProcess(home / "s", **options)
    tiers = attach(home / "s")
    assert where(tiers, chain)["file"] == 6
    assert load(tiers, chain) == 6
    says(daemon, "purge", "--all")
    says(daemon, "import", str(file))
    assert load(tiers, chain) == 6
    tiers.check()
    tiers.close()
    assert daemon.end(signal.SIGTERM) == 0


def test_an_archive_in_the_clear_is_not_for_a_daemon_with_a_key(home: Path, disk_dir: Path) -> None:
    file, key, chain = home / "all.kva", home / "key", prompt(6)
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    tiers = attach(home / "s")
    store(tiers, chain)
    says(daemon, "export", str(file))
    tiers.close()
    assert daemon.end(signal.SIGTERM) == 0
    key.touch(0o600)
    key.write_text(bytes(range(32)).hex())
    daemon = DaemonProcess(home / "s", host__size="1MiB", file__path=str(disk_dir), file__key_file=str(key))
    tiers = attach(home / "s")
    assert load(tiers, chain) == 0
    refused = kvtier("import", str(file), "--http", daemon.http)
    assert refused.returncode == 2
    assert "not encrypted, and [file] key_file is set: its origin is unknown; import it by --unsealed" in refused.stderr
    assert load(tiers, chain) == 0
    says(daemon, "import", str(file), "--unsealed")
    assert load(tiers, chain) == 6
    tiers.close()
    assert daemon.end(signal.SIGTERM) == 0


def test_what_is_imported_counts_into_quotas(home: Path, daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    store(tiers, prompt(6, salt="alice"))
    file = home / "all.kva"
    says(daemon, "export", str(file))
    says(daemon, "purge", "--all")
    says(daemon, "quota", "alice", "8KiB")
    says(daemon, "import", str(file))
    assert json.loads(says(daemon, "quota", "--json"))["quotas"][0]["used"] == {MODEL: 8192}


def test_an_export_nobody_waits_for_leaves_nothing(home: Path, daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    chain, other, file = prompt(32), prompt(4, 500), home / "x.kva"
    for each in (chain, other):
        store(tiers, each)
    claim, promised = ask(tiers, chain)
    assert promised == 32  # half of L2: all that waiting requests may hold, so an export waits its turn
    body = {"file": str(file), "hashes": [name.hex() for name in other.hashes]}
    export = f"http://{daemon.http}/admin/export"
    with httpx2.stream("POST", export, json=body, timeout=60, headers=daemon.operator) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert file.with_name("x.kva.part").exists()
        busy = post(daemon, "import", file=str(home / "y.kva"))
        assert (busy.status_code, busy.json()["error"]) == (
            503,
            "an export or import is under way already; wait for its end",
        )
    wait_until(lambda: not file.with_name("x.kva.part").exists())
    assert not file.exists()
    tiers.cancel(claim)
    assert load(tiers, chain) == 32
    assert says(daemon, "export", str(file)).startswith("exported 36 of 36 blocks")


def test_lookups_are_recorded(home: Path, daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    chain, file = prompt(4), home / "trace.jsonl"
    body, url = {"file": file.name}, f"http://{daemon.http}/admin/trace"
    with httpx2.stream("POST", url, json=body, timeout=60, headers=daemon.operator) as recording:
        lines = recording.iter_lines()
        next(lines)
        second = post(daemon, "trace", file=str(home / "other.jsonl"))
        assert second.status_code == 503
        assert "is being recorded already" in second.json()["error"]
        where(tiers, chain)
        store(tiers, chain)
        load(tiers, chain)
        where(tiers, prompt(2))
        while json.loads(next(lines))["recorded"] < 2:
            pass
    wait_until(lambda: len(list(read_trace(file))) >= 2)
    requests = list(read_trace(file))
    assert requests[0].input_length == 16
    assert requests[0].hash_ids == (0, 1, 2, 3)
    assert requests[-1].hash_ids == (0, 1)  # the same blocks, the same numbers
    # Its end leaves room for another, but not for two that come at once.
    wait_until(lambda: post(daemon, "trace", file="again.jsonl", duration=1).status_code == 200)
    with ThreadPoolExecutor(4) as clients:
        files = [{"file": f"{number}.jsonl", "duration": 2} for number in range(4)]
        assert sorted(each.status_code for each in clients.map(lambda one: post(daemon, "trace", **one), files)) == [
            200,
            503,
            503,
            503,
        ]
    shown = says(daemon, "trace", str(home / "third.jsonl"), "--duration", "1s")
    assert shown.startswith("recorded 0 lookups, 0 dropped, 0 bytes in ")


# looking


def test_status_by_command(daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    store(tiers, prompt(4))
    shown = says(daemon, "status")
    assert f"model {MODEL}" in shown
    assert "read closed, write closed" in shown
    assert json.loads(says(daemon, "status", "--json"))["models"][0]["l2"]["ready"] == 4


def test_top_is_a_line_a_look(daemon: DaemonProcess, tiers: RemoteTiers) -> None:
    lines = says(daemon, "top", "--interval", "50ms", "--count", "3").splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["clients", "leased", "used"]
    assert lines[1].split()[0] == "1"
    assert lines[1].split()[-1] == "ok"
    rows = [
        json.loads(line) for line in says(daemon, "top", "--interval", "50ms", "--count", "2", "--json").splitlines()
    ]
    assert [row["clients"] for row in rows] == [1, 1]
    assert list(rows[0]) == lines[0].split()
    figures = [row[name] for row in rows for name in row if name not in ("hits", "million", "state")]
    assert [type(each) in (int, float) for each in figures] == [True] * len(figures)  # no text to take apart
    assert [(row["hits"], row["million"], row["state"]) for row in rows] == [(None, None, "ok")] * 2


def part_of(kind: Any, **fields: Any) -> Any:
    """A status of which only these fields are looked at."""
    return kind.model_construct(**fields)


def test_a_row_is_what_changed() -> None:
    def look(hits: int, misses: int, read: int) -> DaemonStatus:
        l2 = part_of(statuses.HostTierStatus, bytes=100, ready_bytes=25, leased=3)
        lookups = {"l1": 0, "l2": hits, "file": 0, "peers": 0, "redis": 0, "objects": 0, "miss": misses}
        moved = {"file": {"read": read}}
        model = part_of(statuses.ModelStatus, l2=l2, lookups=lookups, stored={"l2": 10}, dropped={}, moved=moved)
        clients = [part_of(statuses.ClientStatus, connected=here) for here in (True, False)]
        status: DaemonStatus = part_of(DaemonStatus, models=[model], clients=clients, status="ok")
        return status

    row = daemon_row(look(10, 10, 0), look(40, 20, 4_000_000), 2.0)
    values = {name: value for name, (value, _) in row.items()}
    assert (values["clients"], values["leased"], values["used"]) == (1, 3, 0.25)
    assert (values["lookups"], values["hits"]) == (20.0, 0.75)
    assert (values["stored"], values["read"]) == (0.0, 2e6)
    shown = [column.text(value) for value, column in (row[name] for name in ("used", "lookups", "hits", "read"))]
    assert shown == ["25.0%", "20", "75.0%", "2 MB/s"]
    # A model that was closed takes its counters along: that is no share.
    gone = daemon_row(look(40, 20, 9), look(0, 0, 0), 1.0)
    share, column = gone["hits"]
    assert (share, column.text(share)) == (None, "-")
    assert hit_share({"l2": 1, "miss": 3}) == 0.25


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["status", "--socket", "/s"], '--socket "/s": only engines use it; give --http HOST:PORT'),
        (["status", "--http", "nowhere"], '--http "nowhere": not HOST:PORT; write it as in 127.0.0.1:9400'),
        (
            ["top", "--interval", "soon"],
            '--interval "soon": not a time; write seconds, or a number with a unit, as in "50ms"',
        ),
        (["quota", "alice"], 'quota "alice": give a size, as in 4GiB, or --remove'),
        (["quota", "alice", "4XB"], 'SIZE "4XB": no unit'),
        (["purge"], "purge: select what is to be removed, by --blocks FILE, --text FILE, --model FINGERPRINT or --all"),
        (
            ["pin", "--blocks", "/nowhere"],
            '--blocks "/nowhere": No such file or directory; name a file that can be read',
        ),
        (["pin", "--blocks", "-"], '--blocks "-": not JSON'),
        (["pin", "--text", "-"], '--text "-": it takes the model\'s tokenizer; name its folder by --tokenizer'),
        (["pin", "--blocks", "-", "--tokenizer", "/m"], '--tokenizer "/m": it cuts --text, which is not given; '),
        (["purge", "--all", "--blocks", "-"], "purge --all: it removes every block; leave it out, or --blocks, "),
        (["purge", "--text", "-", "--blocks", "-"], '--text "-": --blocks names the prompt, too; give one of them'),
        (["status", "--url", "localhost:1"], '--url "localhost:1": not a URL; write it as in http://127.0.0.1:8000'),
        (["export", "/f", "--text", "-", "--tokenizer", "/no"], '--tokenizer "/no": tokenizer.json is not one: '),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], mistake: str) -> None:
    ended = kvtier(*arguments, stdin="[1,")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"kvtier: {mistake}")
    assert ended.stderr.count("\n") == 1


def test_what_is_no_text_or_too_long_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("explain", "--text", "-", "--url", "http://127.0.0.1:9")
    ended = kvtier(*asked, stdin="\udcff")  # the byte ff, as it comes in without a locale
    assert (ended.returncode, ended.stderr) == (2, 'kvtier: --text "-": not UTF-8 text; name a file of text\n')
    for arguments, field in ((("pin",), "tokens [NaN]"), (("purge", "--cache-salt", "\udcff"), 'cache_salt "\\udcff"')):
        ended = kvtier(*arguments, "--blocks", "-", stdin="[NaN]" if "pin" in arguments else "[1]")
        told = f"kvtier: {field}: neither UTF-8 text nor a number; give another\n"
        assert (ended.returncode, ended.stderr) == (2, told)
    monkeypatch.setattr(admin_cli, "_MAX_INPUT", 3)
    ended = kvtier(*asked, stdin="long")
    assert (ended.returncode, ended.stderr) == (2, 'kvtier: --text "-": longer than 3 characters; name one prompt\n')
