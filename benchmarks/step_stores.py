"""What a step's stores cost: S sequences that each fill one block of L1, and a long prompt that is prefilled at once.

From the scheduler's `store` to the block that can be found in L2: names reserved, plan, copies, hashed, published and,
where that is set, written down. CPU time of all threads, the median of many steps. The blocks are small, 4 KiB, so that
what is measured is the books and not the copies. L2's memory is there before the first step. If extension modules were
built, all of it is measured with them and, as "Python alone", without.

Of the prompt, 16,384 tokens in blocks of 16, the scheduler's part alone is measured: what an engine waits for before
its step starts (`plan`), and what it does when the worker has reported the copies (`seal`).
"""

import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import torch
from _report import Target, parser, progress, report

from kvtier.connector import LocalConnector
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import Config
from kvtier.tiers.naming import KVShape, TokenChain, root_hash

SEQUENCES: Final = (1, 4, 16, 64)
MOST: Final = {1: 0.05, 4: 0.07, 16: 0.15, 64: 0.4}  # CPU ms of a step of so many sequences
PROMPT: Final = 1024  # blocks of a long prompt that is computed in one step
MOST_PLAN: Final = 3.0  # CPU ms: what vLLM's own offloading plans such a prompt's stores in
SHAPE: Final = KVShape(2, 16, 1, 32, "float16")
FINGERPRINT: Final = b"f" * 32
SETTINGS: Final = {  # (sightings before a block is stored, whether there is a slab that is written back to)
    "L2": (1, False),
    "L2, admit_after 2": (2, False),
    "L2 and slab, write-back": (1, True),
    "L2 and slab, write-back, admit_after 2": (2, True),
}


@dataclass
class GrowingRequest:
    """A request that grows by a block a step. Implements `Request`."""

    request_id: str
    chain: TokenChain

    @property
    def num_tokens(self) -> int:
        """Tokens so far, in whole blocks."""
        return len(self.chain.hashes) * SHAPE.block_size


def step(connector: LocalConnector, sequences: list[GrowingRequest], number: int) -> float:
    """One step's stores; returns its CPU milliseconds."""
    before = time.process_time()
    for block, sequence in enumerate(sequences):
        connector.scheduler.store(sequence.request_id, number, [block])
    connector.worker.start_store(connector.scheduler.build_plan())
    while not connector.scheduler.idle:
        connector.worker.wait(1.0)
        connector.scheduler.update(connector.worker.poll())
    connector.tiers.drain(10.0, below=False)
    return (time.process_time() - before) * 1e3


