from .adapter import KVTier
from .blocks import Blocks, fill
from .cache_form import CacheForm, StateForm, empty_cache, per_token, probe_of, require_causal
from .config_file import read_config
from .config_form import form_of_config
from .going_on import GoingOn, feed, how_it_goes_on
from .state_calls import step_cost

__all__ = [
    "Blocks",
    "CacheForm",
    "GoingOn",
    "KVTier",
    "StateForm",
    "empty_cache",
    "feed",
    "fill",
    "form_of_config",
    "how_it_goes_on",
    "per_token",
    "probe_of",
    "read_config",
    "require_causal",
    "step_cost",
]
