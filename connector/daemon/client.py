"""The daemon's client: the tiers below L1 over its socket. Block bytes never cross it: they are in shared memory."""

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Final

from msgspec import Raw

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.link import Attachment, Link, RemoteClaim
from kvtier.tiers import L2, BlockRecord, ChainHash, ChildBlock, FormatError, Metrics, Outcome, tracing
from kvtier.tiers.hierarchy import PENDING, Attribution, Claim, Filled, Overlap, Pending, Wanted
from kvtier.tiers.host import HostRegion
from kvtier.tiers.pool import Causes, Lease, Reservation, lease_type
from kvtier.tiers.reuse import RequestEnd

_ANSWER: Final = 0.25  # seconds
_LATE: Final = 0.5  # seconds an answer may take beyond the daemon's own deadline
_RESET: Final = 10.0
_CHECK: Final = 30.0
_LOOK: Final = 0.02  # seconds between two checks whether another thread has read our answer
_ASK_AGAIN: Final = 0.05  # seconds before a lookup that missed may be repeated: it costs a message
_KEPT_IDLE: Final = 1.0  # seconds that preallocated slots are kept without a store
_ALONE_FROM: Final = 256  # blocks: a lookup of so many is sent at once
_TRUE, _WHOLE = Raw(b"\xc3"), Raw(b"\xa0")  # answers: true, and the empty text
_NONE: Final[list[int]] = []  # never mutated


@dataclass(eq=False, slots=True)
class RemoteReservation(Reservation):
    number: int = 0
    link: Link | None = None


