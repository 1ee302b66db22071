from . import engine_summary, statuses, summary
from .dashboard import LivePage
from .explained import explained
from .explanation import ExplainedLines, Explanation
from .figures import MetricValues, figures, version
from .prometheus import EXPOSITION, counter, gauge, histogram, labelled, text_of, wanting
from .statuses import DaemonStatus, EngineStatus, ReplicaScore, RouterStatus
from .summary import brief_time, counts, row
from .top import watch

__all__ = [
    "EXPOSITION",
    "DaemonStatus",
    "EngineStatus",
    "ExplainedLines",
    "Explanation",
    "LivePage",
    "MetricValues",
    "ReplicaScore",
    "RouterStatus",
    "brief_time",
    "counter",
    "counts",
    "engine_summary",
    "explained",
    "figures",
    "gauge",
    "histogram",
    "labelled",
    "row",
    "statuses",
    "summary",
    "text_of",
    "version",
    "wanting",
    "watch",
]
