"""Where a pipeline stage's layers lie in a slot that holds every stage's."""

from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.utils import get_pp_indices

from kvtier.connector.vllm.layer_specs import layer_index
from kvtier.tiers import ConfigError

_FIX: Final = "use pipeline_parallel_size 1, and divide the model by tensor_parallel_size"


def bytes_around(vllm_config: Any, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of the other stages' layers in a rank's part of a slot: those before this stage's layers, and behind them.

    `sizes` are bytes of this stage's layers in a slot. It holds a model's layers in order of index, whatever stage
    computes them. So engines with different numbers of stages read each other's blocks.

    A process sees its own layers alone, and the scheduler the first stage's. So ConfigError unless the model has one
    layer of K and V for each number, all of one size.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return 0, 0
    if vllm_config.speculative_config is not None:  # vLLM's first stages do not tell when a step's compute is issued
        fix = "leave --speculative-config out, or use pipeline_parallel_size 1"
        raise ConfigError(f"pipeline_parallel_size {stages} with speculative decoding: nothing is kept; {fix}")
    total = vllm_config.model_config.get_total_num_hidden_layers()
    own = sorted(layer_index(name) for name in sizes)
    borders = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    if len({*sizes.values()}) != 1 or own not in [list(range(*border)) for border in borders]:
        raise ConfigError(
            f"pipeline_parallel_size {stages}: then kvtier keeps models whose {total} layers all have K and V of one "
            f"size, with layers of every kind in each stage; {_FIX}"
        )
    [size] = {*sizes.values()}
    return own[0] * size, (total - own[-1] - 1) * size
