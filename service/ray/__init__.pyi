from .application import build as build
from .options import RayOptions as RayOptions
from .ranking import EngineRequest as EngineRequest
