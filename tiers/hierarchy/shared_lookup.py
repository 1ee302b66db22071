"""Asking the tiers that nodes share what they hold: in the background, once however many requests wait."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers import ChainHash, Outcome
from kvtier.tiers.hierarchy.cache_tiers import NewsCondition
from kvtier.tiers.hierarchy.lower_tier import TierPort

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
    num_asking: int = 0  # who have not read the answer yet

    def run(self) -> int | Outcome:
        return self.port.locate(self.hashes)

    def end(self, result: int | Outcome, *, late: bool) -> None:
        if not late:
            self.owner.answered(self, result)

    def overdue(self) -> None:
        self.port.failed("read")
        self.owner.answered(self, Outcome.TIMEOUT)


class Locator:
    """All questions of one hierarchy; two about the same blocks are one.

    Lock: `news` (the hierarchy's), never held across I/O. Law (`check`): the index names questions not answered.
    """

    def __init__(self, ports: Sequence[TierPort], news: NewsCondition, clock: Callable[[], float]) -> None:
        self._ports = ports
        self._news = news
        self._clock = clock
        self._open: dict[tuple[str, ChainHash], Question] = {}  # (tier, first block) → the question
        self.unread: set[Question] = set()  # answered, and nobody has looked yet

    def ask(self, hashes: Sequence[ChainHash]) -> list[Question]:
        """Ask every shared tier that answers about these blocks, which no tier is known to hold."""
        asked = []
        for port in self._ports:
            if port.locates and hashes:
                if (question := self._joined(port, hashes)) is None:
                    question = self._submit(port, list(hashes[:_MOST]))
                if question is not None:
                    asked.append(question)
        return asked

    def answered(self, question: Question, result: int | Outcome) -> None:
        """On an I/O thread, or on whose tick the deadline passed."""
        with self._news:
            question.done = True
            question.num_held = result if not isinstance(result, Outcome) else 0
            if question.num_asking > 0:
                self.unread.add(question)
            if self._open.get((question.port.name, question.hashes[0])) is question:
                del self._open[question.port.name, question.hashes[0]]
            self._news.notify_all()

    def read(self, questions: Sequence[Question]) -> None:
        """Whoever asked has seen the answers, or does not want them any more: once for each time it asked."""
        with self._news:
            for question in questions:
                question.num_asking -= 1
            self.unread.difference_update(questions)

    def check(self) -> None:
        with self._news:
            if any(question.done for question in self._open.values()):
                raise AssertionError("the index of questions names an answered one")

    def _joined(self, port: TierPort, hashes: Sequence[ChainHash]) -> Question | None:
        with self._news:
            question = self._open.get((port.name, hashes[0]))
            if question is None or question.hashes != list(hashes[: len(question.hashes)]):
                return None
            question.num_asking += 1
            return question

    def _submit(self, port: TierPort, hashes: list[ChainHash]) -> Question | None:
        question = Question(self, port, hashes, self._clock() + port.settings.deadline, num_asking=1)
        with self._news:
            self._open[port.name, hashes[0]] = question
        if not port.queue.submit(question, urgent=True):
            self.read([question])
            question.end(Outcome.QUEUE_FULL, late=False)
            return None
        return question
