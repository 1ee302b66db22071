from .process import EngineServer as EngineServer
