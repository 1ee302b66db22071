"""The configuration: what it reads, in which order, and one line for every way to get it wrong (FAULTS 38)."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtier.tiers.config.config import Config, options
from kvtier.tiers.config.environment import engine_variables
from kvtier.tiers.config.quantities import format_size, format_time, parse_size, parse_time
from kvtier.tiers.errors import ConfigError


def toml(directory: Path, text: str) -> Path:
    path = directory / "kvtier.toml"
    path.write_text(text)
    return path


def test_arguments_win_over_environment_wins_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toml(tmp_path, '[host]\nsize = "2GiB"\nshared = true\n[cache]\nadmit_after = 2\nepoch = 7')
    monkeypatch.setenv("KVTIER_HOST__SIZE", "3GiB")
    monkeypatch.setenv("KVTIER_CACHE__ADMIT_AFTER", "3")

    config = Config.load(path, cache={"admit_after": 4})

    assert config.cache.admit_after == 4  # the argument
    assert config.host.size == 3 << 30  # the variable
    assert config.host.shared is True  # the file, beside a variable of the same section
    assert config.cache.epoch == 7
    assert config.l1 == Config().l1  # untouched sections keep their defaults


def test_what_is_stored_of_answers_and_lists_of_lines_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHAT__DROP_LINES", "billing x-trace")
    for said, kept in (("answers", "answers"), ("True", True), ("off", False)):
        monkeypatch.setenv("KVTIER_CACHE__STORE_GENERATED", said)
        config = Config.load(None)
        assert (config.cache.store_generated, config.chat.drop_lines) == (kept, ("billing", "x-trace"))


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_HOST__SIZE", "3GiB")
    assert Config().host.size == 1 << 30


def test_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.host.size = 1  # pyrefly: ignore[read-only]
    with pytest.raises(ValidationError):
        config.host = Config().host


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(
            ("4GiB", 4 << 30),
            ("4gib", 4 << 30),
            ("4G", 4 << 30),
            ("4g", 4 << 30),
            ("4GB", 4 * 10**9),
            ("4gb", 4 * 10**9),
        ),
        *(("1.5 MiB", 3 << 19), ("512", 512), (512, 512), ("1PiB", 1 << 50)),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_a_size_without_its_unit_is_asked_about() -> None:
    for section in ("host", "file", "l1"):
        with pytest.raises(ConfigError) as caught:
            Config.of({section: {"size": 5}})
        why = '5 bytes are less than a block of any model; did you mean "5GiB"?'
        assert str(caught.value) == f"[{section}] size 5: {why}"


def test_a_variable_names_the_file_and_an_argument_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toml(tmp_path, "[cache]\nepoch = 7")
    monkeypatch.setenv("KVTIER_CONFIG", str(path))
    assert Config.load().cache.epoch == 7

    other = tmp_path / "other.toml"
    other.write_text("[cache]\nepoch = 8")
    assert Config.load(other).cache.epoch == 8

    monkeypatch.setenv("KVTIER_CONFIG", "/nowhere.toml")
    with pytest.raises(ConfigError) as caught:
        Config.load()
    assert (
        str(caught.value)
        == 'KVTIER_CONFIG "/nowhere.toml": No such file or directory; name a TOML file that can be read'
    )


def test_a_library_takes_a_config_a_mapping_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CACHE__EPOCH", "3")
    given = Config.load(cache={"epoch": 9})

    assert Config.of(given) is given
    assert Config.of(None).cache.epoch == 3
    assert Config.of({"cache": {"epoch": 4}}).cache.epoch == 4
    assert Config.of(toml(tmp_path, "[host]\nsize = '2GiB'")).host.size == 2 << 30

    for wrong, line in (
        (5, "config 5: not a configuration; give a Config, the name of a TOML file, or a mapping as in "),
        ({"hots": {"size": 1}}, "[hots]: unknown section; did you mean [host]?"),
        ({"host": 3}, "[host] 3: not a section; write [host] with options under it"),
        ({5: {"size": 1}}, "[5]: unknown section"),
    ):
        with pytest.raises(ConfigError) as caught:
            Config.of(wrong)  # type: ignore[arg-type]
        assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50ms", 0.05), ("2s", 2.0), ("1.5", 1.5), (3, 3.0), ("10us", 1e-5), ("2min", 120.0), ("24h", 86400.0)],
)
def test_times(text: object, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)
    assert parse_time(format_time(seconds)) == pytest.approx(seconds)


def test_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert Config.load(file={"path": "~/kv"}).file.path == Path("/home/ada/kv")


def test_dynamos_switch_makes_events_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Config.load().events.strict
    monkeypatch.setenv("DYN_KV_ENFORCE_ENGINE_HASH_STABILITY", "1")
    assert Config.load().events.strict
    monkeypatch.setenv("KVTIER_EVENTS__STRICT", "false")  # ours is the more precise word
    assert not Config.load().events.strict


# Every bad value: section and options given, and the whole line the user sees.
BAD_VALUES: list[tuple[Mapping[str, object], str]] = [
    # wrong type
    ({"host": {"size": True}}, '[host] size true: not a size; write a number of bytes, or a text such as "4GiB"'),
    ({"host": {"size": [1]}}, '[host] size [1]: not a size; write a number of bytes, or a text such as "4GiB"'),
    ({"host": {"pin": "maybe"}}, '[host] pin "maybe": not a yes or no; write true or false'),
    ({"host": {"pin": 2}}, "[host] pin 2: not a yes or no; write true or false"),
    ({"host": {"pin": []}}, "[host] pin []: not a yes or no; write true or false"),
    ({"cache": {"block_size": "x"}}, '[cache] block_size "x": not a whole number; write one, as in 16'),
    ({"cache": {"block_size": True}}, "[cache] block_size true: not a whole number; write one, as in 16"),
    ({"cache": {"block_size": 1.5}}, "[cache] block_size 1.5: not a whole number; write one, as in 16"),
    ({"cache": {"block_size": None}}, "[cache] block_size null: not a whole number; write one, as in 16"),
    ({"cache": {"policy": "lfu"}}, "[cache] policy \"lfu\": not one of its values; write 'predicted', 'lru' or 's3fifo'"),
    ({"cache": {"hash": 5}}, "[cache] hash 5: not one of its values; write 'sha256' or 'xxh3'"),
    ({"cache": {"cache_salt": ""}}, '[cache] cache_salt "": not a text of one character or more; leave the option out for none'),
    ({"file": {"path": 3}}, "[file] path 3: not a directory's name; write one, or leave the option out to switch the tier off"),
    ({"file": {"deadline": "soon"}}, '[file] deadline "soon": not a time; write seconds, or a number with a unit, as in "50ms"'),
    ({"redis": {"ttl": "7hd"}}, "[redis] ttl \"7hd\": no unit 'hd'; use one of d"),
    ({"file": {"deadline": float("nan")}}, '[file] deadline NaN: not a time; write seconds, or a text such as "50ms"'),
    ({"host": 3}, "[host] 3: not a section; write [host] with options under it"),
    # unknown unit
    ({"host": {"size": "16XB"}}, "[host] size \"16XB\": no unit 'XB'; use one of B, KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB, PB"),
    ({"file": {"deadline": "2m"}}, "[file] deadline \"2m\": no unit 'm'; use one of us, ms, s, min, h"),
    # zero, negative
    ({"host": {"size": 0}}, "[host] size 0: outside 1 byte to 1PiB; choose a size in that range"),
    ({"host": {"size": -1}}, "[host] size -1: outside 1 byte to 1PiB; choose a size in that range"),
    ({"host": {"size": "-1GiB"}}, '[host] size "-1GiB": not a size; write a number of bytes, or one with a unit, as in "4GiB"'),
    ({"file": {"deadline": 0}}, "[file] deadline 0: outside 0 to 24h; choose a time in that range"),
    ({"cache": {"block_size": 0}}, "[cache] block_size 0: too small; write 1 or more"),
    ({"cache": {"epoch": -1}}, "[cache] epoch -1: too small; write 0 or more"),
    ({"l1": {"num_blocks": 0}}, "[l1] num_blocks 0: too small; write 1 or more"),
    ({"breaker": {"failures": 0}}, "[breaker] failures 0: too small; write 1 or more"),
    # huge
    ({"host": {"size": "2PiB"}}, '[host] size "2PiB": outside 1 byte to 1PiB; choose a size in that range'),
    ({"host": {"size": 10**30}}, f"[host] size {10**30}: outside 1 byte to 1PiB; choose a size in that range"),
    ({"cache": {"block_size": 10**9}}, "[cache] block_size 1000000000: too large; write 4096 or less"),
    ({"l1": {"num_blocks": 2**31}}, "[l1] num_blocks 2147483648: too large; write less than 2147483648"),
    ({"breaker": {"retry_after": "25h"}}, '[breaker] retry_after "25h": outside 0 to 24h; choose a time in that range'),
    # unknown names, nearest match
    ({"host": {"sise": "1GiB"}}, '[host] sise "1GiB": unknown option; did you mean size?'),
    ({"cache": {"num_blocks": 3}}, "[cache] num_blocks 3: unknown option; did you mean [l1] num_blocks?"),
    ({"breaker": {"xyz": 3}}, "[breaker] xyz 3: unknown option; known are failures, retry_after"),
    ({"hots": {"size": 1}}, "[hots]: unknown section; did you mean [host]?"),
    (
        {"router": {"replicas": [1]}},
        '[router] replicas [1]: not a list of replicas; write one, as in ["http://127.0.0.1:8000"]',
    ),
    ({"router": {"weight_cpu": "much"}}, '[router] weight_cpu "much": not a number; write one, as in 0.5'),
    ({"cache": {"store_generated": "some"}}, '[cache] store_generated "some": not true, false or answers; write one of the three'),
    ({"chat": {"drop_lines": [" "]}}, '[chat] drop_lines [" "]: not a list of how lines begin; write one, as in ["billing", "Session id:"]'),
    ({"zzz": {}}, "[zzz]: unknown section; known are breaker, cache, chat, events, file, host, l1, log, objects, peers, redis, router, server, service, tracing"),
    ({"block_size": 16}, "block_size 16: belongs in a section; write it as [cache] block_size"),
    ({"zzz": 16}, "zzz 16: belongs in a section; the sections are host, file, cache, chat, l1, peers, redis, objects, service, server, events, router, breaker, tracing, log"),
    # addresses of HTTP
    ({"service": {"http": "HOST:99999"}}, '[service] http "HOST:99999": its port is out of range; write one up to 65535'),
    ({"service": {"http": "[::1:9"}}, '[service] http "[::1:9": not HOST:PORT; write it as in 127.0.0.1:9400'),
    ({"service": {"http": "9400"}}, '[service] http "9400": not HOST:PORT; write it as in 127.0.0.1:9400'),
    # addresses of KV events
    ({"events": {"publish": "127.0.0.1:5557"}}, '[events] publish "127.0.0.1:5557": not an address of ZMQ\'s; write it as in ipc:///run/kvtier/events or tcp://127.0.0.1:5557'),
    ({"events": {"publish": "tcp://*:5557"}}, '[events] publish "tcp://*:5557": other machines reach it; use 127.0.0.1 or set allow_remote'),
    ({"events": {"replay": "ipc:///x"}}, '[events] replay "ipc:///x": nothing is published; set publish too'),
    ({"events": {"topic": "t" * 256}}, f"[events] topic \"{'t' * 56}…: not a text of at most 255 bytes; leave the option out for the models' own"),
    # clash
    ({"l1": {"size": "1GiB", "num_blocks": 3}}, "[l1] num_blocks 3: size 1GiB is given too; remove one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "line"), BAD_VALUES, ids=[line.split(":")[0] for _, line in BAD_VALUES])
def test_bad_value_is_one_line_with_the_fix(given: dict[str, Mapping[str, object]], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(None, **given)
    assert str(caught.value) == line


def test_long_and_many_line_values_stay_on_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(file={"mode": "direct\n" * 100})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_option_of_two_places_clashes_too(tmp_path: Path) -> None:
    path = toml(tmp_path, '[l1]\nsize = "1GiB"')
    with pytest.raises(ConfigError, match="num_blocks 5: size 1GiB is given too; remove one of them"):
        Config.load(path, l1={"num_blocks": 5})


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("KVTIER_HOST__SISE", "1GiB", 'KVTIER_HOST__SISE "1GiB": unknown variable; did you mean KVTIER_HOST__SIZE?'),
        ("KVTIER_HOST_SIZE", "1GiB", 'KVTIER_HOST_SIZE "1GiB": unknown variable; did you mean KVTIER_HOST__SIZE?'),
        ("KVTIER_HOST", "{}", 'KVTIER_HOST "{}": unknown variable; did you mean'),
        ("KVTIER_HOST__SIZE", "lots", '[host] size "lots": not a size; write'),
        ("KVTIER_HOST__PIN", "perhaps", '[host] pin "perhaps": not a yes or no; write true or false'),
        ("KVTIER_CACHE__BLOCK_SIZE", "", '[cache] block_size "": not a whole number; write one, as in 16'),
    ],
)
def test_bad_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        Config.load()
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ('["a:1", "b:2"]', ("a:1", "b:2")),
        (' [ "a:1" ] ', ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("a:1, b:2", ("a:1", "b:2")),
        ("a:1 b:2\n", ("a:1", "b:2")),
        ("", ()),
    ],
)
def test_a_list_in_a_variable(monkeypatch: pytest.MonkeyPatch, value: str, nodes: tuple[str, ...]) -> None:
    monkeypatch.setenv("KVTIER_PEERS__NODES", value)
    monkeypatch.setenv("KVTIER_PEERS__KEY_FILE", "/key")
    assert Config.load().peers.nodes == nodes
    monkeypatch.setenv("KVTIER_ROUTER__REPLICAS", "http://a:1,block_size=16 http://b:1")  # a replica has commas itself
    assert Config.load().router.replicas == ("http://a:1,block_size=16", "http://b:1")
    monkeypatch.setenv("KVTIER_ROUTER__REPLICAS", '["http://a:1"]')
    assert Config.load().router.replicas == ("http://a:1",)


@pytest.mark.parametrize("value", ['["a:1"', "[1]", '["a:1", ["b:2"]]', "[" * 9999])
def test_what_begins_like_json_and_is_no_list_is_one_line(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KVTIER_PEERS__NODES", value)
    with pytest.raises(ConfigError, match=r'not a list of HOST:PORT; write one, as in \["node-b:9402"\]'):
        Config.load()


@pytest.mark.parametrize("value", ["\udcff", "\udcff:9402", "ipc:///\udcff", ["\udcff"]])
def test_bytes_that_are_no_text_are_one_line_that_can_be_printed(value: object) -> None:
    for section, option, field in options():
        if "Path" not in str(field.annotation):
            with pytest.raises(ConfigError, match=rf"^\[{section}\] {option} .*: not UTF-8; write it anew$") as caught:
                Config.load(None, **{section: {option: value}})
            assert str(caught.value).encode()


def test_a_path_may_be_any_bytes() -> None:
    assert Config.load(file={"path": "/kv/\udcff"}).file.path == Path("/kv/\udcff")


def test_every_option_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_HOST__HUGE_PAGES", "off")
    monkeypatch.setenv("KVTIER_FILE__PATH", "/kv")
    monkeypatch.setenv("kvtier_file__deadline", "50ms")  # case does not matter
    monkeypatch.setenv("KVTIER_L1__NUM_BLOCKS", "64")
    monkeypatch.setenv("KVTIER_CACHE__CACHE_SALT", "12")
    config = Config.load()
    assert config.host.huge_pages is False
    assert config.file.path == Path("/kv")
    assert config.file.deadline == 0.05
    assert config.l1.num_blocks == 64
    assert config.cache.cache_salt == "12"  # a text, whatever it looks like


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; name a TOML file"):
        Config.load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="Is a directory; name a TOML file"):
        Config.load(tmp_path)
    with pytest.raises(ConfigError, match=r"not TOML, .*line 1.*; fix that line"):
        Config.load(toml(tmp_path, "[host\nsize"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        Config.load(tmp_path / "bytes.toml")
    with pytest.raises(ConfigError, match=r"\[host\] sise 3: unknown option; did you mean size"):
        Config.load(toml(tmp_path, "[host]\nsise = 3"))


def test_what_is_shown_can_be_read_back(tmp_path: Path) -> None:
    config = Config.load(
        host={"size": "1536MiB"}, file={"path": tmp_path, "deadline": "5ms"}, cache={"policy": "s3fifo"}
    )
    shown = {
        section: {
            name: value for name, value in values.items() if value is not None and (section, name) != ("l1", "size")
        }
        for section, values in config.model_dump(mode="json").items()
    }
    assert shown["host"]["size"] == "1536MiB"
    assert Config.load(None, **shown) == config


def test_a_policys_earlier_name_is_accepted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert Config.load(cache={"policy": "tail"}).cache.policy == "predicted"
    assert caplog.messages == [
        '[cache] policy "tail" is called "predicted" now; write that: the old name goes with release 0.3'
    ]


def test_variables_of_an_engine_that_change_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a name is what quantises or simulates; VLLM_NO_USAGE_STATS and the like are not."""
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "SGLANG_FP8_IGNORED_LAYERS", "VLLM_MARLIN_INPUT_DTYPE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SGLANG_USE_SAGE_ATTENTION_IMPL", "a")
    assert "USAGE" not in engine_variables("VLLM_")
    assert engine_variables("VLLM_").split() == ["VLLM_MARLIN_INPUT_DTYPE=1"]
    assert engine_variables("SGLANG_").split() == ["SGLANG_FP8_IGNORED_LAYERS=1", "SGLANG_USE_SAGE_ATTENTION_IMPL=a"]
