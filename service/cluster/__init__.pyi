from .cluster import Cluster
from .file import BESIDE_US, FIRST_PORT, NUM_PORTS, Placeholders, Topology
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
