from .cluster import Cluster
from .defaults import BESIDE_US, FIRST_PORT, NUM_PORTS
from .file import Placeholders, Topology
from .keeper import restart_service, start_keeper, stop_service
from .process import is_installed, show_logs

__all__ = [
    "BESIDE_US",
    "FIRST_PORT",
    "NUM_PORTS",
    "Cluster",
    "Placeholders",
    "Topology",
    "is_installed",
    "restart_service",
    "show_logs",
    "start_keeper",
    "stop_service",
]
