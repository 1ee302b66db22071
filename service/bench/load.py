"""Drives the load: sessions begin at a rate or as many at once as asked for, on one server or on two by turns."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.service.bench.asking import Answer, Server
from kvtier.service.bench.patterns import ScriptedSession
from kvtier.tiers import ConfigError

_MOST: Final = 4096  # sessions under way at once: a server that falls behind at a rate must not take all memory


@dataclass(frozen=True, slots=True)
class LoadPace:
    """How fast sessions begin: `concurrency` at once, or `rate` a second on average (Poisson) if that is given."""

    concurrency: int = 4
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency {self.concurrency}: use a whole number from 1 on")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate {self.rate}: use a number of sessions a second above 0")


@dataclass(slots=True)
class MeasuredLoad:
    """All answers of each server, in the order in which they ended."""

    answers: list[list[Answer]]
    seconds: float = 0.0
    is_whole: bool = True  # False: it was interrupted
    in_flight: int = 0  # requests that were under way then
    began: float = field(default_factory=time.perf_counter)


async def drive(
    servers: Sequence[Server],
    sessions: Sequence[ScriptedSession],
    pace: LoadPace,
    done: Callable[[Answer], None],
    seed: int = 0,
) -> MeasuredLoad:
    """Ask everything of every server; `done` is called for each answer. Cancelled, it returns what there is.

    Of two servers each session goes to both, first to the one and then to the other, by turns.
    """
    measured = MeasuredLoad([[] for _ in servers])
    jobs = [
        (number, session)
        for session in sessions
        for number in (range(len(servers)) if session.number % 2 else reversed(range(len(servers))))
    ]
    driver = _Driver(servers, measured, done)
    try:
        if pace.rate is None and all(session.at is None for session in sessions):
            await driver.at_once(jobs, pace.concurrency)
        else:
            await driver.at_rate(jobs, (pace.rate or 1.0) * len(servers), random.Random(seed))
    except asyncio.CancelledError:
        measured.is_whole = False
    measured.seconds = time.perf_counter() - measured.began
    measured.in_flight = driver.in_flight
    return measured


class _Driver:
    def __init__(self, servers: Sequence[Server], measured: MeasuredLoad, done: Callable[[Answer], None]) -> None:
        self.in_flight = 0
        self._servers = servers
        self._measured = measured
        self._done = done

    async def at_once(self, jobs: Sequence[tuple[int, ScriptedSession]], concurrency: int) -> None:
        left = iter(jobs)

        async def work() -> None:
            for number, session in left:
                await self._run(number, session)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(work())

    async def at_rate(self, jobs: Sequence[tuple[int, ScriptedSession]], rate: float, dice: random.Random) -> None:
        """Each at its time, whether the ones before have ended or not; a trace's sessions at their own times."""
        room, at = asyncio.Semaphore(_MOST), 0.0

        async def work(number: int, session: ScriptedSession) -> None:
            try:
                await self._run(number, session)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for number, session in jobs:
                at = session.at if session.at is not None else at + dice.expovariate(rate)
                await asyncio.sleep(max(0.0, self._measured.began + at - time.perf_counter()))
                await room.acquire()
                group.create_task(work(number, session))

    async def _run(self, number: int, session: ScriptedSession) -> None:
        """A session's turns. One that fails ends it: the next turn would have no answer to go on from."""
        said: list[str] = []
        for turn in session.turns:
            if said and turn.wait:
                await asyncio.sleep(turn.wait)
            said.append(turn.text)
            began = time.perf_counter() - self._measured.began
            self.in_flight += 1
            answer = await self._servers[number].ask(session.system, said, turn.max_tokens)
            self.in_flight -= 1
            answer.began = began
            self._measured.answers[number].append(answer)
            self._done(answer)
            if answer.error is not None:
                return
            said.append(answer.text)
