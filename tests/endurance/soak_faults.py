"""The faults of the soak: what is done to a node's processes, its slab, its Redis and its connections."""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from node_members import NodeUnderTest

_CLIENT: Final = Path(__file__).with_name("block_client.py")
_DRIPS: Final = 20  # connections that never get to the end of their request
_KILLED_LATE: Final = ("engine-b",)  # killed all the time; the others live long enough for growth to show

Fault = Callable[[NodeUnderTest, random.Random], None]


def kill(node: NodeUnderTest, dice: random.Random) -> None:
    """kill -9; the reviver starts it again."""
    node.members[dice.choice(list(node.members))].kill()


def kill_engine(node: NodeUnderTest, dice: random.Random) -> None:
    """One engine, whose prompts are then only below L1."""
    node.members[dice.choice(_KILLED_LATE)].kill()


def kill_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """And start it again, empty, after a while."""
    node.redis.kill()
    time.sleep(dice.uniform(0.2, 3))
    node.redis.start()


def freeze(node: NodeUnderTest, dice: random.Random) -> None:
    """One process is there, and says nothing, for a while."""
    member = node.members[dice.choice(list(node.members))]
    seconds = dice.uniform(0.1, 3)
    member.signal(signal.SIGSTOP)
    time.sleep(seconds)
    member.signal(signal.SIGCONT)


def freeze_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """The kernel still accepts its connections."""
    with node.redis.frozen():
        time.sleep(dice.uniform(0.1, 3))


def pause_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """CLIENT PAUSE: commands wait."""
    node.redis.cli("CLIENT", "PAUSE", str(dice.randrange(100, 3000)), "ALL")


def hang_up_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """Its connections are broken by itself."""
    node.redis.cli("CLIENT", "KILL", "TYPE", "normal")


def forget_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """FLUSHALL, sometimes in the background."""
    node.redis.cli("FLUSHALL", dice.choice(["SYNC", "ASYNC"]))


def fill_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """It refuses to store anything for a while."""
    node.redis.cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
    node.redis.cli("CONFIG", "SET", "maxmemory", "1mb")
    time.sleep(dice.uniform(0.5, 3))
    node.redis.cli("CONFIG", "SET", "maxmemory", "48mb")
    node.redis.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")


def corrupt_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """Values changed, cut short, made longer, exchanged, or of another type."""
    keys = [key for _ in range(12) if len(key := node.redis.cli("RANDOMKEY").decode()) > 64]
    for key in keys:
        what = dice.randrange(5)
        with suppress(RuntimeError):  # the key has just been evicted
            if what == 0:
                node.redis.cli("SETRANGE", key, str(dice.randrange(12_000)), "otherwise")
            elif what == 1:
                node.redis.cli("SET", key, "short")
            elif what == 2:
                node.redis.cli("APPEND", key, "and more")
            elif what == 3:
                node.redis.cli("COPY", keys[0], key, "REPLACE")
            else:
                node.redis.cli("DEL", key)
                node.redis.cli("RPUSH", key, "a", "list")


def cut_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """Its connections end now, or in the middle of an answer or of a request."""
    how = dice.choice(["reset", "close"])
    if dice.random() < 0.5:
        node.line_to_redis.cut("reset" if how == "reset" else "close")
    else:
        node.line_to_redis.cut_after(dice.randrange(20_000), "reset" if how == "reset" else "close",
                                     asked=dice.random() < 0.5)  # fmt: skip


def mute_redis(node: NodeUnderTest, dice: random.Random) -> None:
    """No answer arrives for a while; or each arrives late, or in pieces, or forged."""
    line, what = node.line_to_redis, dice.randrange(4)
    if what == 0:
        line.mute()
    elif what == 1:
        line.latency = dice.uniform(0.01, 0.5)
    elif what == 2:
        line.piece, line.rate = dice.choice([1, 7, 100]), 200_000
    else:
        line.forge(dice.choice([b"$-1\r\n", b"-ERR no\r\n", b"*2\r\n", b"garbage\r\n", b":1\r\n", b"$999999999\r\n"]))
    time.sleep(dice.uniform(0.2, 3))
    line.heal()


def cut_engine(node: NodeUnderTest, dice: random.Random) -> None:
    """What the router has open to one engine ends, in the middle of streams too."""
    if dice.random() < 0.5:
        node.line_to_engine.cut()
    else:
        node.line_to_engine.cut_after(dice.randrange(5_000))
    if dice.random() < 0.3:
        node.line_to_engine.refusing = True
        time.sleep(dice.uniform(0.2, 2))
    node.line_to_engine.heal()


def flip_bits(node: NodeUnderTest, dice: random.Random) -> None:
    """Bits of the slab, anywhere but in its superblock."""
    for slab in _slabs(node):
        with slab.open("r+b") as file:
            for _ in range(20):
                at = dice.randrange(4096, max(4097, slab.stat().st_size))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([(byte or b"\0")[0] ^ 1 << dice.randrange(8)]))


def cut_slab(node: NodeUnderTest, dice: random.Random) -> None:
    """The slab is cut short under its owner and comes back, with zeros where blocks were."""
    for slab in _slabs(node):
        size = slab.stat().st_size
        os.truncate(slab, dice.randrange(4096, size))
        time.sleep(dice.uniform(0.2, 2))
        os.truncate(slab, size)


def limit_files(node: NodeUnderTest, dice: random.Random) -> None:
    """The daemon may write no byte past a point: what a full disk or a quota is to it."""
    pid = node.members["daemon"].pid
    if pid is not None:
        with suppress(ProcessLookupError):
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (dice.choice([4096, 100_000]), hard))
            time.sleep(dice.uniform(0.5, 3))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def kill_client(node: NodeUnderTest, dice: random.Random) -> None:
    """A client of the daemon's is killed with a lease and filling slots in its hands."""
    command = [sys.executable, str(_CLIENT), str(node.socket), *node.model.arguments, str(dice.randrange(1000))]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(dice.uniform(1, 5))  # it may not have got so far
    child.kill()
    child.wait(60)


def drip(node: NodeUnderTest, dice: random.Random) -> None:
    """Clients of a process's HTTP that send their requests byte by byte, and hang up."""
    name = dice.choice(list(node.members))
    host, _, port = node.url(name).removeprefix("http://").rpartition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with ExitStack() as stack, suppress(OSError):
        lines = [stack.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(_DRIPS)]
        for at in range(dice.randrange(8, len(head))):
            for line in lines:
                line.send(head[at : at + 1])
            time.sleep(0.03)


def _slabs(node: NodeUnderTest) -> list[Path]:
    with suppress(OSError):
        return [path for path in node.slabs.rglob("*") if path.is_file() and path.stat().st_size > 8192]
    return []


EARLY: Final[tuple[Fault, ...]] = (kill, kill)
"""Only in the first third of a run: what is left of it shows how processes grow that live long."""
ALWAYS: Final[tuple[Fault, ...]] = (
    kill_engine, kill_redis, freeze, freeze_redis, pause_redis, hang_up_redis, forget_redis, fill_redis, corrupt_redis,
    corrupt_redis, cut_redis, mute_redis, cut_engine, flip_bits, flip_bits, cut_slab, limit_files, kill_client, drip,
)  # fmt: skip
