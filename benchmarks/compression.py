"""What compressing blocks saves and costs: ratio and rates of one core by dtype, and below which rate it pays.

KV is real: of the recall model that was trained (`shared/fixture`, if it is there), and of a Llama with random weights,
in each dtype (`fp8`: cast to e4m3), as blocks in the canonical layout. "plain" is zstd of the same level over the same
bytes, not split by their place. Rates are of CPU time, in GB of payload, medians over blocks. A store slower than
"reads below" brings a compressed block sooner: it takes 1/(ratio × rate) to come, and 1/restore to be restored then.

The same blocks as fp8 (`[cache] lossy`), with a scale for each head and token. "error" is the norm of what is lost over
that of the block. Then what a batch of such blocks takes in a Redis on this machine, with and without, and what an
object store has to keep of them (rates of moto's server would tell nothing of others).

Last, what loss does to answers: the trained model is asked about documents over their KV as it was, as fp8 with scales,
or cast to e4m3 without. "as exact" is the share of answers that are those of exact KV, "KL" (nats) of the answer's
distribution from that of exact KV.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import zstandard
from _report import Given, Result, Row, program, progress, took
from _rig import key_file, llama
from numpy.typing import NDArray
from object_rig import NO_OBJECTS, ObjectServer, object_server, options
from recall import FIXTURE, Asked, asked
from redis_rig import NO_REDIS, RedisServer, standalone
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel

from kvtier.connector.models import cache_option
from kvtier.tiers import BlockCodec, BlockRecord, Fp8Codec, KVTierError, Outcome, checksum, fp8_form, rates_of
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import open_hierarchy
from kvtier.tiers.naming import KVShape, TokenChain, root_hash
from kvtier.tiers.objects import ObjectStore

FINGERPRINT: Final = b"compression".ljust(32, b".")
BLOCK_SIZE: Final = 64  # tokens, the default
LEVEL: Final = 1
TOKENS: Final = 1024
MOST: Final = 16  # blocks measured of each kind
DTYPES: Final[Mapping[str, torch.dtype]] = dict(
    bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32, fp8=torch.float8_e4m3fn
)
SAMPLES: Final = 100  # of four documents, each with four questions

Loss = Callable[[torch.Tensor], torch.Tensor]
HEAD_DIMS: Final = {"the recall model, trained": 32, "a Llama with random weights": 128}


def trained() -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(FIXTURE / "recall-llama-bf16", dtype=torch.bfloat16).eval()


def blocks_of(model: PreTrainedModel, tokens: list[int], dtype: torch.dtype) -> NDArray[np.uint8]:
    """The KV of a prompt: [blocks, bytes of num_layers × 2 × block_size × heads × head_dim]."""
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]  # [2, heads, tokens, head_dim]
    whole = torch.stack(layers).permute(0, 1, 3, 2, 4).to(dtype)
    num_layers, num_kv, num_tokens, heads, head_dim = whole.shape
    num_blocks = num_tokens // BLOCK_SIZE
    cut = whole[:, :, : num_blocks * BLOCK_SIZE].reshape(num_layers, num_kv, num_blocks, BLOCK_SIZE, heads, head_dim)
    cut = cut.permute(2, 0, 1, 3, 4, 5).contiguous()
    return np.asarray(cut.view(torch.uint8).numpy().reshape(num_blocks, -1)[:MOST])


def kinds(num_tokens: int) -> Iterator[tuple[str, str, NDArray[np.uint8]]]:
    draw = np.random.default_rng(0)
    if FIXTURE.exists():
        model = trained()
        told = [text_of(each) for each in asked(MOST)[::4]]
        for dtype in ("bf16", "fp16", "fp8"):
            each = [blocks_of(model, documents, DTYPES[dtype]) for documents in told]
            yield "the recall model, trained", dtype, np.concatenate(each)[:MOST]
    shape = llama(1024, 8, heads=16, kv_heads=8, intermediate_size=2048, head_dim=128, vocab_size=32_000)
    tokens = draw.integers(0, 32_000, num_tokens).tolist()
    for dtype in DTYPES:
        torch.manual_seed(0)
        computed = torch.bfloat16 if dtype == "fp8" else DTYPES[dtype]
        made: Any = LlamaForCausalLM(shape)
        made.to(dtype=computed)
        yield "a Llama with random weights", dtype, blocks_of(made, tokens, DTYPES[dtype])


def measure(whose: str, dtype: str, blocks: NDArray[np.uint8]) -> Row:
    rates = [rates_of(block.tobytes()) for block in blocks]
    plain = zstandard.ZstdCompressor(level=LEVEL)

    def gb(each: Callable[[Any], float]) -> float:
        return round(median(map(each, rates)) / 1e9, 3)

    row: Row = {"KV of": whose, "dtype": dtype, "block KiB": blocks.shape[1] >> 10}
    row["ratio"] = round(median(rate.ratio for rate in rates), 3)
    row["ratio, plain"] = round(median(len(b) / len(plain.compress(b.tobytes())) for b in blocks), 3)
    row |= {"shrink GB/s": gb(lambda rate: rate.shrink), "restore GB/s": gb(lambda rate: rate.restore)}
    row["reads below GB/s"] = gb(lambda rate: rate.reads_pay_below())
    return row | {"writes below GB/s": gb(lambda rate: rate.writes_pay_below())}


def batch_of(blocks: NDArray[np.uint8]) -> tuple[list[BlockRecord], list[memoryview]]:
    chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
    chain.extend(range(len(blocks) * BLOCK_SIZE))
    payloads = [memoryview(block.tobytes()) for block in blocks]
    records = zip(chain.records(0, len(blocks)), payloads, strict=True)
    return [replace(record, checksum=checksum(payload)) for record, payload in records], payloads


def over_redis(
    server: RedisServer, blocks: NDArray[np.uint8], compression: str, rounds: int, *, fp8: bool = False
) -> Row:
    """The tier's own reads and writes of one batch: the best of some rounds, and what the server keeps of a block.

    `fp8`: the blocks, of bf16, are packed on their way.
    """
    records, payloads = batch_of(blocks)
    names, targets = [record.chain_hash for record in records], [memoryview(bytearray(each)) for each in payloads]
    redis = {"url": server.url, "deadline": "20s", "compression": compression}
    config = Config.load(host={"size": 1 << 26, "pin": False}, redis=redis)
    server.cli("FLUSHALL")
    empty = _used(server)
    shape = KVShape(1, 1, len(payloads[0]) // (4 * BLOCK_SIZE), BLOCK_SIZE, "bfloat16")
    hierarchy = open_hierarchy(config, FINGERPRINT, shape, lossy=fp8_form("bfloat16", 128) if fp8 else None)
    (store,) = hierarchy.ports
    wrote, read = list[float](), list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        outcomes = store.write(records, payloads, store.epoch)
        wrote.append(time.perf_counter() - began)
        assert set(outcomes) == {Outcome.OK}, outcomes
        began = time.perf_counter()
        results = store.read(names, targets)
        read.append(time.perf_counter() - began)
        assert fp8 or (results == records and targets == payloads)
        assert [each.checksum for each in results if isinstance(each, BlockRecord)] == list(map(checksum, targets))
    kept = (_used(server) - empty) / len(blocks)
    hierarchy.close()
    gigabytes = sum(map(len, payloads)) / 1e9
    row: Row = {"[redis] compression": compression, "[cache] lossy": "fp8" if fp8 else "none"}
    row |= {"block KiB": len(payloads[0]) >> 10, "SET GB/s": round(gigabytes / min(wrote), 3)}
    return row | {"GET GB/s": round(gigabytes / min(read), 3), "KiB kept a block": round(kept / 1024, 1)}


def over_objects(server: ObjectServer, blocks: NDArray[np.uint8], home: Path) -> Iterator[Row]:
    """What a bucket keeps of a block, stored in one batch: without compression, with it, and encrypted after it."""
    records, payloads = batch_of(blocks)
    size, zstd = len(payloads[0]), {"compression": "zstd"}
    ways = {"none": {}, "zstd": zstd, "zstd, then key_file": zstd | {"key_file": str(key_file(home))}}
    for way, more in ways.items():
        server.empty()
        store = ObjectStore.open(options(server.endpoint, **more), FINGERPRINT, slot_bytes=size, block_size=BLOCK_SIZE)
        assert set(store.write(records, payloads)) == {Outcome.OK}
        store.close()
        kept = sum(len(server.content(key)) for key in server.keys("kvtier/blocks")) / len(blocks)
        yield {"[objects] compression": way, "block KiB": size >> 10, "KiB in a bucket": round(kept / 1024, 1)}


def _used(server: RedisServer) -> int:
    told = server.cli("INFO", "memory").decode()
    return next(int(line.partition(":")[2]) for line in told.splitlines() if line.startswith("used_memory:"))


def packed(whose: str, short: str, blocks: NDArray[np.uint8], group: int) -> Row:
    """One row for blocks `[blocks, bytes]`, a scale for each `group` numbers. What comes back packs to the same."""
    dtype = str(DTYPES[short]).removeprefix("torch.")
    codec = Fp8Codec(dtype, group, blocks.shape[1], extension("kvtier.tiers.fp8_compiled"))
    zstd = BlockCodec(codec.packed_bytes)
    errors, shorter = list[float](), list[float]()
    rates: dict[str, list[float]] = {}
    for block in blocks:
        payload, target = memoryview(block.tobytes()), memoryview(bytearray(len(block)))
        stored = codec.pack(payload)
        assert stored is not None
        assert codec.unpack(stored, target)
        assert codec.pack(target) == stored
        before, after = (torch.frombuffer(bytearray(each), dtype=DTYPES[short]).double() for each in (payload, target))
        errors.append(float((after - before).norm() / before.norm()))
        shorter.append(len(block) / zstd.shrink(stored)[1].nbytes)
        rates.setdefault("pack GB/s", []).append(len(block) / _fastest(partial(codec.pack, payload)))
        rates.setdefault("unpack GB/s", []).append(len(block) / _fastest(partial(codec.unpack, stored, target)))
    row: Row = {"KV of": whose, "as fp8 from": dtype, "ratio": round(blocks.shape[1] / codec.packed_bytes, 3)}
    row |= {"with zstd": round(median(shorter), 3), "error": round(median(errors), 4)}
    return row | {name: round(median(each) / 1e9, 3) for name, each in rates.items()}


def answers(quick: bool) -> Iterator[Row]:
    """A row for each way in which the KV of documents may come back to a trained model."""
    questions, model = asked(8 if quick else SAMPLES), trained()
    expected = torch.tensor([each.answer for each in questions])
    exact = _logits(model, questions, lambda kv: kv)
    losses: dict[str, Loss] = {
        "as fp8, with scales": _scaled,
        "cast to e4m3": lambda kv: kv.to(DTYPES["fp8"]).to(kv.dtype),
    }
    for name, logits in {
        "exact": exact,
        **{name: _logits(model, questions, loss) for name, loss in losses.items()},
    }.items():
        said, meant = logits.log_softmax(-1), exact.log_softmax(-1)
        apart = (meant.exp() * (meant - said)).sum(-1)
        row: Row = {"KV of the documents": name, "questions": len(expected)}
        row["right"] = round(float((logits.argmax(-1) == expected).double().mean()), 4)
        row["as exact"] = round(float((logits.argmax(-1) == exact.argmax(-1)).double().mean()), 4)
        row |= {"KL, mean": round(float(apart.mean()), 6), "KL, most": round(float(apart.max()), 5)}
        yield row | {"logits apart, most": round(float((logits - exact).abs().max()), 3)}


def text_of(one: Asked) -> list[int]:
    """Its documents."""
    return one.prompt[: -len(one.question)]


def _logits(model: Any, questions: list[Asked], loss: Loss) -> torch.Tensor:
    """Of the answer to each question, `[questions, vocabulary]`: computed over the documents' KV, which lost that."""
    found = []
    with torch.inference_mode():
        for documents, several in groupby(questions, text_of):
            cache = model(torch.tensor([documents]), use_cache=True).past_key_values
            kept = [(loss(layer.keys), loss(layer.values)) for layer in cache.layers]
            for each in several:
                again = DynamicCache()
                for index, (keys, values) in enumerate(kept):
                    again.update(keys.clone(), values.clone(), index)
                options = cache_option(model, again)
                found.append(model(torch.tensor([each.question]), use_cache=True, **options).logits[0, -1].double())
    return torch.stack(found)


