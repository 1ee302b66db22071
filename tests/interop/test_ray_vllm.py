"""Replicas of Ray Serve that are a real vLLM with our connector: `make test-ray`, after `make test-vllm`."""

import json
from pathlib import Path
from typing import Final

import pytest
from node_rig import ROOT
from redis_rig import standalone

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

from ray_rig import application, ray_cluster, until, vllm_checkpoint

VLLM: Final = ROOT / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not VLLM.exists(), reason="no vLLM here; run `make test-vllm` first"),
]

BLOCK: Final = 32  # tokens: vLLM on a CPU has multiples of this alone

TEXT = "What stands in the document that all of us have read so often? " * 4
# What `vllm serve` runs; the CPU build's command wants a package by the name of the GPU build's.
PROGRAM = (str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model")
OPTIONS = ("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")


def test_conversations_go_where_vllms_events_say_and_a_new_replica_loads_them(tmp_path: Path) -> None:
    model = vllm_checkpoint(tmp_path)
    with ray_cluster(2) as cluster, standalone() as redis:
        tiers = {"host": {"size": "32MiB"}, "redis": {"url": redis.url}}
        connector = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        transfer = json.dumps({**connector, "kv_connector_extra_config": tiers})
        options = (*OPTIONS, "--enable-prompt-tokens-details", "--kv-transfer-config", transfer)
        with application(
            cluster,
            model,
            replicas=2,
            engine="vllm",
            program=PROGRAM,
            options=options,
            env={"VLLM_CPU_KVCACHE_SPACE": "1", "KVTIER_HOST__SIZE": "32MiB", "HF_HUB_OFFLINE": "1"},
            block_size=BLOCK,
            start_timeout=600,
        ) as app:
            talks = [[f"talk {number}: {TEXT}"] for number in range(6)]
            first = [app.ask(talk) for talk in talks]
            assert len({answer.replica for answer in first}) == 2, "work was not shared"
            num_blocks = sum(answer.num_prompt // BLOCK for answer in first)
            until(lambda: app.num_known("GPU") >= num_blocks)
            later = [app.ask([*talk, answer.text, "and then?"]) for talk, answer in zip(talks, first, strict=True)]
            assert [answer.replica for answer in later] == [answer.replica for answer in first]
            for answer, before in zip(later, first, strict=True):
                assert answer.num_cached >= before.num_prompt // BLOCK * BLOCK
            reasons = app.status()["requests"]  # Redis has it for both: one is nearer
            assert reasons.get("prefix", 0) + reasons.get("nearer", 0) >= 6
            # Who comes new reads from Redis what the others computed.
            lost = next(node for node in cluster.worker_nodes)
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
            known = {answer.replica for answer in first}
            until(lambda: len({*app.running()} - known) == 1)
            (new,) = {*app.running()} - known
            again = [app.ask([*talk, answer.text, "and now?"]) for talk, answer in zip(talks, first, strict=True)]
            told = [(answer.replica, answer.num_cached) for answer in again if answer.replica == new]
            assert told, "nothing went to the new replica"
            assert all(num_cached >= BLOCK for _, num_cached in told)
