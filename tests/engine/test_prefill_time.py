"""The story of `kvtier worth` on a small model: prompts computed, and loaded from memory, the slab and Redis."""

import json
from pathlib import Path

import pytest
from command_rig import kvtier
from redis_rig import NO_REDIS, standalone
from tiny_models import config_of


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
def test_the_verb_measures_each_tier_and_leaves_nothing(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path / "model")  # a config.json alone: random weights
    (tmp_path / "slab").mkdir()
    slab = {"file__path": str(tmp_path / "slab"), "file__size": "8MiB", "file__deadline": "30s"}
    with standalone() as server:
        options = {"host__size": "4MiB", **slab, "redis__url": server.url, "redis__deadline": "30s"}
        ended = kvtier("worth", tmp_path / "model", "--tokens", 40, "--tokens", 90, "--json", **options)
        assert ended.returncode == 0, ended.stderr
        left = [key for key in server.all_keys() if not (key.endswith(":epoch") or ":kv-probe:" in key)]
    told = json.loads(ended.stdout)
    assert told["bytes_per_token"] == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, bytes
    assert [sorted(each) for each in told["times"]] == [["compute", "file", "l2", "redis", "tokens"]] * 2
    assert set(told["wins_from_tokens"]) == {"l2", "file", "redis"}
    # What was measured is gone from where it was written.
    assert left == []
    (verified,) = json.loads(kvtier("verify", tmp_path / "slab", "--json").stdout)
    assert verified["blocks"] == 0
    # It can be shown again, at a price.
    (tmp_path / "worth.json").write_text(ended.stdout)
    again = kvtier("worth", "--from", tmp_path / "worth.json", "--gpu-hour", 2, "--json")
    assert json.loads(again.stdout) == {**told, "gpu_hour": 2}

    ended = kvtier("worth", tmp_path / "model", "--tokens", 1024, **options)
    assert ended.returncode == 2
    assert ended.stderr.endswith("kvtier: --tokens 1024: the model takes 1023 at the most\n")
