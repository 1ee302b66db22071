from .adapter import KVTier
from .blocks import Blocks
from .cache_form import CacheForm, empty_cache, per_token, probe_of
from .config_file import read_config
from .config_form import form_of_config
from .kv_cache import fill
from .state_calls import step_cost
from .state_form import StateForm
from .state_gate import GoingOn, how_it_goes_on
from .state_passes import feed

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
    "step_cost",
]
