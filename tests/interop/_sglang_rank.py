"""One tensor-parallel rank's storage in a process of its own: a request in argv as JSON, what it found on stdout."""

import json
import sys
from pathlib import Path

import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
import sglang_storages as rig
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvtier.connector.sglang import storage as adapter


def main() -> None:
    """Store the pages named by `store` as 0, 1, …, or load those named by `load`; of states, the last one."""
    asked = json.loads(sys.argv[1])
    arguments = rig.server_arguments(Path(asked["model"]))
    adapter.get_server_args = lambda: arguments
    rank = {"tp_rank": asked["rank"], "tp_size": asked["size"], "is_mla_model": True}
    config = rig.storage_config({"service": asked["service"], "cache": {"prefetch_deadline": "30s"}}, **rank)
    torch.manual_seed(asked["rank"])  # states are each rank's own
    first, states = rig.latents(), rig.states()
    storage = rig.open_storage(config, {PoolName.KV: first, PoolName.MAMBA: states})
    keys = asked["keys"]
    indices = torch.arange(len(keys) * rig.TOKENS)
    last = PoolTransfer(PoolName.MAMBA, torch.tensor([0]), None, keys[-1:], PoolHitPolicy.TRAILING_PAGES)
    told = {"exists": storage.batch_exists_v2(keys, [last]).kv_hit_pages}
    if asked["do"] == "store":
        told["latents"] = storage.batch_set_v1(keys, indices)  # SGLang has the first rank alone do it
        told["states"] = storage.batch_set_v2([last])[PoolName.MAMBA]
        told["drained"] = all(tiers.drain(20) for tiers in storage._tiers)
    else:
        told["latents"] = storage.batch_get_v1(keys, indices)
        told["states"] = storage.batch_get_v2([last])[PoolName.MAMBA]
    told["bytes"] = [first.get_data_page(0).view(torch.uint8).sum().item(), states.get_data_page(0).long().sum().item()]
    storage.close()
    print("=" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
