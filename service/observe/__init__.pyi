from . import statuses
from .live_page import LivePage
from .metrics import EXPOSITION, MetricValues, counter, figures, gauge, histogram, labelled, text_of, version, wanting
from .statuses import DaemonStatus, EngineStatus, ReplicaScore, RouterStatus, StatusPart
from .summary import daemon_page, engine_page, router_page
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
    "daemon_page",
    "engine_page",
    "figures",
    "gauge",
    "histogram",
    "labelled",
    "router_page",
    "statuses",
    "text_of",
    "version",
    "wanting",
    "watch",
]