class RemoteTiers:
    """`CacheTiers` behind a Unix socket. Thread-safe; nothing raises if the daemon is gone, slow or sends garbage.

    Without a daemon every lookup is a miss and every store is dropped, counted as `breaker_open`. Promises, leases and
    reservations are void once their connection is lost; releasing them is harmless. Operations that need no answer are
    sent with the next one that does, or by `tick`. Lookups are batched into the next message.
    Lock: `_lock` guards everything; never held while waiting for the daemon.
    """

    def __init__(
        self,
        path: Path,
        hello: wire.Hello,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        deadline: float = _ANSWER,
    ) -> None:
        """Attach; see `Attachment.start` for the errors. A claim without an answer for `patience` seconds is a miss.

        An answer from the daemon's memory may take `deadline` seconds; then the daemon counts as unavailable.
        """
        self.metrics = Metrics()
        self._clock = clock
        self._patience = patience
        self._deadline = deadline
        self._lock = Lock()
        self._waiting_call = Lock()  # the daemon runs one waiting operation per client at a time
        self._attachment = Attachment(path, hello, clock)
        self._numbers = count(1)  # of claims, reservations and requests; under the lock, so that a batch is consecutive
        self._dropped: deque[Callable[[], None]] = deque()  # added by `__del__`, which may run in any thread
        self._lease = lease_type()
        self._closed = False
        self.region: HostRegion | None = None
        """The daemon's L2 memory: a new one after it restarted."""
        self.epoch = 0
        """Counts resets and reconnections."""
        self.is_late, self.is_short, self.sends_later = False, False, True
        self.offers_again = False
        self._pid = os.getpid()
        self._attachment.start()
        self.region, self.epoch = self._attachment.region, self._attachment.epoch

    @property
    def num_slots(self) -> int:
        return self.region.num_slots if self.region is not None else 0

    @property
    def has_lower(self) -> bool:
        return self._attachment.has_lower

    @property
    def member(self) -> tuple[str, bytes] | None:
        """The socket and the daemon's id of this client: for `join`. None without a link."""
        link = self._attachment.link
        return (str(self._attachment.path.absolute()), link.welcome.client) if link is not None else None

    @property
    def wanting(self) -> dict[str, str]:
        """The daemon, while it is unavailable → why."""
        away = self._attachment.away
        return {} if away is None else {"daemon": away}

    # claims

    def submit(
        self,
        hashes: Sequence[ChainHash],
        parent: ChainHash,
        num_l1: int = 0,
        *,
        block_size: int = 0,
        overlap: Overlap = Overlap.NONE,
        trace: tracing.Trace | None = None,
    ) -> Claim:
        """Add the lookup to the next message; a later `poll` has the answer."""
        claim = RemoteClaim(list(hashes), parent, num_l1, block_size, overlap)
        if trace is not None:
            claim.trace = trace
        with self._lock:
            self._ask(claim, self._attachment.link or self._pump())
        return claim

    def poll(self, claim: Claim) -> int | Pending:
        """What the daemon has sent so far; renews the promise when necessary.

        A promise is valid for half of its deadline after its last renewal. If it was lost, with its link or because a
        step took longer than that, its blocks are claimed once more.
        """
        assert isinstance(claim, RemoteClaim)
        with self._lock:
            link = self._attachment.link
            if not (claim.answered or claim.polled) and link is not None and claim.link is link and link.unsent:
                claim.polled = True  # it goes with the next message
                return PENDING
            link = self._pump()
            if claim.link is None and not claim.answered:
                if not self._ask(claim, link):
                    return PENDING
                claim.polled = True  # its step is over
            if claim.answered and not claim.slots:
                claim.is_reported = True
                return 0
            if link is None or claim.link is not link:
                return self._lost(claim, link, Outcome.BREAKER_OPEN)
            now = self._clock()
            if not claim.answered:
                if claim.polled and link.unsent:
                    if any(type(each) is wire.Ask and each.claim == claim.number for each in link.unsent):
                        claim.asked_at = claim.renewed_at = now  # it was not sent before
                    link.send()
                claim.polled = True
                if now - claim.asked_at < self._patience and not link.is_silent(now, self._deadline):
                    return PENDING
                return self._given_up(claim, Outcome.TIMEOUT)
            since, deadline = now - claim.renewed_at, link.welcome.lease_deadline
            if since >= deadline / 2:
                return self._lost(claim, link, Outcome.TIMEOUT)
            if since >= deadline / 8 and link.send([wire.Renew([claim.number])]):
                claim.renewed_at = now
            claim.is_reported = True
            return len(claim.slots)

    def lease(self, claim: Claim) -> Lease:
        """The lease of the promised blocks; empty if the promise expired or the daemon is gone.

        The `Take` is in the daemon's socket before half of the deadline has passed, and the daemon reads its socket
        before it expires promises. So it never reuses slots that are copied from.
        """
        assert isinstance(claim, RemoteClaim)
        with self._lock:
            link, slots = self._attachment.link, claim.slots
            if not slots:
                self._cancel(claim)  # not answered yet: the daemon must not keep a promise that is never taken
            elif link is None or claim.link is not link:
                self._given_up(claim, Outcome.BREAKER_OPEN)
            elif (
                not link.send([wire.Take([claim.number])])
                or self._clock() - claim.renewed_at >= link.welcome.lease_deadline / 2
            ):
                link.put(wire.Release([claim.number]))
                self._given_up(claim, Outcome.TIMEOUT)
            else:
                names = claim.hashes[claim.num_l1 : claim.num_l1 + len(slots)]
                link.held.add(claim.number)
                del link.claims[claim.number]
                ended = partial(self._released, link, claim.number)
                lease = self._lease(names, slots, claim.generations, ended)
                claim.slots = claim.generations = _NONE
                return lease
        return Lease([], _NONE, _NONE, _forget)

    def cancel(self, claim: Claim) -> None:
        """Sent with the next message. Idempotent."""
        assert isinstance(claim, RemoteClaim)
        with self._lock:
            self._cancel(claim)

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT, causes: Causes | None = None) -> None:
        """Counted in this client's own metrics; the daemon counts causes."""
        if missing is not None and self._attachment.link is None:
            missing = Outcome.BREAKER_OPEN
        self.metrics.looked_up(found, missing)

    # storing

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        """One round trip, with everything unsent. If it takes too long, nothing gets a slot (`is_late`).

        While that answer is due the next steps store nothing, and do not wait.
        """
        self.is_short = False
        if not wanted:
            return []
        lengths, heads = [len(each.hashes) for each in wanted], wanted
        most, are_single = max(lengths), lengths.count(1) == len(lengths)
        if are_single and (made := self._reserved_at_once(wanted)) is not None:
            return made
        if most > wire.MAX_ITEMS or len(wanted) > wire.MAX_ITEMS or most * len(wanted) > wire.MAX_HASHES:
            heads = _heads(wanted[: wire.MAX_ITEMS])
        with self._lock:
            first, *_ = [next(self._numbers) for _ in heads]
            link = self._attachment.link
            if link is None or link.overdue or link.unheard_since is not None:
                link, now = self._pump(), self._clock()
                self.is_late = link is not None and (bool(link.overdue) or link.is_silent(now, self._deadline))
                if self.is_late:
                    return self._refused(wanted, None if may_retry else Outcome.TIMEOUT)
            is_offer, keeps = may_retry and self._attachment.is_current, self.offers_again and self.has_lower
            operation = wire.Offer.of(first, heads, keeps=keeps) if is_offer else wire.Reserve.of(first, heads)
            if link is not None:
                self._trace(link, first, heads)
        self.is_late = False
        link, answers = self._call(operation, self._deadline, num_single=are_single * len(heads))
        with self._lock:
            if answers is None and link is not None and link is self._attachment.link:
                # It may still answer: release the slots it grants.
                link.put(wire.Abandon(Outcome.TIMEOUT, list(range(first, first + len(heads)))))
            grants: list[wire.Granted | None] | None = None
            if link is not None and answers is not None and link is self._attachment.link:
                try:
                    (answer,), is_short = answers, False
                    if is_offer:
                        answer, is_short = wire.unpack_answer(answer, wire.Offered)
                    grants = wire.unpack_grants(answer, [len(each.hashes) for each in heads], link.welcome.num_slots)
                    self.is_short = is_short
                except (ValueError, FormatError) as error:  # not one answer, or not one of this client's
                    self._attachment.cut(error)
            if grants is None or link is None:
                self.is_late = answers is None and link is not None and not self._closed
                reason = Outcome.CLOSED if self._closed else Outcome.BREAKER_OPEN if link is None else Outcome.TIMEOUT
                return self._refused(wanted, None if self.is_late and may_retry else reason)
            reservations = self._reserved(link, first, heads, grants)
        handled = sum([len(head.hashes) for head, each in zip(heads, reservations, strict=True) if each is not None])
        if not self.is_short and (missing := sum([len(each.hashes) for each in wanted]) - handled):
            self.metrics.dropped(L2, Outcome.NO_SLOT, missing)
        return [*reservations, *[None] * (len(wanted) - len(heads))]

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """The daemon hashes and publishes the blocks once it has the message."""
        self.seal_each([(reservation, [record.tokens for record in records], epoch)])

    def seal_each(self, stores: Sequence[Filled]) -> None:
        """As `seal`, in one message."""
        with self._lock:
            now, filled = self._attachment.link, []
            for reservation, tokens, epoch in stores:
                assert isinstance(reservation, RemoteReservation)
                link = reservation.link
                if not reservation.num_open or link is None:
                    continue
                reservation.num_open = 0
                link.held.discard(reservation.number)
                if link is now and epoch >= link.epoch_base:
                    filled.append((reservation, tokens, epoch - link.epoch_base))
                    continue
                reason = Outcome.CLOSED if link is not now else Outcome.EPOCH
                self.metrics.dropped(L2, reason, len(reservation))
                if link is now:
                    link.put(wire.Abandon(reason, [reservation.number]))
            if now is not None:
                for seal in seals_of(filled):
                    now.put(seal)
            self.metrics.stored(L2, sum([len(tokens) for _, tokens, _ in filled]))

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        assert isinstance(reservation, RemoteReservation)
        with self._lock:
            self._abandon(reservation, reason)

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        """Sends nothing: the daemon keeps this client's slots until the process has ended."""
        assert isinstance(reservation, RemoteReservation)
        with self._lock:
            if reservation.num_open:
                reservation.num_open = 0  # but its number stays in `link.held`
                self.metrics.dropped(L2, reason, len(reservation))
                self._attachment.goes_silently = True

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        with self._lock:
            if (link := self._attachment.link) is not None:
                link.put(wire.Computed(num_tokens, seconds, int(position)))

    def ended(self, end: RequestEnd) -> None:
        """Sent with the next message."""
        with self._lock:
            if (link := self._attachment.link) is not None:
                link.put(wire.RequestEnded.of(end))

    # the rest

    def locate(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """Waits for the daemon, which has `timeout` seconds for shared tiers."""
        names = hashes[: wire.MAX_HASHES]
        answers = self._call_waiting(wire.Lookup(b"".join(names), timeout), timeout)
        found = Attribution(len(names), miss=len(names))
        if answers:
            try:
                found = wire.unpack_found(wire.unpack_answer(answers[0], wire.Found))
            except FormatError as error:
                with self._lock:
                    self._attachment.cut(error)
        return _widened(found, len(hashes))

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """A round trip."""
        _, answers = self._call(wire.Holds(b"".join(hashes[: wire.MAX_HASHES])), self._deadline)
        flags = b""
        if answers:
            with suppress(FormatError):
                flags = wire.unpack_answer(answers[0], bytes)
        return [bool(each) for each in flags[: len(hashes)]] + [False] * (len(hashes) - len(flags))

    def wait_progress(self, timeout: float) -> None:
        """Wait for a message of the daemon; returns at once if an answer was not returned by `poll` yet."""
        with self._lock:
            link = self._attachment.link or self._pump()
            if link is not None:
                if link.unsent or link.output:
                    link.send()
                if any([each.answered and not each.is_reported for each in link.claims.values()]):
                    return
            elif self._attachment.connecting is not None:
                link = self._attachment.connecting[0]
        if link is None:
            time.sleep(min(timeout, _ASK_AGAIN))
        else:
            link.wait(timeout)

    def tick(self) -> None:
        """Send what is unsent, apply what has arrived, reconnect if it is due."""
        with self._lock:
            link = self._pump()
            if link is None:
                return
            if link.preallocated and (now := self._clock()) - link.preallocated_at >= _KEPT_IDLE:
                link.give_up_preallocated(now)
            if link.unsent:
                link.send()

    def reset(self) -> None:
        """The daemon forgets everything: now, or when this client reconnects."""
        with self._lock:
            self._attachment.reset_owed(True)
            link, self.epoch = self._attachment.link, self._attachment.epoch
        is_done = self._call_waiting(wire.Reset(), _RESET) == [_TRUE]
        with self._lock:
            if is_done:
                self._attachment.reset_owed(False)
            elif link is not None and self._attachment.link is link:  # the next hello has it
                self._attachment.cut(TimeoutError(f"no reset within {_RESET:g} s"))

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """The daemon waits for the stores of all its clients; False if it is unavailable."""
        return self._call_waiting(wire.Drain(timeout, below), timeout) == [_TRUE]

    def stats(self) -> dict[str, float]:
        """This client's counters; the daemon serves its own over HTTP."""
        return self.metrics.snapshot()

    def check(self) -> None:
        """Have the daemon check the laws of this model's tiers; does nothing if it is unavailable."""
        answers = self._call_waiting(wire.Check(), _CHECK)
        if answers and answers[0] != _WHOLE:
            raise AssertionError(str(bytes(answers[0]), errors="replace"))

    def close(self, timeout: float = 5.0) -> None:
        """Send what was sealed, and disconnect; the daemon continues to write it. Unmaps: no copy may be under way.

        Does nothing in a forked child.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pump()
                self._attachment.close(timeout)

    # claims, under the lock; `link` is the current one

    def _pump(self) -> Link | None:
        """Apply what has arrived. Returns the current link."""
        while self._dropped:
            self._dropped.popleft()()
        attachment = self._attachment
        for reply in attachment.receive():
            for news in reply.news:
                self._apply(news)
            if reply.preallocated is not None and attachment.link is not None:
                try:
                    attachment.link.add_preallocated(reply.preallocated)
                except FormatError as error:
                    attachment.cut(error)
        self.region, self.epoch = attachment.region, attachment.epoch
        return attachment.link

    def _ask(self, claim: RemoteClaim, link: Link | None) -> bool:
        """Add the lookup to the next message. False while a handshake is under way.

        A second `poll` sends what is unsent, and a lookup that waited for the handshake.
        """
        if link is None and claim.hashes and self._is_attaching():
            return False
        is_owed = link is not None and (bool(link.overdue) or link.unheard_since is not None)
        is_silent = is_owed and link is not None and link.is_silent(self._clock(), self._deadline)
        if link is None or is_silent:
            missing = Outcome.TIMEOUT if is_silent else Outcome.BREAKER_OPEN
            if claim.found is None:
                claim.missing = missing
            else:  # the second lookup; the first counted them as found
                self.metrics.missed(missing, claim.found.loadable)
        if link is None or is_silent or not claim.hashes:
            self._cancel(claim)
            return True
        claim.number, claim.link = next(self._numbers), link
        claim.asked_at = claim.renewed_at = self._clock()
        link.claims[claim.number] = claim
        if claim.trace is not None and self._attachment.is_current:
            link.traces.append((claim.number, claim.trace.traceparent))
        names, overlap = claim.hashes[: wire.MAX_HASHES], claim.overlap
        if overlap is Overlap.WHOLE and not self._attachment.is_current:
            overlap = Overlap.NONE
        link.put(wire.Ask(claim.number, claim.parent, claim.num_l1, claim.block_size, b"".join(names), overlap))
        if len(names) >= _ALONE_FROM:
            link.send()
        return True

    def _apply(self, news: wire.News) -> None:
        """Apply the answer to a claim; one of a cancelled claim is ignored."""
        link = self._attachment.link
        claim = link.claims.get(news.claim) if link is not None else None
        if link is None or claim is None:
            return
        num_asked = min(len(claim.hashes), wire.MAX_HASHES)
        try:
            found = wire.unpack_found(news.found)
            slots, generations = news.check(found)
            if found.blocks != num_asked or len(slots) > num_asked - claim.num_l1 or claim.answered:
                raise FormatError("news of other blocks than the claim's")
            if slots and max(slots) >= link.welcome.num_slots:
                raise FormatError("news of a slot that does not exist")
            if any(len(child.tokens) > 4 * self._attachment.hello.block_size for child in news.children):
                raise FormatError("news of a block with too many tokens")
        except FormatError as error:
            self._attachment.cut(error)
            return
        num_lost = claim.found.loadable - found.loadable if claim.found is not None else 0
        if num_lost > 0:  # the first lookup counted them as found
            self.metrics.missed(Outcome.EVICTED, num_lost)
        claim.found = found if len(claim.hashes) == num_asked else _widened(found, len(claim.hashes))
        claim.refusal, claim.answered, claim.slots, claim.generations = news.refusal, True, slots, generations
        claim.split, children = news.split, news.children
        if len(claim.hashes) > num_asked:  # the daemon was not sent the next block's name
            children = [child for child in children if child.chain_hash != claim.hashes[num_asked]]
        claim.behind = partial(_beginning_with, children) if children else None
        if news.refusal is Outcome.RECOMPUTE:
            self.metrics.missed(Outcome.RECOMPUTE, found.loadable)
        if not slots:
            claim.good_until = self._clock() + max(news.good_for, _ASK_AGAIN)

    def _is_attaching(self) -> bool:
        """Whether a hello was sent a moment ago: then its answer is worth waiting for."""
        since = self._attachment.attaching_since
        return since is not None and self._clock() - since < self._deadline

    def _lost(self, claim: RemoteClaim, link: Link | None, reason: Outcome) -> int | Pending:
        """Claim once more, if there is a daemon; else the claim fails for this reason."""
        if claim.again or (link is None and not self._is_attaching()):
            return self._given_up(claim, reason)
        self._withdraw(claim)
        claim.link, claim.slots, claim.generations = None, _NONE, _NONE
        claim.again, claim.answered, claim.is_reported = True, False, False
        self._ask(claim, link)
        if link is not None:
            link.send()  # it has waited for a step already
        return PENDING

    def _given_up(self, claim: RemoteClaim, reason: Outcome) -> int:
        """The claim or promise failed: count why."""
        num_asked = len(claim.hashes) - claim.num_l1 if claim.found is None else claim.found.loadable
        self.metrics.missed(reason, len(claim.slots) or num_asked)
        if claim.found is None:
            claim.missing = None
        self._cancel(claim)
        claim.is_reported = True
        return 0

    def _withdraw(self, claim: RemoteClaim) -> None:
        link = claim.link
        was_open = link is not None and link.claims.pop(claim.number, None) is not None
        if link is self._attachment.link and link is not None and was_open and (claim.slots or not claim.answered):
            link.put(wire.Cancel([claim.number]))  # else the daemon has no such claim

    def _cancel(self, claim: RemoteClaim) -> None:
        """Withdraw the claim and mark it as answered with nothing."""
        self._withdraw(claim)
        if claim.found is None:
            claim.found = Attribution(len(claim.hashes), l1=claim.num_l1, miss=len(claim.hashes) - claim.num_l1)
            claim.good_until = self._clock() + _ASK_AGAIN
        claim.slots = claim.generations = _NONE
        claim.answered = True

    def _reserved_at_once(self, wanted: Sequence[Wanted]) -> list[Reservation | None] | None:
        """Stores of one block each, in slots that the daemon has preallocated; None if there are too few.

        As with `lease`, the daemon is informed first and the time is checked after that. So a client that was stopped
        in between never fills slots that the daemon has freed.
        """
        with self._lock:
            link, now, num = self._pump(), self._clock(), len(wanted)
            if link is None or len(link.preallocated) < num or not link.is_fresh(now):
                return None
            taken, link.preallocated = link.preallocated[:num], link.preallocated[num:]
            first, *_ = [next(self._numbers) for _ in wanted]
            self._trace(link, first, wanted)
            slots = array("q", [slot for slot, _ in taken]).tobytes()
            is_sent = link.send([wire.ReserveAt(slots, wire.Reserve.of(first, wanted)), *link.preallocate(num, now)])
            granted = [([0], [slot], [generation]) for slot, generation in taken]
            made = self._reserved(link, first, wanted, granted)
            if is_sent and link.is_fresh(self._clock()):
                self.is_late = False
                return made
            for each in made:
                assert isinstance(each, RemoteReservation)
                each.num_open = 0  # no copy was planned
                link.held.discard(each.number)
            link.put(wire.Abandon(Outcome.TIMEOUT, list(range(first, first + num))))
            return None

    def _trace(self, link: Link, first: int, wanted: Sequence[Wanted]) -> None:
        if tracing.ON and self._attachment.is_current:
            traced = [(number, each.trace) for number, each in enumerate(wanted, first)]
            link.traces += [(number, trace.traceparent) for number, trace in traced if trace is not None]

    # stores, under the lock

    def _refused(self, wanted: Sequence[Wanted], reason: Outcome | None) -> list[Reservation | None]:
        """Nothing gets a slot. With a `reason` it is counted as dropped."""
        if reason is not None:
            self.metrics.dropped(L2, reason, sum(len(each.hashes) for each in wanted))
        return [None] * len(wanted)

    def _reserved(
        self, link: Link, first: int, wanted: Sequence[Wanted], granted: Sequence[wire.Granted | None]
    ) -> list[Reservation | None]:
        """The granted slots as reservations, numbered from `first` on."""
        made: list[Reservation | None] = []
        for number, (each, grant) in enumerate(zip(wanted, granted, strict=True), first):
            if grant is None:
                made.append(None)
                continue
            indices, slots, generations = grant
            hashes = list(each.hashes)
            parents: list[ChainHash | None] = [each.parent] if len(hashes) == 1 else [each.parent, *hashes[:-1]]
            if len(indices) < len(hashes):
                hashes, parents = [hashes[i] for i in indices], [parents[i] for i in indices]
            num_open = len(indices)
            made.append(
                RemoteReservation(
                    hashes, indices, slots, generations, parents, 0, num_open, self._unfinished, number, link
                )
            )
            if indices:
                link.held.add(number)
        return made

    def _abandon(self, reservation: RemoteReservation, reason: Outcome) -> None:
        if reservation.num_open and reservation.link is not None:
            reservation.num_open = 0
            self.metrics.dropped(L2, reason, len(reservation))
            self._give_back(reservation.link, reservation.number, wire.Abandon(reason, [reservation.number]))

    def _give_back(self, link: Link, number: int, operation: wire.Operation) -> None:
        """Sent with the next message; at once if nothing else is open, since the next may be hours away."""
        link.held.discard(number)
        if link is self._attachment.link:
            link.put(operation)
            if not (link.held or link.claims):
                link.send()

    # calls, without the lock

    def _call(
        self, operation: wire.Operation, timeout: float, *, alone: bool = False, num_single: int = 0
    ) -> tuple[Link | None, list[Raw] | None]:
        """Send, and wait for the answer: (the link it was sent on, the answers). None: no answer in time.

        `alone`: the operation waits in the daemon, which runs one at a time: none is sent while another is due.
        `num_single`: it is a step of so many stores of one block each.
        """
        end = self._clock() + timeout
        with self._lock:
            link = self._attachment.link or self._pump()
            if link is None or (alone and link.overdue_aside):
                return None, None
            number = next(self._numbers)
            if alone:
                link.send()
            ahead = num_single and self._attachment.is_current
            link.send([operation, *(link.preallocate(num_single, self._clock()) if ahead else ())], number)
        while True:
            left = end - self._clock()  # a last check when none is left: this process may have slept, not the daemon
            link.wait(max(0.0, min(left, _LOOK)))
            with self._lock:
                if self._pump() is not link:
                    return link, None
                if number in link.answers:
                    return link, link.answers.pop(number)
                if left <= 0:  # still under this lock: another thread could read our answer after it
                    self._attachment.give_up(link, number, aside=alone)
                    return link, None

    def _call_waiting(self, operation: wire.Operation, timeout: float) -> list[Raw]:
        """An operation that waits in the daemon, for at most `timeout` seconds."""
        end = self._clock() + timeout + _LATE
        if not self._waiting_call.acquire(timeout=timeout + _LATE):
            return []
        try:
            while timeout and (link := self._attachment.link) and link.overdue_aside and self._clock() < end:
                link.wait(_LOOK)
                with self._lock:
                    self._pump()
            return self._call(operation, timeout + _LATE, alone=True)[1] or []
        finally:
            self._waiting_call.release()

    # release of leases and reservations

    def _released(self, link: Link, number: int, lease: Lease, leaked: bool) -> None:
        if leaked:
            lease.on_release = None
            self._dropped.append(partial(self._give_back, link, number, wire.Release([number])))
            return
        with self._lock:
            if lease.on_release is not None:
                lease.on_release = None
                self._give_back(link, number, wire.Release([number]))

    def _unfinished(self, reservation: Reservation, dropped: bool) -> None:
        assert isinstance(reservation, RemoteReservation)
        if dropped:
            self._dropped.append(partial(self._abandon, reservation, Outcome.ABORTED))
            return
        with self._lock:
            self._abandon(reservation, Outcome.ABORTED)


def seals_of(filled: Sequence[tuple[RemoteReservation, Sequence[bytes], int]]) -> list[wire.Seal]:
    """The messages for filled reservations with their tokens and epochs: usually one for all."""
    seals = [wire.Seal(0, [], [], [])]
    for reservation, tokens, epoch in filled:
        seal = seals[-1]
        if epoch != seal.epoch or max(len(seal.reservations) + 1, len(seal.tokens) + len(tokens)) > wire.MAX_ITEMS:
            seals.append(seal := wire.Seal(epoch, [], [], []))
        seal.reservations.append(reservation.number)
        seal.counts.append(len(tokens))
        seal.tokens.extend(tokens)
    return [seal for seal in seals if seal.reservations]


def _heads(wanted: Sequence[Wanted]) -> list[Wanted]:
    """As much of each as fits into one message."""
    heads, room = [], wire.MAX_HASHES
    for each in wanted:
        if (most := min(wire.MAX_ITEMS, room)) < len(each.hashes):
            each = replace(each, hashes=each.hashes[:most], is_partial=False)
        room -= len(each.hashes)
        heads.append(each)
    return heads


def _widened(found: Attribution, num_blocks: int) -> Attribution:
    """The same for a longer chain, of which only the head was looked up."""
    more = num_blocks - found.blocks
    return found if not more else Attribution(num_blocks, miss=found.miss + more, **found.by_tier)


def _forget(lease: Lease, leaked: bool) -> None:
    """`on_release` of an empty lease."""
    lease.on_release = None


def _beginning_with(children: Sequence[ChildBlock], claim: Claim, start: bytes) -> Sequence[ChildBlock]:
    return [child for child in children if child.tokens.startswith(start)] if start else children
