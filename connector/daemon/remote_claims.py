"""A client's claims at the daemon: asked in one message, answered by news, kept by being renewed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvtier.connector.daemon.attachment import Attachment, Link
from kvtier.connector.daemon.fields import MAX_HASHES
from kvtier.connector.daemon.messages import Ask, Cancel, News, Release, Renew, Take
from kvtier.tiers import ChildBlock, FormatError, Metrics, Outcome
from kvtier.tiers.hierarchy import PENDING, Attribution, Claim, Pending
from kvtier.tiers.pool import Lease, lease_type

ASK_AGAIN: Final = 0.05  # seconds an answer that nothing is held is good for: asking costs a message
_ALONE_FROM: Final = 256  # blocks: so long a question is worth a message of its own

_NONE: Final[list[int]] = []  # nobody changes it

Released = Callable[[Link, int, Lease, bool], None]
"""(where it was leased, its number, itself, whether it was dropped)."""


@dataclass(eq=False)
class RemoteClaim(Claim):
    number: int = 0
    link: Link | None = None  # it was asked on; None where there was none
    asked_at: float = 0.0
    renewed_at: float = 0.0  # not after the daemon heard it last
    answered: bool = False
    polled: bool = False  # in vain: whoever polls again wants it sent
    told: bool = False  # a poll has returned the number
    again: bool = False  # asked for the second time: the first answer was lost
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class RemoteClaims:
    """What `RemoteTiers` does about claims, under its lock. `link` is what there is now, after reading."""

    def __init__(
        self,
        attachment: Attachment,
        metrics: Metrics,
        patience: float,
        deadline: float,
        clock: Callable[[], float],
        numbers: Iterator[int],
    ) -> None:
        """A claim without an answer for `patience` seconds is a miss, one that finds no link after `deadline` seconds.

        `numbers` gives each claim one of its own.
        """
        self._token_bytes = 4 * attachment.block_size  # that a block can have
        self._attachment = attachment
        self._metrics = metrics
        self._patience = patience
        self._deadline = deadline
        self._clock = clock
        self._numbers = numbers
        self._lease = lease_type()

    def ask(self, claim: RemoteClaim, link: Link | None) -> bool:
        """Leave the question to the next message, which others may share. False while the welcome is due.

        A second `poll` sends what is unsent, and puts the question where there was no welcome yet.
        """
        if link is None and claim.hashes and self._is_attaching():
            return False
        is_silent = link is not None and link.is_silent(self._clock(), self._deadline)
        if link is None or is_silent:
            missing = Outcome.TIMEOUT if is_silent else Outcome.BREAKER_OPEN
            if claim.found is None:
                claim.missing = missing
            else:  # asked for the second time, and counted as found at the first
                self._metrics.missed(missing, claim.found.loadable)
        if link is None or is_silent or not claim.hashes:
            self._settle(claim)
            return True
        claim.number, claim.link = next(self._numbers), link
        claim.asked_at = claim.renewed_at = self._clock()
        link.claims[claim.number] = claim
        hashes = claim.hashes[:MAX_HASHES]
        question = Ask(claim.number, claim.parent, claim.num_l1, claim.block_size, hashes, claim.ends)
        if len(hashes) >= _ALONE_FROM:
            self._attachment.send([question])
        else:
            self._attachment.later(link, question)
        return True

    def poll(self, claim: RemoteClaim, link: Link | None) -> int | Pending:
        """What the daemon has said. A promise is good for half of its deadline since it was last renewed.

        One that was lost, with its link or because a step took longer than that, says nothing about the blocks: they
        are asked for anew, once.
        """
        if claim.link is None and not claim.answered:
            if not self.ask(claim, link):
                return PENDING
            claim.polled = True  # the step it was asked in is over
        now = self._clock()
        if claim.answered and not len(claim.slots):
            claim.told = True
            return 0
        if link is None or claim.link is not link:
            return self._lost(claim, link, Outcome.BREAKER_OPEN)
        if not claim.answered:
            if claim.polled and link.unsent:
                if any(type(each) is Ask and each[0] == claim.number for each in link.unsent):
                    claim.asked_at = claim.renewed_at = now  # nobody was asked before
                self._attachment.send()
            claim.polled = True
            if now - claim.asked_at < self._patience and not link.is_silent(now, self._deadline):
                return PENDING
            return self._given_up(claim, Outcome.TIMEOUT)
        since, deadline = now - claim.renewed_at, link.welcome.lease_deadline
        if since >= deadline / 2:
            return self._lost(claim, link, Outcome.TIMEOUT)
        if since >= deadline / 8 and self._attachment.send([Renew([claim.number])]):
            claim.renewed_at = now
        claim.told = True
        return len(claim.slots)

    def take(self, claim: RemoteClaim, link: Link | None, released: Released) -> Lease:
        """The promise as a lease.

        The daemon has our word in its socket before half of the deadline is over, and reads that before it lets a
        promise lapse: so it never gives away slots that are copied from.
        """
        if not len(claim.slots):
            self.cancel(claim)  # not answered yet: the daemon must not keep a promise that nobody will take
            return _empty()
        if link is None or claim.link is not link:
            self._given_up(claim, Outcome.BREAKER_OPEN)
            return _empty()
        sent = self._attachment.send([Take([claim.number])])
        is_late = self._clock() - claim.renewed_at >= link.welcome.lease_deadline / 2
        if not sent or is_late:
            self._attachment.later(link, Release([claim.number]))
            self._given_up(claim, Outcome.TIMEOUT)
            return _empty()
        names = claim.hashes[claim.num_l1 : claim.num_l1 + len(claim.slots)]
        lease = self._lease(names, claim.slots, claim.generations, partial(released, link, claim.number))
        link.held.add(claim.number)
        self._settle(claim)
        return lease

    def cancel(self, claim: RemoteClaim) -> None:
        """The daemon hears of it with the next message. Idempotent."""
        self._withdraw(claim)
        self._settle(claim)

    def take_in(self, news: News) -> None:
        """Note what the daemon said of a claim; one that was let go meanwhile is passed over."""
        link = self._attachment.link
        claim = link.claims.get(news.claim) if link is not None else None
        if link is None or not isinstance(claim, RemoteClaim):
            return
        num_asked, slots = min(len(claim.hashes), MAX_HASHES), news.slots
        is_outside = len(slots) > 0 and max(slots) >= link.welcome.num_slots
        is_other = news.found.blocks != num_asked or len(slots) > num_asked - claim.num_l1 or claim.answered
        is_too_long = any(len(child.tokens) > self._token_bytes for child in news.children)
        if is_other or is_outside or is_too_long:
            self._attachment.cut(FormatError("news of other blocks than those asked about"))
            return
        num_lost = claim.found.loadable - news.found.loadable if claim.found is not None else 0
        if num_lost > 0:  # counted as found at the first asking
            self._metrics.missed(Outcome.EVICTED, num_lost)
        claim.found, claim.refusal, claim.answered = widened(news.found, len(claim.hashes)), news.refusal, True
        claim.slots, claim.generations, claim.meeting = slots, news.generations, news.meeting
        children = news.children
        if len(claim.hashes) > num_asked:  # the daemon does not know which block comes next
            children = [child for child in children if child.chain_hash != claim.hashes[num_asked]]
        claim.behind = partial(_beginning_with, children) if children else None
        if news.refusal is Outcome.RECOMPUTE:
            self._metrics.missed(Outcome.RECOMPUTE, news.found.loadable)
        if not slots:
            claim.good_until = self._clock() + max(news.good_for, ASK_AGAIN)

    def has_news(self) -> bool:
        """Whether the daemon has said something that no poll has returned."""
        link = self._attachment.link
        claims = link.claims.values() if link is not None else ()
        return any(isinstance(claim, RemoteClaim) and claim.answered and not claim.told for claim in claims)

    def _is_attaching(self) -> bool:
        """Whether the daemon was said hello to a moment ago: then its answer is worth waiting for."""
        since = self._attachment.attaching_since
        return since is not None and self._clock() - since < self._deadline

    def _lost(self, claim: RemoteClaim, link: Link | None, reason: Outcome) -> int | Pending:
        """Ask once more, where there is somebody to ask; else nothing comes of it, for this reason."""
        if claim.again or (link is None and not self._is_attaching()):
            return self._given_up(claim, reason)
        self._withdraw(claim)
        claim.link, claim.slots, claim.generations = None, _NONE, _NONE
        claim.again, claim.answered, claim.told = True, False, False
        self.ask(claim, link)
        self._attachment.send()  # it has waited for a step already
        return PENDING

    def _given_up(self, claim: RemoteClaim, reason: Outcome) -> int:
        """Nothing comes of what was asked for or promised: count why."""
        num_asked = len(claim.hashes) - claim.num_l1 if claim.found is None else claim.found.loadable
        self._metrics.missed(reason, len(claim.slots) or num_asked)
        if claim.found is None:
            claim.missing = None
        self.cancel(claim)
        claim.told = True
        return 0

    def _withdraw(self, claim: RemoteClaim) -> None:
        was_open = claim.link is not None and claim.link.claims.pop(claim.number, None) is not None
        if claim.link is not None and was_open and (len(claim.slots) or not claim.answered):  # else it has forgotten it
            self._attachment.later(claim.link, Cancel([claim.number]))

    def _settle(self, claim: RemoteClaim) -> None:
        """Nothing (more) comes of it."""
        if claim.link is not None:
            claim.link.claims.pop(claim.number, None)
        if claim.found is None:
            claim.found = Attribution(len(claim.hashes), l1=claim.num_l1, miss=len(claim.hashes) - claim.num_l1)
            claim.good_until = self._clock() + ASK_AGAIN
        claim.slots = claim.generations = _NONE
        claim.answered = True


def widened(found: Attribution, num_blocks: int) -> Attribution:
    """The same for a longer chain, of whose head alone the daemon was asked."""
    more = num_blocks - found.blocks
    return found if not more else Attribution(num_blocks, miss=found.miss + more, **found.by_tier)


def _empty() -> Lease:
    def released(lease: Lease, leaked: bool) -> None:
        lease.on_release = None

    return Lease([], _NONE, _NONE, released)


def _beginning_with(children: Sequence[ChildBlock], start: bytes) -> Sequence[ChildBlock]:
    return [child for child in children if child.tokens.startswith(start)] if start else children
