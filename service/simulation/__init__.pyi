from .optimum import Optimum
from .replay import SimulatedRun, TraceReplay, sweep
from .simulated_tiers import Capacity, SimulatedTiers
from .value import LoadRates, charts_of_runs, optimum_of, rates_from, table_of_runs, value_of

__all__ = [
    "Capacity",
    "LoadRates",
    "Optimum",
    "SimulatedRun",
    "SimulatedTiers",
    "TraceReplay",
    "charts_of_runs",
    "optimum_of",
    "rates_from",
    "sweep",
    "table_of_runs",
    "value_of",
]
