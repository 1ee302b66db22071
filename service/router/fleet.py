"""Every replica behind the router: who joins, who leaves, and who serves which model."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from kvtier.service.router.replica_profile import ModelVersion, ReplicaProfile
from kvtier.service.router.replicas import EVERY, ProbeSettings, Replica, ReplicaState
from kvtier.service.router.spec import Publishers, ReplicaSpec
from kvtier.service.router.versions import LivingVersions

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
