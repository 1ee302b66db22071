"""A connector beside kvtier that hands KV over as NIXL's does: the decode node pulls, by `kv_transfer_params`.

What one engine sent, the next one in the same process finds in `SENT`. With `LOST` set, pulls fail.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

SENT: Final[dict[str, dict[str, torch.Tensor]]] = {}
"""Request of the prefill node → its blocks, of each layer."""
LOST: Final[dict[str, Any]] = {"on": False, "failed": 0, "pulled": 0}


@dataclass
class _Moves(KVConnectorMetadata):
    sends: dict[str, list[int]] = field(default_factory=dict)
    pulls: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


class WholeLoads(KVConnectorBase_V1, SupportsHMA):
    """A connector that loads and stores no layer by itself."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class PullingConnector(WholeLoads):
    """Asynchronous both ways: a request's blocks stay until they were sent, and a pull ends a step later."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._moves = _Moves()
        self._layers: dict[str, torch.Tensor] = {}
        self._ended: tuple[set[str], set[str]] = (set(), set())
        self._invalid: set[int] = set()

    # the scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        missing = len(request.prompt_token_ids) - num_computed_tokens
        return missing, missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and num_external_tokens:
            self._moves.pulls[request.request_id] = (params["remote_request_id"], blocks.get_block_ids()[0])
            params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        moves, self._moves = self._moves, _Moves()
        return moves

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self._moves.sends[request.request_id] = block_ids[0]
        told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request.request_id}
        return True, told

    def has_pending_push_work(self) -> bool:
        return bool(self._moves.sends)

    # a worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, _Moves)
        for request_id, blocks in moves.sends.items():
            SENT[request_id] = {name: tensor[blocks].clone() for name, tensor in self._layers.items()}
            self._ended[0].add(request_id)
        for request_id, (sent, blocks) in moves.pulls.items():
            if LOST["on"]:
                LOST["failed"] += 1
                self._invalid.update(blocks)
            else:
                LOST["pulled"] += 1
                for name, tensor in self._layers.items():
                    tensor[blocks[: len(SENT[sent][name])]] = SENT[sent][name]
            self._ended[1].add(request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        ended, self._ended = self._ended, (set(), set())
        return ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
