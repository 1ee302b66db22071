"""What a replica says of itself at `/v1/models`, and which replicas say the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvtier.service.events import MAX_BLOCK_SIZE
from kvtier.service.router.client import Failure, ReplicaFailed
from kvtier.service.router.spec import Publishers

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_NAMESPACE: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    """What a replica reports of itself at `/v1/models`."""

    models: tuple[Mapping[str, Any], ...]
    block_size: int | None  # None if it is not reported
    fingerprint: str | None
    publishers: Publishers
    namespace: str | None = None  # for chains of requests that name no tenant, if those have a salt

    @property
    def names(self) -> frozenset[str]:
        """Of the models, adapters among them."""
        return frozenset(str(model["id"]) for model in self.models)

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of its models that are no adapters."""
        return tuple(sorted(str(model["id"]) for model in self.models if not isinstance(model.get("parent"), str)))

    @classmethod
    def of(cls, page: object) -> "ReplicaProfile":
        """Parse the page's JSON. Raises ReplicaFailed if it is not an OpenAI server's."""
        entries = page.get("data") if isinstance(page, dict) else None
        models: list[Any] = entries if isinstance(entries, list) else [None]
        if not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
            raise ReplicaFailed(Failure.GARBLED, "/v1/models has no list of models")
        ours: dict[str, Any] = next((m["kvtier"] for m in models if isinstance(m.get("kvtier"), dict)), {})
        size, fingerprint, namespace = (ours.get(name) for name in ("block_size", "fingerprint", "namespace"))
        if size is not None and not (type(size) is int and 1 <= size <= MAX_BLOCK_SIZE):
            raise ReplicaFailed(Failure.GARBLED, f"block_size {size!r:.40} is not a number of tokens from 1 to 4096")
        return cls(
            tuple(models),
            size,
            fingerprint if isinstance(fingerprint, str) and _DIGEST.fullmatch(fingerprint) else None,
            Publishers(*_publisher(ours.get("events")), *_publisher(ours.get("node"))),
            namespace if isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace) else None,
        )


def _publisher(value: object) -> tuple[str | None, str | None]:
    """The publisher's endpoint, and its replay endpoint."""
    found = value if isinstance(value, dict) else {}
    publish, replay = (at if isinstance(at := found.get(name), str) else None for name in ("publish", "replay"))
    return publish, replay if publish is not None else None


class ModelVersion:
    """What replicas must agree on so that one index serves them all. What one does not report, the next may."""

    def __init__(self, number: int, profile: ReplicaProfile, block_size: int | None) -> None:
        self._number = number
        self.block_size = block_size
        self.fingerprint = profile.fingerprint
        self.namespace = profile.namespace
        self._bases = profile.bases

    def takes(self, profile: ReplicaProfile, block_size: int | None) -> bool:
        """Whether nothing that a replica reports contradicts this."""
        both_known = None not in (profile.fingerprint, self.fingerprint)
        if both_known and (profile.fingerprint, profile.namespace) != (self.fingerprint, self.namespace):
            return False
        if None not in (block_size, self.block_size) and block_size != self.block_size:
            return False
        return both_known or profile.bases == self._bases

    def learn(self, profile: ReplicaProfile, block_size: int | None) -> None:
        """A replica that this takes has joined."""
        self.block_size = self.block_size or block_size
        if self.fingerprint is None and profile.fingerprint is not None:
            self.fingerprint, self.namespace = profile.fingerprint, profile.namespace

    def __str__(self) -> str:
        told = [
            f"fingerprint {self.fingerprint}" if self.fingerprint else "no fingerprint",
            f"block_size {self.block_size or 'not known'}",
            f"namespace {self.namespace}" if self.namespace else "",
            f"models {', '.join(self._bases)}",
        ]
        return ", ".join(filter(None, told))

    @property
    def seed(self) -> int:
        """Its own in rankings; the same in every router if the fingerprint is known."""
        return xxhash.xxh3_64_intdigest((self.fingerprint or str(self._number)).encode())
