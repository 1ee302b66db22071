from .bench import BenchOptions, run_bench
from .load import Pace
from .patterns import Shape

__all__ = ["BenchOptions", "Pace", "Shape", "run_bench"]
