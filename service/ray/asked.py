"""What goes between ingress and replica: a request as it came, and the head of its answer before the bytes."""

from dataclasses import dataclass
from typing import Final

from kvtier.service.router import Headers

METADATA: Final = "kvtier"  # what a replica tells routers of itself is under this name


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """An HTTP request for an engine. The request router reads its prompt; the replica sends it on as it is."""

    method: str
    path: str  # with the query
    headers: Headers
    body: bytes
    key: str  # names this request in the process that routes it
    tried: frozenset[str] = frozenset()  # replicas that failed it, by `ReplicaID.unique_id`

    @property
    def prompt(self) -> str:
        """The body as text: Ray Serve's own prefix router looks for this, and bodies that begin alike are near.

        Never empty: that router divides by its length.
        """
        return self.body.decode("utf-8", "replace") or self.path


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The first thing a replica answers; the answer's bytes follow in pieces."""

    status: int
    headers: Headers
    replica: str  # `ReplicaID.unique_id`
    is_broken: bool = False  # the engine hung up on it: the request may be what ended it
