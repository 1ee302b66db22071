from .optimum import Optimum

__all__ = ["Optimum"]
