"""A ring of holders, simulated in one process: 10, 100 and 1,000 nodes; and a report and a query over a socket.

Each node has its real client of the ring, its real reports and its real index as an owner; a message is a call of the
other node's index. A node's memory is full of prompts: a system prompt that many nodes hold, and a conversation of its
own. Rounds are seconds of the ring's own time. In each, a node stores new conversations and evicts old ones. Look-ups
are for a conversation of another node, and longer than what that holds. Then a tenth of all nodes dies: at first
everybody asks them, then they are passed over, then they leave the list.
"""

import argparse
import gc
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

import numpy as np
from _report import Given, Result, Row, program, progress
from _rig import resident_bytes, spawned

from kvtier.service.node import HolderIndex, PeerServer
from kvtier.tiers import Outcome
from kvtier.tiers.config import PeersConfig
from kvtier.tiers.peers import (
    AT_ONCE,
    PACE,
    Keys,
    Owners,
    PeerAddress,
    PeerFailed,
    PeerLink,
    Report,
    Ring,
    wire,
)

MODEL: Final = b"ring".ljust(32, b".")
NODES: Final = (10, 100, 1000)
SYSTEM: Final = 32  # blocks of a system prompt; a sixteenth of the nodes' conversations share one
PROMPT: Final = 128  # blocks of a conversation behind it
TURN: Final = 8  # new blocks of the next turn, which nobody holds


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """One node: what it holds, its index as an owner, its client of the ring. Also the connection of all to it."""

    compared_probe: bytes | None = None
    is_myself = False
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, number: int, clock: Clock, draw: np.random.Generator, blocks: int, config: PeersConfig) -> None:
        self.address: PeerAddress = (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 9402)
        self.index = HolderIndex(config.max_blocks, clock)
        listen = "{}:{}".format(*self.address)
        self.owners = Owners(config.model_copy(update={"listen": listen}), MODEL, clock)
        self.draw, self.answers, self.is_dead = draw, True, False
        self.chats = [self.chat() for _ in range(blocks // PROMPT)]
        self.wake = os.eventfd(1)  # a reply is there at once
        self.num_asked = 0

    def chat(self) -> Keys:
        return np.concatenate([SYSTEMS[self.draw.integers(len(SYSTEMS))], keys(self.draw, PROMPT)])

    def turn_over(self, share: float) -> None:
        """Some conversations leave, and as many come: on average so many blocks."""
        for _ in range(self.draw.poisson(share)):
            self.chats[self.draw.integers(len(self.chats))] = self.chat()

    @property
    def held(self) -> Keys:
        return np.concatenate(self.chats)

    # as others see it: `OtherNode` and `PeerLink`

    def connection(self, deadline: float) -> "Node":
        if self.is_dead:
            raise PeerFailed(Outcome.IO_ERROR, "no_connection")
        return self

    def put_back(self, link: object) -> None:
        return

    def fileno(self) -> int:
        return self.wake

    def ask_holders(self, asked: Sequence[int], deadline: float) -> None:
        self.num_asked += 1
        self.asked = asked

    def read_holders(self, num: int, deadline: float) -> list[list[PeerAddress]] | None:
        return self.index.holders(MODEL, self.asked)

    def report(self, report: Report, deadline: float) -> bool:
        return self.index.report(MODEL, report)


def keys(draw: np.random.Generator, count: int) -> Keys:
    return draw.integers(0, 1 << 64, count, np.uint64)


SYSTEMS: Final = [keys(np.random.default_rng(i), SYSTEM) for i in range(16)]


def names(prompt: Keys) -> list[bytes]:
    return [bytes(24) + key.tobytes() for key in prompt]


class Fleet:
    def __init__(self, count: int, blocks: int, config: PeersConfig) -> None:
        self.clock, self.num_failures = Clock(), 0
        self.nodes = [Node(i, self.clock, np.random.default_rng([count, i]), blocks, config) for i in range(count)]
        self.by_address: Any = {node.address: node for node in self.nodes}
        self.draw, self.gen = random.Random(count), np.random.default_rng(count)
        self.adopt([node.address for node in self.nodes])

    def adopt(self, addresses: list[PeerAddress]) -> None:
        began = time.process_time()
        ring = Ring(addresses)
        self.ring_ms = (time.process_time() - began) * 1e3
        with patch("kvtier.tiers.peers.owners.Ring", lambda nodes: ring):  # one for all: a node's own takes as long
            for node in self.nodes:
                node.owners.adopt(addresses)

    def fail(self, node: Any, link: object, failure: PeerFailed) -> Outcome:
        self.num_failures += 1
        return failure.outcome

    def round(self, share: float) -> tuple[int, int, float]:
        """A second: reports, keys in them, CPU seconds, of all nodes."""
        alive = [node for node in self.nodes if not node.is_dead]
        for node in alive:
            node.turn_over(share)
        before, began = self._counts(alive), time.process_time()
        for node in alive:
            node.owners.report(node.held, node.index, self.by_address, self.fail)
        took, after = time.process_time() - began, self._counts(alive)
        self.clock.now += 1.0
        return after["reports"] - before["reports"], after["reported"] - before["reported"], took

    def look_up(self, count: int) -> Row:
        """Prompts of living nodes' conversations, each looked up by another node: one turn longer than what is held."""
        alive = [node for node in self.nodes if not node.is_dead]
        found, queried, took, named = 0, list[int](), list[float](), list[int]()
        self.num_failures = 0
        for _ in range(count):
            reader, holder = self.draw.sample(alive, 2)
            prompt = np.concatenate([self.draw.choice(holder.chats), keys(self.gen, TURN)])
            hashes, before = names(prompt), reader.owners.stats().get("owners_queried", 0)
            began = time.perf_counter()
            holders = reader.owners.holders(hashes, self.by_address, math.inf, self.fail)[:AT_ONCE]
            took.append((time.perf_counter() - began) * 1e6)
            queried.append(reader.owners.stats().get("owners_queried", 0) - before)
            named.append(len(holders))
            found += holder in holders
        return {
            "found": round(found / count, 4),
            "owners queried": round(statistics.mean(queried), 2),
            "nodes queried": round(statistics.mean(named), 2),
            "dead nodes met": round(self.num_failures / count, 2),
            "CPU us": round(statistics.median(took)),
        }

    @staticmethod
    def _counts(nodes: Sequence[Node]) -> Counter[str]:
        return sum((Counter(node.owners.stats()) for node in nodes), Counter[str]())


def simulate(count: int, blocks: int, share: float, rounds: int, lookups: int) -> list[Row]:
    """Run it `spawned`: memory is the process's."""
    fleet = Fleet(count, blocks, PeersConfig(nodes=("10.0.0.1:1",), key_file=Path("/unused"), index="ring"))
    gc.collect()
    before, num_rounds, total = resident_bytes(), 0, 0
    while reports := fleet.round(0.0)[0]:
        num_rounds, total = num_rounds + 1, total + reports
        assert num_rounds < 1000, "reports do not end"
    gc.collect()
    owned = np.array([node.index.num_keys for node in fleet.nodes])
    first: Row = {"nodes": count, "what": "start", "rounds": num_rounds, "reports a node": total / count}
    first |= {"ring ms": round(fleet.ring_ms, 1), "keys an owner": round(float(owned.mean()))}
    first |= {"most / mean": round(float(owned.max() / owned.mean()), 2)}
    first["KiB a node"] = round((resident_bytes() - before) / count / 1024)
    rows = [first]

    def row(what: str, **more: object) -> None:
        rows.append({"nodes": count, "what": what, **more})

    steady = [fleet.round(share) for _ in range(rounds)]
    reports, sent, took = (sum(each) / len(steady) / count for each in zip(*steady, strict=True))
    row("a second", reports=round(reports, 1), keys=round(sent, 1), **{"CPU ms a node": round(took * 1e3, 2)})
    row("look-ups", **fleet.look_up(lookups))
    dead = fleet.draw.sample(fleet.nodes, max(1, count // 10))
    for node in dead:
        node.is_dead = True
    row("a tenth is dead, unknown", **fleet.look_up(lookups))
    for node in dead:
        node.answers = False
    row("known as dead", **fleet.look_up(lookups))
    fleet.adopt([node.address for node in fleet.nodes if not node.is_dead])
    row("list without them, at once", **fleet.look_up(lookups))
    num_rounds = total = 0
    while reports := fleet.round(0.0)[0]:
        num_rounds, total = num_rounds + 1, total + int(reports)
    alive = count - len(dead)
    row("… reported anew", rounds=num_rounds, **{"reports a node": round(total / alive, 1)}, **fleet.look_up(lookups))
    for node in fleet.nodes[:10]:
        node.index.check()
    return rows


# one message, over a socket


def serve(key: Path, pipe: Connection) -> None:
    server = PeerServer(PeersConfig(listen="127.0.0.1:0", key_file=key))
    pipe.send(server.address)
    pipe.recv()
    pipe.send((time.process_time(), resident_bytes()))
    pipe.recv()
    pipe.send((time.process_time(), resident_bytes()))
    server.close()


def measure_messages(num: int, connections: int) -> list[Row]:
    """What a report of eight keys, a query of four, and an idle connection cost two processes."""
    ours, theirs = get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        key = Path(home) / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        child = get_context("spawn").Process(target=serve, args=(key, theirs))
        child.start()
        host, _, port = ours.recv().rpartition(":")
        secret, blocks = wire.shared_key(key), wire.LentBlocks(MODEL, 1 << 20, 16)

        def opened() -> PeerLink:
            return PeerLink.opened((host, int(port)), secret, blocks, 20.0)

        link, rows = opened(), list[Row]()
        link.report(Report(("10.0.0.1", 1), 1, 0, range(8, 80, 8), []), time.monotonic() + 20.0)
        ours.send("before")
        (cpu, memory), own, times = ours.recv(), time.process_time(), list[float]()
        for seq in range(1, num + 1):
            began = time.perf_counter()
            link.report(Report(("10.0.0.1", 1), 1, seq, [seq << 8 | i for i in range(8)], []), began + 1e6)
            times.append(time.perf_counter() - began)
        for _ in range(num):
            began = time.perf_counter()
            link.ask_holders([8, 16, 24, 32], began + 1e6)
            link.read_holders(4, began + 1e6)
            times.append(time.perf_counter() - began)
        own = time.process_time() - own
        links = [opened() for _ in range(connections)]
        ours.send("after")
        cpu_after, memory_after = ours.recv()
        child.join(10.0)
        for each in (link, *links):
            each.close()
    for what, part in (("a report", times[:num]), ("a query", times[num:])):
        rows.append({"what": what, "us": round(statistics.median(part) * 1e6)})
    both = {"CPU us, sender": round(own / 2 / num * 1e6), "CPU us, owner": round((cpu_after - cpu) / 2 / num * 1e6)}
    rows.append({"what": "both, mean", **both})
    rows.append(
        {"what": "an idle connection", "KiB of the owner": round((memory_after - memory) / connections / 1024, 1)}
    )
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=8192, help="of a node (8,192)")
    parser.add_argument("--stored", type=float, default=107.0, help="blocks a second of a node (107: 0.85 requests of "
                        "8,039 tokens, as scale.py has them, in blocks of 64)")  # fmt: skip
    parser.add_argument("--most", type=int, default=NODES[-1], help="nodes of the largest fleet (1,000)")


@program(options)
def main(chosen: Given) -> Result:
    rows = measure_messages(100 if chosen.quick else 2000, 10 if chosen.quick else 500)
    for count in [each for each in NODES if each <= chosen.most]:
        progress(f"{count:,} nodes")
        rounds, lookups = (2, 20) if chosen.quick else (8, 1000)
        rows += spawned(simulate, count, chosen.blocks, chosen.stored / PROMPT, rounds, lookups)
    setup = {"blocks": chosen.blocks, "stored": chosen.stored, "pace": PACE}
    return rows, [], setup
