from . import statuses
from .live_page import LivePage
from .metrics import EXPOSITION, MetricValues, counter, figures, gauge, histogram, labelled, text_of, version, wanting
from .statuses import DaemonStatus, EngineStatus, ReplicaScore, RouterStatus, StatusPart
from .summary import daemon_lines, engine_lines, router_lines
from .top import watch

__all__ = [
    "EXPOSITION",
    "DaemonStatus",
    "EngineStatus",
    "LivePage",
    "MetricValues",
    "ReplicaScore",
    "RouterStatus",
    "StatusPart",
    "counter",
    "daemon_lines",
    "engine_lines",
    "figures",
    "gauge",
    "histogram",
    "labelled",
    "router_lines",
    "statuses",
    "text_of",
    "version",
    "wanting",
    "watch",
]
