"""Asking the tiers that nodes share what they hold: in the background, once however many requests wait."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.port import TierPort
from kvtier.tiers.progress import Progress
from kvtier.tiers.tier import ChainHash, Outcome

_MOST: Final = 8192  # blocks in one question: a longer chain is asked about in pieces


@dataclass(eq=False, slots=True)
class Question:
    """One question on its way: which leading blocks of a chain does a shared tier hold? Implements `Job`."""

    owner: "Locator"
    port: TierPort
    hashes: list[ChainHash]
    deadline: float
    done: bool = False  # answered, or given up: the port's `lookup` knows what there is to know
    num_held: int = 0

    def run(self) -> None:
        """Ask, on an I/O thread."""
        self.owner.answered(self, self.port.locate(self.hashes))

    def drop(self, outcome: Outcome) -> None:
        """It will not be asked."""
        self.owner.answered(self, outcome)

    def overdue(self) -> None:
        """Nobody waits for it any more."""
        self.port.failed("read")
        self.owner.answered(self, Outcome.TIMEOUT)


class Locator:
    """All questions of one hierarchy; two about the same blocks are one.

    Lock: `progress` (the hierarchy's), never held across I/O. Law (`check`): the index names questions not answered.
    """

    def __init__(self, ports: Sequence[TierPort], progress: Progress, clock: Callable[[], float]) -> None:
        self._ports = ports
        self._progress = progress
        self._clock = clock
        self._open: dict[tuple[str, ChainHash], Question] = {}  # (tier, first block) → the question
        self._unread: set[Question] = set()  # answered, and nobody has looked yet

    def ask(self, hashes: Sequence[ChainHash]) -> list[Question]:
        """Ask every shared tier that answers about these blocks, which no tier is known to hold."""
        asked = []
        for port in self._ports:
            if port.locates and hashes:
                with self._progress:
                    question = self._open.get((port.name, hashes[0]))
                if question is None or question.hashes != list(hashes[: len(question.hashes)]):
                    question = self._submit(port, list(hashes[:_MOST]))
                if question is not None:
                    asked.append(question)
        return asked

    def answered(self, question: Question, result: int | Outcome) -> None:
        """On an I/O thread, or on whose tick the deadline passed."""
        with self._progress:
            if not question.done:
                question.done = True
                question.num_held = result if not isinstance(result, Outcome) else 0
                self._unread.add(question)
                if self._open.get((question.port.name, question.hashes[0])) is question:
                    del self._open[question.port.name, question.hashes[0]]
                self._progress.notify_all()

    def read(self, questions: Sequence[Question]) -> None:
        """Whoever asked has seen the answers, or does not want them any more."""
        with self._progress:
            self._unread.difference_update(questions)

    def has_news(self) -> bool:
        """Whether an answer is there that nobody has read. The caller holds the lock."""
        return bool(self._unread)

    def check(self) -> None:
        """The bookkeeping law."""
        with self._progress:
            if any(question.done for question in self._open.values()):
                raise AssertionError("the index of questions names an answered one")

    def _submit(self, port: TierPort, hashes: list[ChainHash]) -> Question | None:
        question = Question(self, port, hashes, self._clock() + port.settings.deadline)
        with self._progress:
            self._open[port.name, hashes[0]] = question
        if not port.queue.submit(question, urgent=True):
            question.drop(Outcome.QUEUE_FULL)
            return None
        return question
