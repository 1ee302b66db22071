from . import summary
from .app import serve
from .policy import CROWD, LOAD_WEIGHT, Candidate, Choice, Reason, choose, sticky

__all__ = [
    "CROWD",
    "LOAD_WEIGHT",
    "Candidate",
    "Choice",
    "Reason",
    "choose",
    "serve",
    "sticky",
    "summary",
]
