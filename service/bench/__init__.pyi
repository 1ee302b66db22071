from .bench import BenchOptions, run_bench
from .load import LoadPace
from .patterns import Shape

__all__ = ["BenchOptions", "LoadPace", "Shape", "run_bench"]
