"""A worker for pipeline stages on a CPU: vLLM makes room for what another stage hands over only where it profiles.

Give vLLM `worker_cls="cpu_stages.StageWorker"`, with this file's folder on sys.path.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """vLLM's own worker, with that room."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
