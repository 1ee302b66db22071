"""Overlapped loads: a request's last blocks are loaded, in groups, while the engine computes those before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtier.connector.plan import CopyOp
from kvtier.tiers import ChainHash, Outcome
from kvtier.tiers.hierarchy import BlockClaims, Claim, Ends, Meeting, Pending
from kvtier.tiers.pool import Lease

_GROUP_BLOCKS: Final = 16
_GROUP_TOKENS: Final = 256  # at most: with large blocks a group has fewer
_AHEAD: Final = 2  # groups that are kept on their way below the planned meeting point


class GroupState(Enum):
    """ASKED → COPYING → ARRIVED; GONE from any of the first two."""

    ASKED = "asked"  # on its way to L2, or promised
    COPYING = "copying"  # from L2 into the request's blocks
    ARRIVED = "arrived"
    GONE = "gone"  # not to be had, or let go: the front computes it


@dataclass(eq=False, slots=True)
class Group:
    """Consecutive blocks `first … stop` of a chain, loaded together. `stop` shrinks to what can be had."""

    first: int
    stop: int
    claim: Claim
    state: GroupState = GroupState.ASKED
    answered: bool = False


class Back:
    """What lies behind the front of a request that is computed and loaded at once.

    All groups behind the planned meeting point are asked for at once, the last one first: so what is late is what the
    front comes to first. The front never enters a group that may still arrive; where that would take longer than to
    compute it, the group is let go. What has arrived counts once the front is there.
    """

    def __init__(
        self,
        tiers: BlockClaims,
        chain: Sequence[ChainHash],
        root: ChainHash,
        claim: Claim,
        clock: Callable[[], float],
    ) -> None:
        """`chain` are the names of all the request's blocks; the claim's `meeting` is where to meet."""
        assert claim.found is not None
        assert claim.meeting is not None
        self._tiers = tiers
        self._chain, self._root, self._size = chain, root, claim.block_size
        self._clock = clock
        self._per_group = max(1, min(_GROUP_BLOCKS, _GROUP_TOKENS // self._size))
        self._end = claim.found.blocks - claim.found.miss  # blocks: what follows is not held
        self._table: Sequence[int] | None = None  # the request's blocks in L1, once it has them
        self._groups: list[Group] = []  # the lowest first
        self._lowest = self._end  # block asked for
        self._crowded = False  # others have the room in L2: ask for little at a time
        self._until = 0  # tokens: up to where the front was last let compute
        self._began: tuple[int, float] | None = None  # tokens, time: when it was last let compute
        self._reached: int | None = None  # tokens: what the request had when it was last asked
        self._num_front = 0  # tokens that it has computed since the first time
        self._num_gone = 0  # blocks that could not be had
        num_front = (claim.meeting.block - claim.num_l1) * self._size
        num_back = (self._end - claim.meeting.block) / self._per_group
        self._pace = _Pace(claim.meeting, num_front, num_back, clock())
        self._ask_down_to(claim.meeting.block)

    def seat(self, table: Sequence[int], num_present: int) -> None:
        """The request has its blocks now; the first `num_present` are there or on their way otherwise."""
        self._table = table
        self._until = num_present * self._size  # nothing before that is asked for: other copies may write there
        for group in [each for each in self._groups if each.first < num_present]:
            self._let_go(group)

    def collect(self) -> list[tuple[Group, Lease, list[int]]]:
        """Groups that are in L2 now: each with its lease, and the request's blocks to copy it to."""
        self._look()
        if self._table is None:
            return []
        ready = []
        for group in [each for each in self._groups if each.state is GroupState.ASKED and each.answered]:
            lease = self._tiers.take(group.claim)
            num_blocks = len(lease.slots)
            self._num_gone += group.stop - group.first - num_blocks
            group.stop = group.first + num_blocks
            group.state = GroupState.COPYING if num_blocks else GroupState.GONE
            ready.append((group, lease, [int(block) for block in self._table[group.first : group.stop]]))
        self._ask_more()
        return ready

    def copied(self, group: Group, *, well: bool) -> None:
        """A group's copy to L1 has ended."""
        group.state = GroupState.ARRIVED if well else GroupState.GONE
        self._num_gone += 0 if well else group.stop - group.first

    def reach(self, num_computed: int) -> int:
        """How many tokens the request has, if it has computed so many: what has arrived right behind them counts."""
        if self._began is not None:
            self._pace.computed(num_computed - self._began[0], self._clock() - self._began[1])
            self._began = None
        if self._reached is not None:
            self._num_front += max(0, num_computed - self._reached)
        for group in self._groups:
            if group.state is GroupState.ARRIVED and group.first * self._size <= num_computed:
                num_computed = max(num_computed, group.stop * self._size)
        self._reached = num_computed
        return num_computed

    def limit(self, num_computed: int, *, alone: bool) -> int:
        """Up to which token the request may compute now; `num_computed` if it has to wait.

        `alone`: nobody else wants the compute. Else what is held is loaded, and only what is not is computed.
        """
        if not alone:
            self._ask_down_to(-(-num_computed // self._size))
        while (ahead := self._ahead(num_computed)) is not None and num_computed == ahead.first * self._size:
            self._look()  # what came during the last step
            if ahead.state is GroupState.GONE:
                continue
            is_here = ahead.state is GroupState.COPYING or ahead.answered
            if is_here or not (alone and self._is_late(ahead)):
                return num_computed
            self._let_go(ahead)
        self._until = self._next_stop(num_computed, (self._end if ahead is None else ahead.first) * self._size)
        self._began = (num_computed, self._clock())
        return self._until

    def is_over(self, num_computed: int) -> bool:
        """Whether the front is behind all that was held."""
        return num_computed >= self._end * self._size

    def forget(self) -> None:
        """Let go of what was asked for and is not being copied."""
        for group in list(self._groups):
            self._let_go(group)

    @property
    def num_skipped(self) -> int:
        """Blocks that are held and were computed all the same, since the front came to them first."""
        return max(0, self._num_front // self._size - self._num_gone)

    # inside

    def _ask_down_to(self, first: int) -> None:
        """Claim everything between there and what was claimed before, in groups, from the back."""
        while self._lowest > first and not (self._crowded and self._num_asked >= _AHEAD):
            stop, self._lowest = self._lowest, max(first, self._lowest - self._per_group)
            hashes = self._chain[self._lowest : stop]
            parent = self._chain[self._lowest - 1] if self._lowest else self._root
            claim = self._tiers.ask(hashes, parent, block_size=self._size, ends=Ends.BACK)
            self._groups.insert(0, Group(self._lowest, stop, claim))

    def _look(self) -> None:
        """Which of the groups that were asked for are in L2 now, and which cannot be had."""
        for group in [each for each in self._groups if each.state is GroupState.ASKED]:
            promised = self._tiers.poll(group.claim)
            if isinstance(promised, Pending) or group.state is not GroupState.ASKED:
                continue
            if not promised:
                self._refused(group)
            elif not group.answered:
                group.answered = True
                self._pace.arrived(self._clock())

    def _ask_more(self) -> None:
        """Keep the tier busy as long as the front is far from there."""
        reached = -(-self._until // self._size)
        ahead = max(_AHEAD, self._pace.groups_a_step(self._per_group * self._size))
        while self._num_asked < ahead and self._lowest - reached >= _AHEAD * self._per_group:
            num_asked = self._num_asked
            self._ask_down_to(self._lowest - self._per_group)
            if self._num_asked == num_asked:  # no room in L2
                return

    def _refused(self, group: Group) -> None:
        """Nothing of it can be had: a hole. Where L2 had no room, ask again for it and what lies before it, later."""
        lower = self._groups[: self._groups.index(group) + 1]
        if group.claim.refusal is Outcome.NO_SLOT and not any(each.answered for each in lower):
            for each in lower:
                self._let_go(each)
            self._crowded, self._lowest = True, group.stop
            return
        self._num_gone += group.stop - group.first
        self._let_go(group)

    def _let_go(self, group: Group) -> None:
        if group.state is GroupState.ASKED:
            self._tiers.cancel(group.claim)
            group.state = GroupState.GONE
            self._groups.remove(group)

    def _ahead(self, num_computed: int) -> Group | None:
        """The next group that has arrived or still may."""
        live = (each for each in self._groups if each.state is not GroupState.GONE)
        return next((each for each in live if each.first * self._size >= num_computed), None)

    def _is_late(self, group: Group) -> bool:
        """Whether to wait for it would take longer than to compute it."""
        return self._pace.wait(self._num_asked, self._clock()) > self._pace.compute(
            (group.stop - group.first) * self._size
        )

    def _next_stop(self, num_computed: int, floor: int) -> int:
        """Half of the way at most: what arrives meanwhile is not noticed before the end of the step."""
        unit = self._per_group * self._size
        return min(floor, num_computed + max(unit, (floor - num_computed) // 2 // unit * unit))

    @property
    def _num_asked(self) -> int:
        return sum(each.state is GroupState.ASKED and not each.answered for each in self._groups)


@dataclass(slots=True)
class GroupCopy:
    """A group on its way from L2 to the request's blocks."""

    op: CopyOp
    back: Back
    group: Group
    lease: Lease
    planned_at: float


class _Pace:
    """How fast the front is computed and the back comes: as planned at first, then more and more as measured."""

    def __init__(self, meeting: Meeting, num_front: int, num_groups: float, now: float) -> None:
        """Planned are a front of `num_front` tokens and a back of `num_groups`."""
        self._num_computed = 0  # tokens
        self._seconds = 0.0  # that took
        self._num_arrived = 0  # groups
        self._began = self._last_at = now
        self._token = meeting.seconds / max(1, num_front)
        self._group = meeting.seconds / num_groups

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The front got so much further."""
        if num_tokens > 0:
            self._num_computed += num_tokens
            self._seconds += seconds

    def arrived(self, now: float) -> None:
        """A group is in L2."""
        self._num_arrived += 1
        self._last_at = now

    def compute(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens more."""
        weight = _GROUP_TOKENS  # of the plan
        return num_tokens * (self._seconds + weight * self._token) / (self._num_computed + weight)

    def groups_a_step(self, num_tokens: int) -> int:
        """How many groups may come while so many tokens are computed: the next look at them is after that."""
        return int(self.compute(num_tokens) / max(1e-9, self._per_group))

    def wait(self, num_asked: int, now: float) -> float:
        """Seconds until so many groups have come. What is overdue is expected to take as long again."""
        waited, usual = now - self._last_at, self._per_group
        return max(num_asked * max(usual, waited) - waited, waited - usual)

    @property
    def _per_group(self) -> float:
        return (self._last_at - self._began + self._group) / (self._num_arrived + 1)
