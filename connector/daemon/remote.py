"""The node's daemon as the tiers below L1: the same questions and promises, over its socket; bytes never cross it."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Final

from kvtier.connector.daemon.attachment import Attachment, Link
from kvtier.connector.daemon.fields import MAX_HASHES
from kvtier.connector.daemon.handshake import Hello
from kvtier.connector.daemon.messages import (
    Abandon,
    Check,
    Computed,
    Drain,
    Granted,
    Holds,
    Lookup,
    Operation,
    Release,
    RequestEnded,
    Reserve,
    Reset,
)
from kvtier.connector.daemon.remote_claims import ASK_AGAIN, RemoteClaim, RemoteClaims, widened
from kvtier.connector.daemon.remote_stores import RemoteReservation, heads_of, reserved, seals_of
from kvtier.connector.daemon.wire import MAX_ITEMS, unpack_found, unpack_grants
from kvtier.tiers import L2, BlockRecord, ChainHash, FormatError, Metrics, Outcome
from kvtier.tiers.hierarchy import Attribution, Claim, Ends, Filled, Pending, Wanted
from kvtier.tiers.host import HostRegion
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import RequestEnd

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
