from .server import EngineServer as EngineServer
