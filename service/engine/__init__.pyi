from .process import EngineServer

__all__ = ["EngineServer"]