def _scaled(kv: torch.Tensor) -> torch.Tensor:
    """As it comes back from a tier: `[1, heads, tokens, dim]`."""
    payload = memoryview(bytearray(kv.contiguous().view(torch.uint8).numpy().tobytes()))
    codec = Fp8Codec("bfloat16", kv.shape[-1], len(payload))
    stored = codec.pack(payload)
    assert stored is not None
    assert codec.unpack(stored, payload)
    return torch.frombuffer(payload, dtype=torch.bfloat16).reshape(kv.shape)


def _fastest(work: Callable[[], object]) -> float:
    return max(min(took(work, time.thread_time) for _ in range(3)), 1e-9)


@program()
def main(chosen: Given) -> Result:
    if NO_REDIS:
        raise KVTierError(NO_REDIS)
    torch.set_num_threads(1)
    rows, as_fp8, largest = list[Row](), list[Row](), np.zeros((0, 0), np.uint8)
    for whose, dtype, blocks in kinds(4 * BLOCK_SIZE if chosen.quick else TOKENS):
        progress(f"{whose}, {dtype}")
        rows.append(measure(whose, dtype, blocks))
        if dtype != "fp8":
            as_fp8.append(packed(whose, dtype, blocks, HEAD_DIMS[whose]))
        if dtype == "bf16":
            largest = blocks
    rows += as_fp8
    with standalone() as server:
        for compression, fp8 in (("none", False), ("zstd", False), ("none", True), ("zstd", True)):
            progress(f"Redis, compression {compression}{', as fp8' if fp8 else ''}")
            rows.append(over_redis(server, largest, compression, 2 if chosen.quick else 7, fp8=fp8))
    if NO_OBJECTS is None:
        progress("an object store")
        with TemporaryDirectory() as directory, object_server(Path(directory)) as bucket:
            rows += over_objects(bucket, largest, Path(directory))
    if FIXTURE.exists():
        progress("answers")
        rows += answers(chosen.quick)
    return rows, [], {"tokens of a block": BLOCK_SIZE, "level": LEVEL}
