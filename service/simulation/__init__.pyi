from .optimum import Optimum
from .replay import SimulatedRun, TraceReplay, sweep
from .simulated_tiers import Capacity
from .value import LoadRates, RunValue, optimum_of, rates_from, value_of

__all__ = [
    "Capacity",
    "LoadRates",
    "Optimum",
    "RunValue",
    "SimulatedRun",
    "TraceReplay",
    "optimum_of",
    "rates_from",
    "sweep",
    "value_of",
]
