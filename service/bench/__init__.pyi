from .bench import Answer, BenchOptions, LoadPace, Server, Shape, run_bench

__all__ = ["Answer", "BenchOptions", "LoadPace", "Server", "Shape", "run_bench"]
