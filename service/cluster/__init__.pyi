from .cluster import Cluster
from .defaults import BESIDE_US, FIRST_PORT, NUM_PORTS
from .file import Placeholders, Topology
from .process import is_installed

__all__ = [
    "BESIDE_US",
    "FIRST_PORT",
    "NUM_PORTS",
    "Cluster",
    "Placeholders",
    "Topology",
    "is_installed",
]
