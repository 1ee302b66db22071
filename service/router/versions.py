"""Which replicas compute alike: a model's version lives as long as a replica that has it, and keeps conversations."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

import xxhash

from kvtier.service.router.replica_profile import ModelVersion, ReplicaProfile
from kvtier.service.router.replicas import Replica, ReplicaState

_REMEMBERED: Final = 1 << 16  # conversations
_PRESENT: Final = (ReplicaState.UP, ReplicaState.DRAINING, ReplicaState.DOWN)


class LivingVersions:
    """The versions that replicas have now. Belongs to the router's event loop.

    A conversation stays with its version while that has a replica up. New ones are shared out by how many replicas a
    version has.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._of_session: OrderedDict[bytes, ModelVersion] = OrderedDict()  # the last used at the end

    def joined(
        self, replica: Replica, profile: ReplicaProfile, block_size: int | None, fleet: Sequence[Replica]
    ) -> bool:
        """Give a replica its version; whether none of the others had it."""
        living = self.of(each for each in fleet if each is not replica)
        version = next((each for each in living if each.takes(profile, block_size)), None)
        is_new = version is None
        replica.version = version = version or ModelVersion(next(self._numbers), profile, block_size)
        version.learn(profile, block_size)
        return is_new

    @staticmethod
    def of(replicas: Iterable[Replica]) -> list[ModelVersion]:
        """What these replicas have, that of the most first."""
        found = Counter(each.version for each in replicas if each.version is not None and each.state in _PRESENT)
        return [version for version, _ in found.most_common()]

    def choose(self, replicas: Sequence[Replica], session: bytes | None, start: object) -> ModelVersion | None:
        """The version for a request that these replicas could serve, those that are up first; None if there is none.

        `session` identifies its conversation; without one, prompts of one `start` go to one version.
        """
        able = [each for each in replicas if each.state is ReplicaState.UP] or list(replicas)
        number = Counter(each.version for each in able if each.version is not None)
        if session is None:
            return _drawn(number, start)
        version = self._of_session.pop(session, None)
        if version not in number:
            version = _drawn(number, session)
        if version is not None:
            self._of_session[session] = version
            if len(self._of_session) > _REMEMBERED:
                self._of_session.popitem(last=False)
        return version


def _drawn(number: Counter[ModelVersion], key: object) -> ModelVersion | None:
    """One version, as likely as it has replicas: weighted rendezvous hashing, so that few keys move with a replica."""
    if len(number) <= 1:
        return next(iter(number), None)

    told = repr(key).encode()

    def rank(version: ModelVersion) -> float:
        share = (xxhash.xxh3_64_intdigest(told, version.seed) + 0.5) / 2**64
        return -number[version] / math.log(share)

    return max(number, key=rank)
