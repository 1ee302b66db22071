"""A ring of holders, simulated in one process: 10, 100 and 1,000 nodes.

Each node has its real client of the ring, its real reports and its real index as an owner; a message is a call of the
other node's index. A node's memory is full of prompts: a system prompt that many nodes hold, and a conversation of its
own. Rounds are seconds of the ring's own time. In each, a node stores new conversations and evicts old ones. Look-ups
are for a conversation of another node, and longer than what that holds. Then a tenth of all nodes dies: at first
everybody asks them, then they are passed over, then they leave the list.
"""

import gc
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

import numpy as np
from _live_replay import ReplayClock
from _report import Given, Result, Row, option, program, progress
from _rig import resident_bytes, spawned

from kvtier.service.node import HolderIndex
from kvtier.tiers import Outcome
from kvtier.tiers.config import PeersConfig
from kvtier.tiers.peers import AT_ONCE, PACE, Keys, Owners, PeerAddress, PeerFailed, Report, Ring

MODEL: Final = b"ring".ljust(32, b".")
NODES: Final = (10, 100, 1000)
SYSTEM: Final = 32  # blocks of a system prompt; a sixteenth of the nodes' conversations share one
PROMPT: Final = 128  # blocks of a conversation behind it
TURN: Final = 8  # new blocks of the next turn, which nobody holds


class Node:
    """One node: what it holds, its index as an owner, its client of the ring. Also the connection of all to it."""

    compared_probe: bytes | None = None
    is_myself = False
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(
        self, number: int, clock: ReplayClock, draw: np.random.Generator, blocks: int, config: PeersConfig
    ) -> None:
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


class Fleet:
    def __init__(self, count: int, blocks: int, config: PeersConfig) -> None:
        self.clock, self.num_failures = ReplayClock(1000.0), 0
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
            for _ in range(node.draw.poisson(share)):  # some conversations leave, and as many come
                node.chats[node.draw.integers(len(node.chats))] = node.chat()
        before, began = self._counts(alive), time.process_time()
        for node in alive:
            node.owners.report(np.concatenate(node.chats), node.index, self.by_address, self.fail)
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
            hashes = [bytes(24) + key.tobytes() for key in prompt]
            before = reader.owners.stats().get("owners_queried", 0)
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


@program(
    option("--blocks", type=int, default=8192, help="of a node (8,192)"),
    option("--stored", type=float, default=107.0, help="blocks a second of a node (107, as scale.py's prompts have)"),
    option("--most", type=int, default=NODES[-1], help="nodes of the largest fleet (1,000)"),
)
def main(chosen: Given) -> Result:
    rows: list[Row] = []
    for count in [each for each in NODES[: 2 if chosen.quick else None] if each <= chosen.most]:
        progress(f"{count:,} nodes")
        rounds, lookups = (2, 20) if chosen.quick else (8, 1000)
        rows += spawned(simulate, count, chosen.blocks, chosen.stored / PROMPT, rounds, lookups)
    setup = {"blocks": chosen.blocks, "stored": chosen.stored, "pace": PACE}
    return rows, [], setup
