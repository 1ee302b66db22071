from .app import serve
from .client import Deadlines, Failure, Headers, ReplicaClient, ReplicaFailed
from .holdings import FleetHoldings, Held, VersionHoldings, joined
from .policy import CROWD, LOAD_WEIGHT, WEIGHTS, Candidate, Choice, Reason, choose, choose_or_stick, sticky
from .prompts import READ, KnownPrompt, read_prompt, session_of
from .proxy import NOT_ANSWERED, NOT_ASKED, passed
from .replica_list import Publishers, parse_replicas
from .replicas import ReplicaProfile

__all__ = [
    "CROWD",
    "LOAD_WEIGHT",
    "NOT_ANSWERED",
    "NOT_ASKED",
    "READ",
    "WEIGHTS",
    "Candidate",
    "Choice",
    "Deadlines",
    "Failure",
    "FleetHoldings",
    "Headers",
    "Held",
    "KnownPrompt",
    "Publishers",
    "Reason",
    "ReplicaClient",
    "ReplicaFailed",
    "ReplicaProfile",
    "VersionHoldings",
    "choose",
    "choose_or_stick",
    "joined",
    "parse_replicas",
    "passed",
    "read_prompt",
    "serve",
    "session_of",
    "sticky",
]
