from .sizing import ModelSize, sizing_of

__all__ = ["ModelSize", "sizing_of"]
