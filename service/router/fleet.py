"""Every replica behind the router: who joins, who leaves, who serves which version of a model."""

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import xxhash

from kvtier.service.router.replica_list import Publishers, ReplicaSpec
from kvtier.service.router.replicas import EVERY, ModelVersion, ProbeSettings, Replica, ReplicaProfile, ReplicaState

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


_log = logging.getLogger(__name__)

_FIRST: Final = 3.0  # seconds the first look at all of them may take


class Fleet:
    """All replicas. They may have several versions of a model, as in a rolling update, and models of their own."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        terms: ProbeSettings,
        joined: Callable[[Replica, Publishers], None],
        left: Callable[[str], None],
    ) -> None:
        """`joined` is called with each replica that joins, and its publishers; `left` with the name of each leaver."""
        self._terms, self._joined, self._left = terms, joined, left
        self.replicas: list[Replica] = []
        self._leaving: list[Replica] = []  # removed from the list, with requests under way
        self._by_name: dict[str, Replica] = {}
        self._versions = LivingVersions()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._tending: asyncio.Task[None] | None = None  # while it runs
        self.change(specs)

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    @property
    def leaving(self) -> list[Replica]:
        """Removed replicas that still answer requests; without those whose name is on the list again."""
        return list({each.name: each for each in self._leaving if each.name not in self._by_name}.values())

    @property
    def version(self) -> ModelVersion | None:
        """What most replicas have now; None until one has joined."""
        return next(iter(self._versions.of(self.replicas)), None)

    def version_for(self, model: object, session: bytes | None, start: object) -> ModelVersion | None:
        """Which version a request of this model is for (`LivingVersions.choose`)."""
        return self._versions.choose([each for each in self.replicas if each.serves(model)], session, start)

    def adapter(self, model: object) -> str | None:
        """The LoRA adapter that this model name stands for; None if the name is a base model."""
        parents = {entry["id"]: entry.get("parent") for entry in self.models()}
        return model if isinstance(model, str) and isinstance(parents.get(model), str) else None

    def models(self) -> list[Mapping[str, Any]]:
        """The models they serve, each once, as `/v1/models` lists them."""
        found = {m["id"]: m for replica in self.replicas if replica.profile is not None for m in replica.profile.models}
        return list(found.values())

    async def start(self) -> None:
        """Probe each replica once, in the order of the list, then probe on until `stop`.

        A replica that hangs would delay the others. So those not probed within `_FIRST` seconds are probed side by
        side.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST):
                for replica in list(self.replicas):
                    await replica.look()
        self._tending = asyncio.create_task(self._tend())
        for replica in self.replicas:
            self._tasks[replica] = asyncio.create_task(replica.run())

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([] if self._tending is None else [self._tending])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in (*self.replicas, *self._leaving):
            replica.client.close()

    def change(self, specs: Sequence[ReplicaSpec]) -> None:
        """Replace the list. A replica that leaves gets nothing new, and goes when its last request has ended."""
        wanted = {spec.name: spec for spec in specs}
        for replica in list(self.replicas):
            if wanted.get(replica.name) != replica.spec:
                self.replicas.remove(replica)
                del self._by_name[replica.name]
                if (task := self._tasks.pop(replica, None)) is not None:
                    task.cancel()
                replica.leave()
                self._leaving.append(replica)
        for name, spec in wanted.items():
            if name not in self._by_name:
                replica = self._by_name[name] = Replica(spec, self._terms, self._judge)
                if self._tending is not None:
                    self._tasks[replica] = asyncio.create_task(replica.run())
        self.replicas = [self._by_name[name] for name in wanted]

    def _drop_idle(self) -> None:
        for replica in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(replica)
            replica.client.close()
            if replica.name not in self._by_name:
                self._left(replica.name)

    async def _tend(self) -> None:
        """Run until cancelled: drop idle leaving replicas, and give up answers that hanging replicas have not begun."""
        while True:
            self._drop_idle()
            if any(replica.state is ReplicaState.UP for replica in self.replicas):
                for replica in self.replicas:
                    if replica.is_hopeless:
                        replica.client.give_up()
            await asyncio.sleep(EVERY)

    def _judge(self, replica: Replica, profile: ReplicaProfile) -> str | None:
        reported, given = profile.block_size, replica.spec.block_size
        if None not in (reported, given) and reported != given:
            return f"block_size {reported}, but its --replica says {given}; give the value the replica has"
        publishers = replica.spec.publishers.agreed(profile.publishers.reached_at(replica.spec.host))
        if isinstance(publishers, str):
            return publishers
        others = self._versions.of(each for each in self.replicas if each is not replica)
        if self._versions.joined(replica, profile, reported or given, self.replicas) and others:
            assert replica.version is not None
            _log.warning(
                "replica %s has %s, where others have %s; conversations stay with one of them", replica.name,
                replica.version, others[0],
            )  # fmt: skip
        self._joined(replica, publishers)
        return None
