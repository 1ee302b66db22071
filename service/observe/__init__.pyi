from . import statuses, summary
from .dashboard import dashboard_routes
from .figures import MetricValues, figures, version
from .prometheus import EXPOSITION, counter, gauge, histogram, labelled, text_of
from .statuses import DaemonStatus, EngineStatus, ReplicaScore, RouterStatus
from .summary import brief_time, counts, row
from .top import watch

__all__ = [
    "EXPOSITION",
    "DaemonStatus",
    "EngineStatus",
    "MetricValues",
    "ReplicaScore",
    "RouterStatus",
    "brief_time",
    "counter",
    "counts",
    "dashboard_routes",
    "figures",
    "gauge",
    "histogram",
    "labelled",
    "row",
    "statuses",
    "summary",
    "text_of",
    "version",
    "watch",
]
