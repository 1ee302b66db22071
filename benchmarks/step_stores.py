"""What a step's stores cost: S sequences that each fill one block of L1, and a long prompt that is prefilled at once.

From the scheduler's `store` to the block that can be found in L2: names reserved, plan, copies, hashed, published and,
where that is set, written down. CPU time of all threads, the median of many steps. The blocks are small, 4 KiB, so that
what is measured is the books and not the copies. L2's memory is there before the first step. If extension modules were
built, all of it is measured with them and, as "Python alone", without.

Of the prompt, 16,384 tokens in blocks of 16, what an engine waits for before its step starts is measured (`plan`).
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final

import torch
from _report import PYTHON, Given, Result, Row, form, is_built, program, progress
from _rig import AskedRequest

from kvtier.connector import LocalConnector, StepPlan
from kvtier.tiers.config import Config
from kvtier.tiers.naming import KVShape, TokenChain, root_hash

SEQUENCES: Final = (1, 4, 16, 64)
PROMPT: Final = 1024  # blocks of a long prompt that is computed in one step
SHAPE: Final = KVShape(2, 16, 1, 32, "float16")
FINGERPRINT: Final = b"f" * 32
SETTINGS: Final = {  # (sightings before a block is stored, whether there is a slab that is written back to)
    "L2": (1, False),
    "L2, admit_after 2": (2, False),
    "L2 and slab, write-back": (1, True),
    "L2 and slab, write-back, admit_after 2": (2, True),
}
WAYS: Final = {"": "compiled", f", {PYTHON}": PYTHON} if is_built() else {"": PYTHON}


def admitted(connector: LocalConnector, name: str) -> AskedRequest:
    request = AskedRequest(name, TokenChain(root_hash(FINGERPRINT), SHAPE.block_size), 0)
    connector.scheduler.admit(request)
    return request


def grow(request: AskedRequest, seed: int, num_blocks: int = 1) -> None:
    request.chain.extend([(seed + i * 13) % 50_000 for i in range(num_blocks * SHAPE.block_size)])
    request.num_tokens += num_blocks * SHAPE.block_size


@contextmanager
def connected(way: str, num_blocks: int, **options: dict[str, object]) -> Iterator[LocalConnector]:
    tensor = torch.zeros((num_blocks, *SHAPE.block_shape), dtype=getattr(torch, SHAPE.dtype))
    with form(way):
        connector = LocalConnector(Config.model_validate(options), FINGERPRINT, SHAPE, tensor)
    assert connector.tiers.region is not None
    connector.tiers.region.wait_prefaulted(60)  # else that is counted, too
    yield connector
    connector.close()


def finish(connector: LocalConnector, plan: StepPlan) -> None:
    """Everything planned is copied, and can be found."""
    connector.worker.start_store(plan)
    while not connector.scheduler.idle:
        connector.worker.wait(1.0)
        connector.scheduler.update(connector.worker.poll())
    connector.tiers.drain(10.0, below=False)


def step(connector: LocalConnector, sequences: list[AskedRequest], number: int) -> float:
    before = time.process_time()
    for block, sequence in enumerate(sequences):
        connector.scheduler.store(sequence.request_id, number, [block])
    finish(connector, connector.scheduler.build_plan())
    return (time.process_time() - before) * 1e3


def turn(connector: LocalConnector, name: str, num_sequences: int, num_steps: int) -> tuple[list[float], list[bytes]]:
    """Sequences that grow by a block in each step. Returns the steps' CPU milliseconds and a sequence's names."""
    sequences, took = [admitted(connector, f"{name}, {n}") for n in range(num_sequences)], list[float]()
    for number in range(num_steps):
        for n, sequence in enumerate(sequences):
            grow(sequence, n * 7919 + number * 13)
        took.append(step(connector, sequences, number))
    for sequence in sequences:
        connector.scheduler.finished(sequence.request_id)
    return took, list(sequences[0].chain.hashes)


def measure(num_sequences: int, num_steps: int, admit_after: int, *, writes_back: bool, way: str) -> float:
    """The median step's CPU milliseconds, of steps all of whose blocks are stored."""
    with tempfile.TemporaryDirectory() as folder:
        policy = "write_back" if writes_back else "write_through"
        options: dict[str, dict[str, object]] = {"cache": {"admit_after": admit_after, "write_policy": policy}}
        if writes_back:
            options["file"] = {"path": Path(folder) / "slab", "size": "64MiB"}
        with connected(way, num_sequences, host={"size": "256MiB"}, **options) as connector:
            for number in range(1, admit_after):
                turn(connector, f"turn {number}", num_sequences, num_steps)
            took, names = turn(connector, "the turn that stores", num_sequences, num_steps)
            found = connector.tiers.locate(names, 1.0)
            if found["l2"] != len(names):
                raise RuntimeError(f"of {len(names)} blocks {found['l2']} were stored")
    return median(took[num_steps // 5 :])


def plan_prompt(num_prompts: int, way: str) -> float:
    """The scheduler's median CPU milliseconds to plan a prompt's stores."""
    plans = list[float]()
    with connected(way, PROMPT, host={"size": 2 * PROMPT * SHAPE.block_bytes}) as connector:
        scheduler = connector.scheduler
        for number in range(num_prompts):
            request = admitted(connector, f"prompt {number}")
            grow(request, number * 7919, PROMPT)
            before = time.thread_time()
            scheduler.store(request.request_id, 0, range(PROMPT))
            plan = scheduler.build_plan()
            plans.append((time.thread_time() - before) * 1e3)
            finish(connector, plan)
            scheduler.finished(request.request_id)
    return median(plans[2:])


@program()
def main(given: Given) -> Result:
    num_steps, num_prompts = (20, 5) if given.quick else (200, 40)
    rows: list[Row] = []
    for (setting, (admit_after, writes_back)), num_sequences, name in product(SETTINGS.items(), SEQUENCES, WAYS):
        progress(f"{setting}{name}: {num_sequences} sequences")
        took = measure(num_sequences, num_steps, admit_after, writes_back=writes_back, way=WAYS[name])
        row = {"setting": setting + name, "sequences": num_sequences, "CPU ms a step": took}
        rows.append(row | {"us a block": took * 1e3 / num_sequences})
    for name, way in WAYS.items():
        progress(f"a prompt of {PROMPT} blocks{name}")
        plan = plan_prompt(num_prompts, way)
        rows.append({"setting": f"L2, a prompt of {PROMPT} blocks{name}", "plan, CPU ms": plan})
    return rows
