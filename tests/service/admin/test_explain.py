"""`kvtier explain`: which tier has a prompt's blocks, why none has the next one, and never a word of a stranger."""

import json
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from command_rig import kvtier
from doubles import SLOT_BYTES, chain_over, hierarchy_of
from doubles import store as store_here
from router_rig import RawReplica
from service_rig import FINGERPRINT, DaemonProcess, attach, store, where

from kvtier.service.explain.lines import changing_part, explained
from kvtier.service.node.namespaces import BlockDimensions, Namespace
from kvtier.service.node.operators import BlockSelection, explain
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.service.web import http_client
from kvtier.tiers.file.about import record_model
from kvtier.tiers.hierarchy.cache_tiers import Attribution
from kvtier.tiers.hierarchy.hierarchy import Hierarchy

BLOCK = 4  # tokens
chain = partial(chain_over, fingerprint=FINGERPRINT)
SECRET = 777_777  # a token that only another tenant's prompt has


@pytest.fixture
def daemon(home: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(home / "s", host__size="1MiB")
    yield process
    assert process.end(signal.SIGTERM) == 0


def says(daemon: DaemonProcess, tokens: Sequence[int], *arguments: str) -> list[str]:
    ended = kvtier("explain", "--blocks", "-", "--http", daemon.http, *arguments, stdin=json.dumps(list(tokens)))
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout.splitlines()


def test_each_cause_has_its_line(home: Path, daemon: DaemonProcess) -> None:
    tiers = attach(home / "s", size=32 * SLOT_BYTES)
    tokens = list(range(24))
    store(tiers, chain(tokens))
    assert where(tiers, chain(tokens))["l2"] == 6
    assert says(daemon, tokens) == [
        "blocks 0-5 (tokens 0-23): host memory",
        "Every whole block is held: nothing to do.",
    ]
    # what changes near the head of the prompt: the held sibling says where
    changed = [*tokens[:9], 5001, *tokens[10:]]
    lines = says(daemon, changed)
    assert lines[:3] == [
        "blocks 0-1 (tokens 0-7): host memory",
        "blocks 2-5 (tokens 8-23): nowhere",
        "block 2 is missing: it was never stored here, or left too long ago",
    ]
    assert lines[3].startswith("differs at token 9: `[5001, 10, 11]` for `[9, 10, 11]`")
    assert "end of the prompt" in lines[-1]
    # an operator removed the tail
    removed = kvtier("purge", "--blocks", "-", "--http", daemon.http, stdin=json.dumps([chain(tokens).hashes[5].hex()]))
    assert removed.returncode == 0
    assert "block 5 is missing: an operator removed it from host memory" in "\n".join(says(daemon, tokens))
    # others need the room
    other = chain(range(10_000, 10_000 + 32 * BLOCK))
    store(tiers, other)
    assert where(tiers, other)["l2"] == 32
    lines = says(daemon, tokens)
    assert lines[0] == "blocks 0-5 (tokens 0-23): nowhere"
    assert lines[1].startswith("block 0 is missing: it was evicted from host memory ")
    found = json.loads("\n".join(says(daemon, tokens, "--json")))
    assert (found["blocks"], found["held"], found["cause"]["name"], found["cause"]["tier"]) == (6, 0, "evicted", "l2")
    tiers.close()


def opened(fingerprint: bytes = FINGERPRINT) -> Namespace:
    """A model as the daemon has it open, without the daemon."""
    hierarchy = hierarchy_of(slots=32)
    tiers = ServedTiers(hierarchy, fingerprint)
    return Namespace(fingerprint, BlockDimensions(BLOCK, SLOT_BYTES), 32 * SLOT_BYTES, tiers, None)


def test_another_model_that_holds_the_prompt_is_named() -> None:
    one, two = opened(), opened(b"another model".ljust(32, b"."))
    store_here(two.hierarchy, chain_over(range(16), fingerprint=two.fingerprint))
    answer = explain(one, [two], BlockSelection((), list(range(16)), None), 1.0)
    row = {"model": two.fingerprint.hex()[:16], "blocks": 4, "block_size": 4, "fields": []}
    assert answer["elsewhere"] == [row]
    lines = list(explained(answer))
    assert f"another model holds the same tokens: {two.fingerprint.hex()[:16]}, 4 blocks of 4 tokens" in lines
    assert lines[-1].startswith("Another fingerprint (model, dtype or layout) stored this prompt")
    # under that model's own name everything is there
    assert list(explained(explain(two, [one], BlockSelection((), list(range(16)), None), 1.0)))[-1].startswith("Every")


def test_a_closed_slab_of_the_same_checkpoint_is_told_field_by_field(tmp_path: Path) -> None:
    own, before, gone = opened(), bytes([1]) * 32, bytes([2]) * 32
    own.about = {"model": "llama", "revision": "sha256:aa", "dtype": "bfloat16", "block_size": "64"}
    renamed = {**own.about, "model": "llama-copy", "dtype": "float16"}  # the weights decide, not what people call them
    for fingerprint, about in ((before, renamed), (gone, own.about)):
        (tmp_path / f"{fingerprint.hex()}.slab").write_bytes(bytes(4096))
        record_model(tmp_path, fingerprint, about)
    (tmp_path / f"{gone.hex()}.slab").unlink()
    stranger = bytes([3]) * 32
    (tmp_path / f"{stranger.hex()}.slab").write_bytes(bytes(4096))
    record_model(tmp_path, stranger, {**own.about, "model": "qwen", "revision": "sha256:bb"})
    torn = tmp_path / f"{(bytes([4]) * 32).hex()}"
    torn.with_suffix(".slab").write_bytes(bytes(4096))
    torn.with_suffix(".about.json").write_text("{")

    answer = explain(own, [], BlockSelection((), list(range(16)), None), 1.0, tmp_path)

    differs = [{"field": "dtype", "here": "bfloat16", "there": "float16"}]
    assert answer["closed"] == [{"model": before.hex()[:16], "bytes": 4096, "fields": differs}]
    lines = list(explained(answer))
    assert f"a closed slab is of the same checkpoint: {before.hex()[:16]}, 4 KiB" in lines
    assert "  dtype: bfloat16 here, float16 there" in lines
    assert sorted(path.name[:2] for path in tmp_path.glob("*.about.json")) == ["01", "03", "04"]
    with pytest.MonkeyPatch.context() as patched:  # a disk that hangs is not looked at
        patched.setattr(Hierarchy, "wanting", {"file": "file: read breaker open"})
        assert explain(own, [], BlockSelection((), list(range(16)), None), 1.0, tmp_path)["closed"] == []
    # what is held, or open under another name, needs no guess
    assert explain(own, [opened(before)], BlockSelection((), list(range(16)), None), 1.0, tmp_path)["closed"] == []
    store_here(own.hierarchy, chain_over(range(16), fingerprint=own.fingerprint))
    assert "closed" not in explain(own, [], BlockSelection((), list(range(16)), None), 1.0, tmp_path)


def test_a_question_about_many_models_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [opened(bytes([number]) * 32) for number in range(20)]
    now = [0.0]

    def silent(self: Hierarchy, hashes: Sequence[bytes], timeout: float) -> Attribution:
        now[0] += timeout  # as a tier that nodes share and that does not answer
        return self.lookup(hashes)

    monkeypatch.setattr(Hierarchy, "locate", silent)
    monkeypatch.setattr("kvtier.service.node.operators.monotonic", lambda: now[0])
    for model in models[1:]:
        store_here(model.hierarchy, chain_over(range(16), fingerprint=model.fingerprint))
    answer = explain(models[0], models[1:], BlockSelection((), list(range(16)), None), 8.0)
    assert now[0] <= 8.0
    assert len(answer["elsewhere"]) == 19  # what is known without that tier is told all the same


def test_a_strangers_prompt_is_never_told() -> None:
    model, other = opened(), opened(b"another model".ljust(32, b"."))
    secret = [*range(8), SECRET, *range(9, 16)]
    store_here(model.hierarchy, chain(secret, salt="anna"))
    asked = [*range(8), 5, *range(9, 16)]
    for salt in (None, "bert", "ann", "anna "):  # whoever is not anna
        for tokens in (asked, secret):
            answer = explain(model, [other], BlockSelection((), tokens, salt), 1.0)
            assert (answer["held"], answer["differs"], answer["elsewhere"]) == (0, None, [])
            if tokens is asked:
                assert str(SECRET) not in json.dumps(answer) + "".join(explained(answer))
    # nor by the names of anna's blocks: names tell no tokens
    names = [*chain(secret, salt="anna").hashes[:2], chain(asked, salt="anna").hashes[2]]
    answer = explain(model, [], BlockSelection(names, (), None), 1.0)
    assert (answer["held"], answer["differs"]) == (2, None)
    # anna is told what is hers
    answer = explain(model, [], BlockSelection((), asked, "anna"), 1.0)
    theirs = [SECRET, 9, 10, 11]
    assert answer["differs"] == {"token": 8, "tokens": [5, 9, 10, 11], "held_tokens": theirs, "same": 0}


def test_a_strangers_first_block_is_never_told_where_one_root_is_everybodys() -> None:
    model = opened()
    extra = {0: [("salt", b"anna")]}  # as under vLLM's own names: the salt is in the first block, not in the root
    store_here(model.hierarchy, chain([SECRET, *range(15)], extra_keys=extra))
    answer = explain(model, [], BlockSelection((), [5, *range(15)], None), 1.0)
    assert (answer["held"], answer["differs"]) == (0, None)


def test_bad_input_names_the_option() -> None:
    for arguments, why in (
        ((), "by one of --blocks FILE, --text FILE and --request ID"),
        (("--text", "prompt.txt"), "name its folder by --tokenizer"),
        (("--blocks", "/nowhere"), '--blocks "/nowhere"'),
        (("--request", "1", "--url", "there:80"), '--url "there:80": not a URL'),
    ):
        ended = kvtier("explain", *arguments, "--http", "127.0.0.1:1")
        assert ended.returncode == 2
        assert why in ended.stderr


def test_the_classic_findings_are_named() -> None:
    assert changing_part("Today is 2026-11-22.", "Today is 2026-11-21.") == (
        "a date or time",
        "2026-11-22",
        "2026-11-21",
    )
    assert changing_part("It is 10:31 now", "It is 10:29 now") == ("a date or time", "10:31", "10:29")
    ids = "123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-4266141740ff"
    assert changing_part(f"Request {ids[0]} of", f"Request {ids[1]} of") == ("a request id", *ids)
    assert changing_part("User: anna.", "User: bert.") == ("a user name", "User: anna.", "User: bert.")
    for kind, mine, theirs in (
        ("a date or time", "Monday, 23 November 2026", "Tuesday, 24 November 2026"),
        ("a date or time", "It is Monday,", "It is Tuesda"),  # the block ends there
        ("a date or time", "2026-11-22T10:00:00.123Z", "2026-11-22T10:00:00.999Z"),
        ("a date or time", "2026/11/22", "2026/11/23"),
        ("a date or time", "2026年11月22日", "2026年11月23日"),
        ("a date or time", "20261122", "20261123"),
        ("a date or time", "1732320000123", "1732320000999"),
        ("a request id", "Request 123e4567-e89b-12d", "Request 903fa2c1-e12b-1"),  # the block ends there
        ("a request id", "Session-ID: abc", "Session-ID: xyz"),
        ("a request id", "chatcmpl-abc123def", "chatcmpl-abc123deg"),
        ("a request id", "01J9ZK8Q2V5N3X7Y1ABCDEFGHJ", "01J9ZK8Q2V5N3X7Y1ABCDEFGHK"),
        ("a user name", "The customer is Anna", "The customer is Bert"),
        ("a user name", "User ID 5", "User ID 6"),
        ("a user name", '{"name": "Anna Schmidt"}', '{"name": "Anna Mueller"}'),
        ("a user name", "Write to anna@example.org", "Write to bert@example.org"),
    ):
        assert (changing_part(mine, theirs) or (None,))[0] == kind, mine
    # what a user wants is not who it is
    for one in ("a cat", "The user wants 3 of them", "The user is hungry", "run tests"):
        assert changing_part(f"{one}.", f"{one[:-3]}dog.") is None
    for head in ("<|im_start|>user\n", "User: "):
        assert changing_part(f"{head}What is this?", f"{head}How are you?") is None
    assert changing_part("equal", "equal") is None
    # tokens are characters here: the date began before the block
    text, held = "Today is 2026-11-22", "Today is 2026-11-21"
    answer = {
        "block_size": 4,
        "runs": [{"first": 0, "blocks": 4, "tier": "l2"}, {"first": 4, "blocks": 1, "tier": None}],
        "cause": {"name": "never_seen", "tier": "", "seconds": 0, "block": 4},
        "differs": {"token": 18, "same": 2, "tokens": [*map(ord, text[16:])], "held_tokens": [*map(ord, held[16:])]},
        "elsewhere": [],
    }
    lines = list(explained(answer, lambda tokens: "".join(map(chr, tokens)), [*map(ord, text)]))
    assert lines[-2] == "differs at token 18: `2026-11-22` for `2026-11-21`"
    assert lines[-1].startswith("A date or time changes there")


def test_what_answers_there_is_no_daemon_or_no_end_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = json.dumps(list(range(8)))

    def never_ends(path: str, headers: dict[str, str]) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n"
        while "drip" in path:
            time.sleep(0.01)
            yield b"a: b\r\n"
        yield b"\r\n{"
        while True:
            time.sleep(0.01)
            yield b" " * (1 if "slow" in path else 10_000)

    other = RawReplica(never_ends)

    def asked(*arguments: str) -> str:
        """The one line of the error."""
        ended = kvtier("explain", "--blocks", "-", *arguments, stdin=prompt)
        assert (ended.returncode, ended.stdout) in ((1, ""), (2, "")), ended
        (line,) = ended.stderr.splitlines()
        return line

    try:
        for at in (("--http", other.name), ("--url", f"http://{other.name}")):
            # an object that is another program's
            assert "no kvtier daemon answers" in (line := asked(*at)) or "no engine and no router of kvtier" in line
        # of another build
        whole = {"block_size": 4, "tokens": 8, "runs": [], "cause": None, "differs": None, "elsewhere": []}
        other.pages["/admin/explain"] = {**whole, "runs": [{"first": "a"}]}
        other.pages["/explain"] = {"lines": [1]}
        assert "answer of another kvtier (KeyError(" in asked("--http", other.name)
        assert "answer of another kvtier (TypeError(" in asked("--url", f"http://{other.name}")
        # an answer that comes in pieces, and never ends: each piece in time
        monkeypatch.setattr(http_client, "_MOST_ANSWER", 100_000)
        assert "more than 100000 bytes; is it kvtier?" in asked("--url", f"http://{other.name}/v1/large")
        monkeypatch.setattr(http_client, "_ANSWER", 0.5)
        assert "no answer within 0.5 s" in asked("--url", f"http://{other.name}/v1/slow")
        # one whose head never ends, line by line; the client's own timeouts begin anew with each
        assert "no answer within 0.5 s" in asked("--url", f"http://{other.name}/v1/drip")
    finally:
        other.close()
    # what is no address
    assert asked("--url", "http://[::1").startswith('kvtier: --url "http://[::1": Invalid port')
