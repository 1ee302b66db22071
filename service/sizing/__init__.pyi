from .sizing import sizing_of

__all__ = ["sizing_of"]