def measure(num_sequences: int, num_steps: int, admit_after: int, *, writes_back: bool, compiled: bool) -> float:
    """The median step's CPU milliseconds, of steps all of whose blocks are stored; `compiled`: with the twins."""
    with tempfile.TemporaryDirectory() as folder:
        cache = f'admit_after = {admit_after}\nwrite_policy = "write_{"back" if writes_back else "through"}"\n'
        slab = f'[file]\npath = "{folder}/slab"\nsize = "64MiB"\n' if writes_back else ""
        settings = Path(folder) / "kvtier.toml"
        settings.write_text(f'[cache]\n{cache}[host]\nsize = "256MiB"\n{slab}')
        tensor = torch.zeros((num_sequences, *SHAPE.block_shape), dtype=getattr(torch, SHAPE.dtype))
        with patch.dict(os.environ, {} if compiled else {"KVTIER_COMPILED": "off"}):
            connector = LocalConnector(Config.load(settings), FINGERPRINT, SHAPE, tensor)
        assert connector.tiers.region is not None
        connector.tiers.region.wait_prefaulted(60)  # else that is counted, too
        for turn in range(1, admit_after):
            grow(connector, f"turn {turn}", num_sequences, num_steps)
        took, names = grow(connector, "the turn that stores", num_sequences, num_steps)
        found = connector.tiers.locate(names, 1.0)
        if found["l2"] != len(names):
            raise RuntimeError(f"of {len(names)} blocks {found['l2']} were stored")
        connector.close()
    return statistics.median(took[num_steps // 5 :])


def plan_prompt(num_prompts: int, *, compiled: bool) -> tuple[float, float]:
    """The scheduler's median CPU milliseconds for a prompt's stores: planned, and taken in when they are copied."""
    tensor = torch.zeros((PROMPT, *SHAPE.block_shape), dtype=getattr(torch, SHAPE.dtype))
    config = Config.model_validate({"host": {"size": 2 * PROMPT * SHAPE.block_bytes}})
    with patch.dict(os.environ, {} if compiled else {"KVTIER_COMPILED": "off"}):
        connector = LocalConnector(config, FINGERPRINT, SHAPE, tensor)
    assert connector.tiers.region is not None
    connector.tiers.region.wait_prefaulted(60)
    plans, seals = [], []
    for number in range(num_prompts):
        request = GrowingRequest(f"prompt {number}", TokenChain(root_hash(FINGERPRINT), SHAPE.block_size))
        request.chain.extend([(number * 7919 + i * 13) % 50_000 for i in range(PROMPT * SHAPE.block_size)])
        connector.scheduler.admit(request)
        before = time.thread_time()
        connector.scheduler.store(request.request_id, 0, range(PROMPT))
        plan = connector.scheduler.build_plan()
        plans.append((time.thread_time() - before) * 1e3)
        connector.worker.start_store(plan)
        seal = 0.0
        while not connector.scheduler.idle:
            connector.worker.wait(1.0)
            report_of_copies = connector.worker.poll()
            before = time.thread_time()
            connector.scheduler.update(report_of_copies)
            seal += (time.thread_time() - before) * 1e3
        seals.append(seal)
        connector.scheduler.finished(request.request_id)
        connector.tiers.drain(10.0, below=False)
    connector.close()
    return statistics.median(plans[2:]), statistics.median(seals[2:])


def grow(connector: LocalConnector, turn: str, num_sequences: int, num_steps: int) -> tuple[list[float], list[bytes]]:
    """Sequences that grow by a block in each step. Returns the steps' CPU milliseconds and a sequence's names."""
    root = root_hash(FINGERPRINT)
    sequences = [GrowingRequest(f"{turn}, {n}", TokenChain(root, SHAPE.block_size)) for n in range(num_sequences)]
    for sequence in sequences:
        connector.scheduler.admit(sequence)
    took = []
    for number in range(num_steps):
        for n, sequence in enumerate(sequences):
            sequence.chain.extend([(n * 7919 + number * 13 + i) % 50_000 for i in range(SHAPE.block_size)])
        took.append(step(connector, sequences, number))
    for sequence in sequences:
        connector.scheduler.finished(sequence.request_id)
    return took, list(sequences[0].chain.hashes)


def main() -> int:
    options = parser(__doc__).parse_args()
    num_steps = 20 if options.quick else 200
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    is_built = extension("kvtier.tiers.pool.core_compiled") is not None
    ways = {"": True, ", Python alone": False} if is_built else {"": False}
    for setting, (admit_after, writes_back) in SETTINGS.items():
        for num_sequences in SEQUENCES:
            for way, compiled in ways.items():
                progress(f"{setting}{way}: {num_sequences} sequences")
                took = measure(num_sequences, num_steps, admit_after, writes_back=writes_back, compiled=compiled)
                rows.append({"setting": setting + way, "sequences": num_sequences, "CPU ms a step": took})
                rows[-1]["us a block"] = took * 1e3 / num_sequences
                named = f"{setting}{way}: CPU ms of a step of {num_sequences} stores"
                targets.append(Target(named, MOST[num_sequences], took))
    for way, compiled in ways.items():
        progress(f"a prompt of {PROMPT} blocks{way}")
        plan, seal = plan_prompt(5 if options.quick else 40, compiled=compiled)
        rows.append({"setting": f"L2, a prompt of {PROMPT} blocks{way}", "plan, CPU ms": plan, "seal, CPU ms": seal})
        targets.append(Target(f"CPU ms to plan a prompt of {PROMPT} blocks{way}", MOST_PLAN, plan))
    return report("step_stores", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
