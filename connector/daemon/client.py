"""The node's daemon as the tiers below L1: the same questions and promises, over its socket; bytes never cross it."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Final

from kvtier.connector.daemon.fields import MAX_HASHES
from kvtier.connector.daemon.handshake import Hello
from kvtier.connector.daemon.link import Attachment, Link
from kvtier.connector.daemon.messages import (
    Abandon,
    Ask,
    Cancel,
    Check,
    Computed,
    Drain,
    Granted,
    Holds,
    Lookup,
    News,
    Operation,
    Release,
    Renew,
    RequestEnded,
    Reserve,
    Reset,
    Seal,
    Take,
)
from kvtier.connector.daemon.wire import MAX_ITEMS, unpack_found, unpack_grants
from kvtier.tiers import L2, BlockRecord, ChainHash, ChildBlock, FormatError, Metrics, Outcome
from kvtier.tiers.hierarchy import PENDING, Attribution, Claim, Ends, Filled, Pending, Wanted
from kvtier.tiers.host import HostRegion
from kvtier.tiers.pool import Causes, Lease, Reservation, lease_type
from kvtier.tiers.reuse import RequestEnd

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


@dataclass(eq=False, slots=True)
class RemoteReservation(Reservation):
    number: int = 0
    link: Link | None = None


def heads_of(wanted: Sequence[Wanted]) -> Sequence[Wanted]:
    """As much of each as one message takes: mostly all."""
    most, room = max(len(each.hashes) for each in wanted), MAX_HASHES
    if most <= MAX_ITEMS and most * len(wanted) <= room:
        return wanted
    heads = []
    for each in wanted:
        if (count := min(MAX_ITEMS, room)) < len(each.hashes):
            each = replace(each, hashes=each.hashes[:count], is_tail=False)
        room -= len(each.hashes)
        heads.append(each)
    return heads


def reserved(
    link: Link,
    first: int,
    wanted: Sequence[Wanted],
    granted: Sequence[Granted | None],
    ended: Callable[[Reservation, bool], None],
) -> list[Reservation | None]:
    """The slots that were granted for what was wanted, held by the link under numbers from `first` on."""
    made: list[Reservation | None] = []
    held: list[int] = []
    for number, (each, grant) in enumerate(zip(wanted, granted, strict=True), first):
        if grant is None:
            made.append(None)
            continue
        indices, slots, generations = grant
        hashes = list(each.hashes)
        parents: list[ChainHash | None] = [each.parent] if len(hashes) == 1 else [each.parent, *hashes[:-1]]
        if len(indices) < len(hashes):
            hashes, parents = [hashes[i] for i in indices], [parents[i] for i in indices]
        made.append(
            RemoteReservation(hashes, indices, slots, generations, parents, 0, len(indices), ended, number, link)
        )
        if indices:
            held.append(number)
    link.held.update(held)
    return made


def seals_of(filled: Sequence[tuple[RemoteReservation, Sequence[bytes], int]]) -> list[Seal]:
    """What tells the daemon of filled reservations, each with its tokens and epoch: mostly one message for all."""
    seals = [Seal(0, [], [], [])]
    for reservation, tokens, epoch in filled:
        seal = seals[-1]
        if epoch != seal.epoch or max(len(seal.reservations) + 1, len(seal.tokens) + len(tokens)) > MAX_ITEMS:
            seals.append(seal := Seal(epoch, [], [], []))
        seal.reservations.append(reservation.number)
        seal.counts.append(len(tokens))
        seal.tokens.extend(tokens)
    return [seal for seal in seals if seal.reservations]


_ANSWER: Final = 0.25  # seconds
_LATE: Final = 0.5  # seconds an answer may come after the time the daemon itself was given
_RESET: Final = 10.0
_CHECK: Final = 30.0
_LOOK: Final = 0.02  # seconds between two looks, should another thread have read our answer


class RemoteTiers:
    """`CacheTiers` behind a Unix socket. Thread-safe; nothing raises for a daemon that is gone, slow or mad.

    Without a daemon every question is a miss and every store is dropped, counted as `breaker_open`. What was promised,
    leased and reserved on a connection is void with it; ending it is harmless. Operations that need no answer are
    sent with the next one that does, or by `tick`.
    Lock: `_lock` guards everything; never held while waiting for the daemon.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        deadline: float = _ANSWER,
    ) -> None:
        """Attach; see `Attachment.start` for the errors. A claim without an answer for `patience` seconds is a miss.

        An answer from the daemon's memory may take `deadline` seconds: later than that it is as good as gone.
        """
        self.metrics = Metrics()
        self._clock = clock
        self._deadline = deadline
        self._lock = Lock()
        self._waiting_call = Lock()  # the daemon does one operation that waits at a time for each client
        self._attachment = Attachment(path, hello, clock)
        self._numbers = count(1)  # of claims, reservations and requests; under the lock, so that several are in a row
        self._claims = RemoteClaims(self._attachment, self.metrics, patience, deadline, clock, self._numbers)
        self._dropped: deque[Callable[[], None]] = deque()  # left by `__del__`, which may run anywhere
        self._closed = False
        self.is_late, self.is_short, self.sends_later = False, False, True
        self._pid = os.getpid()
        self._attachment.start()

    @property
    def region(self) -> HostRegion | None:
        """L2's memory, the daemon's: another one once it was restarted."""
        return self._attachment.region

    @property
    def epoch(self) -> int:
        """Counts resets, and each time the daemon was found again."""
        return self._attachment.epoch

    @property
    def num_slots(self) -> int:
        region = self._attachment.region
        return region.num_slots if region is not None else 0

    @property
    def has_lower(self) -> bool:
        return self._attachment.has_lower

    @property
    def member(self) -> tuple[str, bytes] | None:
        """The socket, and what the daemon calls us: for `attachment.join`. None while there is no link."""
        link = self._attachment.link
        return (str(self._attachment.path.absolute()), link.welcome.client) if link is not None else None

    # a request's question and promise

    def ask(
        self,
        hashes: Sequence[ChainHash],
        parent: ChainHash,
        num_l1: int = 0,
        *,
        block_size: int = 0,
        ends: Ends = Ends.FRONT,
    ) -> Claim:
        """Leave the question to the next message; the answer is news for a later `poll`."""
        claim = RemoteClaim(list(hashes), parent, num_l1, block_size, ends=ends)
        with self._lock:
            self._claims.ask(claim, self._pump())
        return claim

    def poll(self, claim: Claim) -> int | Pending:
        """What the daemon has said so far, without asking it; renews the promise now and then."""
        assert isinstance(claim, RemoteClaim)
        with self._lock:
            return self._claims.poll(claim, self._pump())

    def take(self, claim: Claim) -> Lease:
        """The promised blocks' lease; empty where the promise lapsed or the daemon is gone."""
        assert isinstance(claim, RemoteClaim)
        with self._lock:
            return self._claims.take(claim, self._pump(), self._released)

    def cancel(self, claim: Claim) -> None:
        assert isinstance(claim, RemoteClaim)
        with self._lock:
            self._claims.cancel(claim)

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT, causes: Causes | None = None) -> None:
        """Into this client's own metrics. What became of blocks, the daemon counts."""
        if missing is not None and self._attachment.link is None:
            missing = Outcome.BREAKER_OPEN
        self.metrics.looked_up(found, missing)

    # storing

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        """One round trip, with all that was left unsent. If it takes too long, nothing gets a slot (`is_late`).

        While such an answer is still due the next steps store nothing, and wait for nothing.
        """
        if not wanted:
            return []
        heads = heads_of(wanted[:MAX_ITEMS])
        with self._lock:
            first, *_ = [next(self._numbers) for _ in heads]
            link = self._pump()
            now = self._clock()
            self.is_late = link is not None and (link.late_since is not None or link.is_silent(now, self._deadline))
            if self.is_late:
                return self._refused(wanted, None if may_retry else Outcome.TIMEOUT)
        link, answers = self._call(Reserve(first, heads), self._deadline)
        with self._lock:
            if answers is None and link is not None:  # it may answer yet: nobody fills what it grants then
                self._attachment.later(link, Abandon(Outcome.TIMEOUT, list(range(first, first + len(heads)))))
            grants = self._grants(link, heads, answers)
            if grants is None or link is None:
                self.is_late = answers is None and link is not None and not self._closed
                reason = Outcome.CLOSED if self._closed else Outcome.BREAKER_OPEN if link is None else Outcome.TIMEOUT
                return self._refused(wanted, None if self.is_late and may_retry else reason)
            reservations = reserved(link, first, heads, grants, self._ended)
        looked_at = sum([len(head.hashes) for head, each in zip(heads, reservations, strict=True) if each is not None])
        if missing := sum([len(each.hashes) for each in wanted]) - looked_at:
            self.metrics.dropped(L2, Outcome.NO_SLOT, missing)
        return [*reservations, *[None] * (len(wanted) - len(heads))]

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """The daemon hashes and publishes the blocks when it hears of it."""
        self.seal_each([(reservation, [record.tokens for record in records], epoch)])

    def seal_each(self, stores: Sequence[Filled]) -> None:
        """As `seal`, in one message."""
        with self._lock:
            filled = []
            for reservation, tokens, epoch in stores:
                assert isinstance(reservation, RemoteReservation)
                link = reservation.link
                if not self._close(reservation) or link is None:
                    continue
                if link is self._attachment.link and epoch >= link.epoch_base:
                    filled.append((reservation, tokens, epoch - link.epoch_base))
                    continue
                reason = Outcome.CLOSED if link is not self._attachment.link else Outcome.EPOCH
                self.metrics.dropped(L2, reason, len(reservation))
                self._attachment.later(link, Abandon(reason, [reservation.number]))
            if (now := self._attachment.link) is not None:
                for seal in seals_of(filled):
                    self._attachment.later(now, seal)
            self.metrics.stored(L2, sum([len(tokens) for _, tokens, _ in filled]))

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        assert isinstance(reservation, RemoteReservation)
        with self._lock:
            self._abandon(reservation, reason)

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        """The daemon is not told: it keeps what we hold until our process has ended."""
        assert isinstance(reservation, RemoteReservation)
        with self._lock:
            if reservation.num_open:
                reservation.num_open = 0  # but its number stays among those held
                self.metrics.dropped(L2, reason, len(reservation))
                self._attachment.goes_silently = True

    @property
    def wanting(self) -> dict[str, str]:
        """The daemon, while it is away."""
        away = self._attachment.away
        return {} if away is None else {"daemon": away}

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        with self._lock:
            if (link := self._attachment.link) is not None:
                self._attachment.later(link, Computed(num_tokens, seconds, int(position)))

    def ended(self, end: RequestEnd) -> None:
        """Goes with the next message."""
        with self._lock:
            if (link := self._attachment.link) is not None:
                self._attachment.later(link, RequestEnded(end))

    # the rest

    def locate(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """Waits for the daemon: `timeout` is what it has for the tiers nodes share."""
        names = list(hashes[:MAX_HASHES])
        answers = self._call_waiting(Lookup(names, timeout), timeout)
        try:
            found = unpack_found(answers[0]) if answers else Attribution(len(names), miss=len(names))
        except (TypeError, ValueError, AssertionError, FormatError) as error:
            self._cut(error)
            found = Attribution(len(names), miss=len(names))
        return widened(found, len(hashes))

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """A round trip."""
        _, answers = self._call(Holds(hashes[:MAX_HASHES]), self._deadline)
        held = answers[0] if answers and isinstance(answers[0], bytes) else b""
        return [bool(each) for each in held[: len(hashes)]] + [False] * (len(hashes) - len(held))

    def wait_news(self, timeout: float) -> None:
        """Wait for the daemon to say something, unless it has said something no `poll` has returned."""
        with self._lock:
            self._pump()
            self._attachment.send()
            if self._claims.has_news():
                return
            connection = self._attachment.connection
        if connection is None:
            time.sleep(min(timeout, ASK_AGAIN))
        else:
            connection.wait(timeout)

    def tick(self) -> None:
        """Send what was left unsent, take in what has arrived, attach anew where it is time."""
        with self._lock:
            self._pump()
            self._attachment.send()

    def reset(self) -> None:
        """The daemon forgets everything: now, or before this client uses it again."""
        with self._lock:
            self._attachment.reset_owed(True)
            link = self._attachment.link
        is_done = self._call_waiting(Reset(), _RESET) == [True]
        with self._lock:
            if is_done:
                self._attachment.reset_owed(False)
            elif link is not None and self._attachment.link is link:  # the next link begins with it
                self._attachment.cut(TimeoutError(f"no reset within {_RESET:g} s"))

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """The daemon waits, for the stores of all its clients; False where it is not there."""
        return self._call_waiting(Drain(timeout, below), timeout) == [True]

    def stats(self) -> dict[str, float]:
        """What this client has counted; the daemon tells its own by HTTP."""
        return self.metrics.snapshot()

    def check(self) -> None:
        """Have the daemon hold the laws of this model's tiers; nothing where it is not there."""
        answers = self._call_waiting(Check(), _CHECK)
        if answers and answers[0]:
            raise AssertionError(str(answers[0]))

    def close(self, timeout: float = 5.0) -> None:
        """Hand over what was sealed and hang up: the daemon goes on writing it. Unmaps; no copy is under way.

        In a forked child there is nothing to close.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pump()
                self._attachment.close(timeout)

    # under the lock

    def _pump(self) -> Link | None:
        """Take in what has arrived. Returns the link there is then."""
        while self._dropped:
            self._dropped.popleft()()
        for reply in self._attachment.pump():
            for news in reply.news:
                self._claims.take_in(news)
        return self._attachment.link

    def _refused(self, wanted: Sequence[Wanted], reason: Outcome | None) -> list[Reservation | None]:
        """Nothing gets a slot. With a `reason` all of it counts as dropped."""
        if reason is not None:
            self.metrics.dropped(L2, reason, sum(len(each.hashes) for each in wanted))
        return [None] * len(wanted)

    def _grants(
        self, link: Link | None, wanted: Sequence[Wanted], answers: list[Any] | None
    ) -> list[Granted | None] | None:
        """What the daemon granted; None where there is no daemon, or it has not answered what it was asked."""
        if link is None or answers is None or link is not self._attachment.link:
            return None
        try:
            (answer,) = answers
            return unpack_grants(answer, [len(each.hashes) for each in wanted], link.welcome.num_slots)
        except (ValueError, FormatError) as error:
            self._attachment.cut(error)
            return None

    def _close(self, reservation: RemoteReservation) -> bool:
        """No copy into it is under way. False where it was closed already."""
        was_open, reservation.num_open = reservation.num_open > 0, 0
        if was_open and reservation.link is not None:
            reservation.link.held.discard(reservation.number)
        return was_open

    def _abandon(self, reservation: RemoteReservation, reason: Outcome) -> None:
        if self._close(reservation) and reservation.link is not None:
            self.metrics.dropped(L2, reason, len(reservation))
            self._give_back(reservation.link, Abandon(reason, [reservation.number]))

    # calls, without the lock

    def _call(
        self, operation: Operation, timeout: float, *, alone: bool = False
    ) -> tuple[Link | None, list[Any] | None]:
        """Send, and wait for the answer: (the link it was sent on, the answers). None if they did not come in time.

        Of operations that wait there, `alone`, the daemon does one at a time: none is sent while another is due.
        """
        end = self._clock() + timeout
        with self._lock:
            link = self._attachment.link or self._pump()
            if link is None or (alone and link.overdue_aside):
                return None, None
            number = next(self._numbers)
            if alone:
                self._attachment.send()
            self._attachment.send([operation], number)
        while True:
            left = end - self._clock()  # where none is left, a last look: it may have been us who slept, not the daemon
            link.connection.wait(max(0.0, min(left, _LOOK)))
            with self._lock:
                if self._pump() is not link:
                    return link, None
                if number in link.answers:
                    return link, link.answers.pop(number)
                if left <= 0:  # under the lock of the last look: another thread may read our answer behind it
                    self._attachment.give_up(link, number, aside=alone)
                    return link, None

    def _call_waiting(self, operation: Operation, timeout: float) -> list[Any]:
        """An operation that waits there, for `timeout` seconds or less."""
        end = self._clock() + timeout + _LATE
        if not self._waiting_call.acquire(timeout=timeout + _LATE):
            return []
        try:
            while timeout and (link := self._attachment.link) and link.overdue_aside and self._clock() < end:
                link.connection.wait(_LOOK)
                with self._lock:
                    self._pump()
            return self._call(operation, timeout + _LATE, alone=True)[1] or []
        finally:
            self._waiting_call.release()

    def _cut(self, why: Exception) -> None:
        with self._lock:
            self._attachment.cut(why)

    # the ends of leases and reservations

    def _released(self, link: Link, number: int, lease: Lease, leaked: bool) -> None:
        if leaked:
            lease.on_release = None
            self._dropped.append(partial(self._let_go, link, number))
            return
        with self._lock:
            if lease.on_release is not None:
                lease.on_release = None
                self._let_go(link, number)

    def _let_go(self, link: Link, number: int) -> None:
        link.held.discard(number)
        self._give_back(link, Release([number]))

    def _give_back(self, link: Link, operation: Operation) -> None:
        """With the next message; at once if nothing is asked or held any more, since the next may be hours away."""
        self._attachment.later(link, operation)
        if link is self._attachment.link and not link.held and not link.claims:
            self._attachment.send()

    def _ended(self, reservation: Reservation, dropped: bool) -> None:
        assert isinstance(reservation, RemoteReservation)
        if dropped:
            self._dropped.append(partial(self._abandon, reservation, Outcome.ABORTED))
            return
        with self._lock:
            self._abandon(reservation, Outcome.ABORTED)
