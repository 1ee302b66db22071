"""A prefill and a decode vLLM on this CPU, and what hands the KV over: kvtier by a daemon, peers or Redis, or NIXL.

Two real `vllm serve`, and what a proxy does between them: the prompt goes to the prefill server with one token to
answer, then to the decode server with what that returned. "alone": the decode server computes the prompt itself. TTFT
is from the proxy's first request to the first token of the answer. Inter-token times are those of one more request,
which the decode server answers all the while: they show what a prefill beside it costs. NIXL moves blocks from vLLM's
cache to vLLM's cache, and keeps none; kvtier's stay in its tiers. Every way has the same prompts and the same answers,
one request at a time. Both servers share the cores. Runs in `.venv-vllm` (`.ci/beside-engine vllm`).
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, Final

from _rig import beside

beside("vllm")

import numpy as np  # noqa: E402
from _report import Given, Result, Row, Target, program, progress  # noqa: E402
from _rig import free_port, installed, posted, saved_llama  # noqa: E402
from node_rig import Node, node  # noqa: E402
from pair_rig import Pair, Server, running  # noqa: E402
from peers_rig import key_file  # noqa: E402
from redis_rig import standalone  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

NIXL: Final = ("nixl==1.5.1", "nixl-cu12==1.5.1")  # UCX over shared memory; nothing of CUDA's is needed
AEG: Final = "aeg==0.9.0"  # of kvtier's extra `peers`; the other part of it, cryptography, comes with vLLM
BESIDE_TOKENS: Final = 2000  # tokens of the answer that goes on meanwhile
MAX_LEN: Final = 4096
WORDS: Final = 512


def commands(transfers: Sequence[dict[str, Any]], model: Path, blocks: int) -> Iterator[list[str]]:
    for transfer in transfers:
        # of the next server that is started
        os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        command = ["vllm", "serve", str(model), "--port", str(free_port())]
        command += ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
        yield [*command, "--max-model-len", str(MAX_LEN), "--num-gpu-blocks-override", str(blocks)]


def of_kvtier(prefill: dict[str, Any], decode: dict[str, Any]) -> list[dict[str, Any]]:
    common = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}
    roles = {"kv_producer": prefill, "kv_consumer": decode}
    return [{**common, "kv_role": role, "kv_connector_extra_config": extra} for role, extra in roles.items()]


def by_daemon(daemon: Node) -> dict[str, Any]:
    return {"service": {"socket": str(daemon.socket)}}


def times(server: Server, prompt: Sequence[int], num_tokens: int, params: Any = None) -> tuple[list[float], list[int]]:
    """When the tokens of one streamed request came, and the tokens."""
    body: Row = {"model": "m", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    body |= {"kv_transfer_params": params} if params else {}
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        came, pieces = posted(connection, "/v1/completions", body)
    return came, [token for piece in pieces for token in piece["choices"][0].get("token_ids") or ()]


def trial(way: str, pair: Pair, prompts: Sequence[list[int]], texts: dict[int, list[int]]) -> Row:
    """The figures of one way, and a check of every answer."""
    firsts = list[float]()
    own = threading.Thread(target=lambda: beside_times.extend(times(pair.decode, [5] * 40, BESIDE_TOKENS)[0]))
    beside_times: list[float] = []
    times(pair.decode, prompts[0][:64], 2)  # what a first request alone costs
    own.start()
    time.sleep(0.5)
    for number, prompt in enumerate(prompts):
        began = time.perf_counter()
        came, tokens = times(pair.decode, prompt, 4, None if way == "alone" else pair.hand_over(prompt))
        firsts.append(came[0] - began)
        if texts.setdefault(number, tokens) != tokens:
            raise AssertionError(f"{way}, prompt {number}: another answer than alone")
    end = time.perf_counter()
    own.join()
    meanwhile = [each for each in beside_times if each <= end]
    gaps = np.diff(meanwhile) * 1e3
    row: Row = {"TTFT p50 ms": median(firsts) * 1e3, "TTFT p99 ms": float(np.quantile(firsts, 0.99)) * 1e3}
    return row | {"inter-token p50 ms": float(np.median(gaps)), "inter-token p99 ms": float(np.quantile(gaps, 0.99))}


def targets(rows: Sequence[Row]) -> list[Target]:
    by_way = {str(row["KV by"]): row for row in rows}
    nixl = by_way.pop("NIXL")
    return [
        Target(f"{way} ÷ NIXL: {name}", 1.1, float(str(row[name])) / float(str(nixl[name])))
        for way, row in by_way.items()
        if way != "alone"
        for name in ("TTFT p50 ms", "inter-token p99 ms")
    ]


@program()
def main(chosen: Given) -> Result:
    count, length = (2, 256) if chosen.quick else (6, 2048)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, WORDS, length).tolist() for _ in range(count)]
    texts: dict[int, list[int]] = {}
    rows: list[Row] = []
    packages = [installed("benchmark-nixl-1.5.1", *NIXL), installed("benchmark-aeg-0.9.0", AEG)]
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *map(str, packages)])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        size, layers = (128, 2) if chosen.quick else (512, 8)
        sizes: Row = {"vocab_size": WORDS, "intermediate_size": 3 * size, "max_position_embeddings": MAX_LEN}
        saved_llama(home / "model", size, layers, heads=size // 64, kv_heads=size // 64, **sizes)
        words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(home / "model")
        redis = stack.enter_context(standalone())
        daemon = stack.enter_context(node(HOST__SIZE="512MiB"))  # as much as an engine of its own has beside Redis
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        peers = {"PEERS__NODES": " ".join(addresses), "PEERS__KEY_FILE": str(key_file(home))}
        pair = [stack.enter_context(node(HOST__SIZE="512MiB", PEERS__LISTEN=at, **peers)) for at in addresses]
        transfers: dict[str, list[dict[str, Any]]] = {
            "alone": [{}, {}],
            "kvtier, a daemon": of_kvtier(by_daemon(daemon), by_daemon(daemon)),
            "kvtier, peers": of_kvtier(*map(by_daemon, pair)),
            "kvtier, Redis": of_kvtier(*[{"host": {"size": "512MiB"}, "redis": {"url": redis.url}}] * 2),
            "NIXL": [{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}] * 2,
        }
        blocks = (MAX_LEN + length) // 32 + 16
        for way, transfer in transfers.items():
            progress(way)
            with running(commands(transfer, home / "model", blocks), home) as both:
                rows.append({"KV by": way, **trial(way, both, prompts, texts)})
    return rows, targets(rows), {"prompts": f"{count} of {length} tokens"}
