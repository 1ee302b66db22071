from .bench import BenchOptions, LoadPace, Shape, run_bench

__all__ = ["BenchOptions", "LoadPace", "Shape", "run_bench"]
