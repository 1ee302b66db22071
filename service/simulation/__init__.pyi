from .optimum import Optimum
from .replay import SimulatedRun, TraceReplay, sweep
from .shown import charts_of_runs, table_of_runs
from .simulated_tiers import Capacity, SimulatedTiers
from .value import LoadRates, optimum_of, rates_from, value_of

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
