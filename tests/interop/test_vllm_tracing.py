"""vLLM's own tracing and the connector's: both go on one trace, the client's, if vLLM is told to trace."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import httpx
from doubles import wait_until
from node_rig import free_port
from otlp_rig import SeenSpan, collecting, drawn
from pair_rig import serving
from vllm_rig import BLOCK, make_checkpoint

pytestmark = pytest.mark.timeout(600)

CLIENT = "b7ad6b7169203331"
PROMPT = list(range(3, 3 + 4 * BLOCK + 5))


def test_the_connectors_spans_join_vllms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    model = make_checkpoint("llama", tmp_path / "m")
    tiers = {"host": {"size": "32MiB"}, "file": {"path": str(tmp_path / "kv"), "size": "64MiB"}}
    connector = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer = json.dumps({**connector, "kv_connector_extra_config": {**tiers, "cache": {"load_or_recompute": "load"}}})
    with collecting() as collector:
        command = ["vllm", "serve", str(model), "--port", str(free_port()), "--skip-tokenizer-init"]
        command += ["--kv-transfer-config", transfer, "--otlp-traces-endpoint", f"{collector.url}/v1/traces"]
        with serving(command, tmp_path / "log") as server:

            def traced(letter: str) -> dict[str, SeenSpan]:
                """The spans of one more request, by their names."""
                header = {"traceparent": f"00-{letter * 32}-{CLIENT}-01"}
                asked = {"model": "m", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
                asked |= {"detokenize": False}
                got = httpx.post(f"{server.url}/v1/completions", json=asked, headers=header, timeout=120)
                assert got.status_code == 200, got.text
                wanted = {"llm_request", "kv cache", "lookup"}
                wait_until(lambda: wanted <= {each.name for each in collector.trace(letter * 32)})
                print(*drawn(collector.trace(letter * 32), CLIENT), sep="\n")
                return {each.name: each for each in collector.trace(letter * 32)}

            cold = traced("a")
            assert cold["llm_request"].parent == cold["kv cache"].parent == CLIENT  # side by side
            assert cold["lookup"].parent == cold["kv cache"].id
            assert cold["kv cache"].service == "kvtier-vllm"
            assert cold["kv cache"].attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
            assert cold["kv cache"].attributes["kvtier.missed.never_seen"] == 4
            assert str(cold["kv cache"].attributes["kvtier.request_id"]).startswith("cmpl-")

            # vLLM's own cache is emptied: what it had comes from host memory, and the span says so.
            server.forget_l1()
            warm = traced("b")
            assert warm["kv cache"].attributes["kvtier.hit_tokens.l2"] == 4 * BLOCK
            assert warm["load"].parent == warm["kv cache"].id
