from .worth import Worth

__all__ = ["Worth"]
