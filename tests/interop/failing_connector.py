"""A connector beside kvtier under MultiConnector: while on, it promises two blocks of every prompt and loads none."""

from dataclasses import dataclass
from typing import Any, Final

from pulling_connector import WholeLoads
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm_rig import BLOCK

SWITCH: Final[dict[str, Any]] = {"on": False, "failed": 0}


@dataclass
class _Promised(KVConnectorMetadata):
    blocks: set[int]


class FailingConnector(WholeLoads):
    """Loads synchronously: the blocks are computed on in the very step whose end says that they hold nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks: set[int] = set()
        self._asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promises = SWITCH["on"] and request.num_tokens > 2 * BLOCK and request.request_id not in self._asked
        return (2 * BLOCK if promises and not num_computed_tokens else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._blocks.update(blocks.get_block_ids()[0][: num_external_tokens // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        promised, self._blocks = _Promised(self._blocks), set()
        return promised

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Promised)
        self._blocks = metadata.blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._blocks = self._blocks, set()
        SWITCH["failed"] += len(lost)
        return lost
