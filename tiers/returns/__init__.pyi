from .ends import RequestEnd

__all__ = ["RequestEnd"]
