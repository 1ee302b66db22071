"""Overlapped loads: a request's last blocks are loaded, in groups, while the engine computes those before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtier.tiers import ChainHash, Outcome
from kvtier.tiers.hierarchy import BlockClaims, Claim, Overlap, Pending, SplitPoint
from kvtier.tiers.pool import Lease

_GROUP_BLOCKS: Final = 16
_GROUP_TOKENS: Final = 256  # at most: with large blocks a group has fewer
_AHEAD: Final = 2  # groups in flight below the planned split point


class GroupState(Enum):
    """SUBMITTED → COPYING → ARRIVED; GONE from the first two."""

    SUBMITTED = "submitted"  # being loaded into L2, or promised
    COPYING = "copying"  # from L2 to the request's L1 blocks
    ARRIVED = "arrived"
    GONE = "gone"  # not loadable, or cancelled: the front computes it


@dataclass(eq=False, slots=True)
class Group:
    """Consecutive blocks `first … stop` of a chain, loaded together. `stop` shrinks to what is loadable."""

    first: int
    stop: int
    claim: Claim
    state: GroupState = GroupState.SUBMITTED
    answered: bool = False


class OverlappedLoad:
    """The back of a request that is computed and loaded at once.

    All groups after the planned split point are claimed at once, the last one first: so the front meets the late ones
    first. The front never enters a group that may still arrive; if waiting takes longer than computing it, the group is
    cancelled. A group that has arrived counts once the front reaches it.
    """

    def __init__(
        self, tiers: BlockClaims, chain: Sequence[ChainHash], root: ChainHash, claim: Claim, clock: Callable[[], float]
    ) -> None:
        """`chain`: the names of all the request's blocks; the claim's `split` is the split point."""
        assert claim.found is not None
        assert claim.split is not None
        self._tiers = tiers
        self._chain, self._root, self._size = chain, root, claim.block_size
        self._trace = claim.trace
        self._clock = clock
        self._per_group = max(1, min(_GROUP_BLOCKS, _GROUP_TOKENS // self._size))
        self._end = claim.found.blocks - claim.found.miss  # blocks: what follows is in no tier
        self._table: Sequence[int] | None = None  # the request's blocks in L1, once it has them
        self._groups: list[Group] = []  # the lowest first
        self._lowest = self._end  # block claimed
        self._crowded = False  # other requests use L2's room: claim few groups at a time
        self._num_present = 0  # blocks: nothing before these is claimed, since other copies may write there
        self._until = 0  # tokens: the front's last limit
        self._began: tuple[int, float] | None = None  # tokens, time: of the last `limit`
        self._reached: int | None = None  # tokens: the last result of `reach`
        self._num_front = 0  # tokens computed since the first `reach`
        self._num_gone = 0  # blocks that could not be loaded
        num_front = (claim.split.block - claim.num_l1) * self._size
        num_back = (self._end - claim.split.block) / self._per_group
        self._pace = _Pace(claim.split, num_front, num_back, clock())
        self._submit_down_to(claim.split.block)

    def seat(self, table: Sequence[int], num_present: int) -> None:
        """The request has its L1 blocks now; the first `num_present` are filled or loaded otherwise."""
        self._table = table
        self._num_present = num_present
        for group in [each for each in self._groups if each.first < num_present]:
            self._cancel(group)

    def collect(self) -> list[tuple[Group, Lease, list[int]]]:
        """Groups that are in L2 now: each with its lease, and the request's blocks to copy it to."""
        self._look()
        if self._table is None:
            return []
        ready = []
        for group in [each for each in self._groups if each.state is GroupState.SUBMITTED and each.answered]:
            lease = self._tiers.lease(group.claim)
            num_blocks = len(lease.slots)
            self._num_gone += group.stop - group.first - num_blocks
            group.stop = group.first + num_blocks
            group.state = GroupState.COPYING if num_blocks else GroupState.GONE
            ready.append((group, lease, [int(block) for block in self._table[group.first : group.stop]]))
        self._submit_more()
        return ready

    def copied(self, group: Group, well: bool) -> None:
        """A group's copy to L1 has ended."""
        group.state = GroupState.ARRIVED if well else GroupState.GONE
        self._num_gone += 0 if well else group.stop - group.first

    def reach(self, num_computed: int) -> int:
        """How many tokens the request has, after it computed so many: arrived groups directly after them count."""
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
        """The token up to which the request may compute now; `num_computed` if it has to wait.

        `alone`: no other request needs compute. Else everything loadable is loaded, and only the rest is computed.
        """
        if not alone:
            self._submit_down_to(-(-num_computed // self._size))
        while (ahead := self._ahead(num_computed)) is not None and num_computed == ahead.first * self._size:
            self._look()  # what arrived during the last step
            if ahead.state is GroupState.GONE:
                continue
            is_here = ahead.state is GroupState.COPYING or ahead.answered
            if is_here or not (alone and self._is_late(ahead)):
                return num_computed
            self._cancel(ahead)
        self._until = self._next_stop(num_computed, (self._end if ahead is None else ahead.first) * self._size)
        self._began = (num_computed, self._clock())
        return self._until

    def is_over(self, num_computed: int) -> bool:
        """Whether the front is past everything loadable."""
        return num_computed >= self._end * self._size

    def cancel(self) -> None:
        """Cancel the claimed groups that are not being copied."""
        for group in list(self._groups):
            self._cancel(group)

    @property
    def num_skipped(self) -> int:
        """Loadable blocks that were computed all the same, since the front reached them first."""
        return max(0, self._num_front // self._size - self._num_gone)

    # inside

    def _submit_down_to(self, first: int) -> None:
        """Claim everything between `first` and the lowest claimed block, in groups, from the back."""
        while self._lowest > first and not (self._crowded and self._num_submitted >= _AHEAD):
            stop, self._lowest = self._lowest, max(first, self._lowest - self._per_group)
            hashes = self._chain[self._lowest : stop]
            parent = self._chain[self._lowest - 1] if self._lowest else self._root
            claim = self._tiers.submit(hashes, parent, block_size=self._size, overlap=Overlap.BACK, trace=self._trace)
            self._groups.insert(0, Group(self._lowest, stop, claim))

    def _look(self) -> None:
        """Poll the claimed groups: which are in L2 now, and which cannot be loaded."""
        for group in [each for each in self._groups if each.state is GroupState.SUBMITTED]:
            promised = self._tiers.poll(group.claim)
            if isinstance(promised, Pending) or group.state is not GroupState.SUBMITTED:
                continue
            if not promised:
                self._refused(group)
            elif not group.answered:
                group.answered = True
                self._pace.arrived(self._clock())

    def _submit_more(self) -> None:
        """Keep the tier busy as long as the front is far away."""
        reached = max(self._num_present, -(-self._until // self._size))
        ahead = max(_AHEAD, self._pace.groups_a_step(self._per_group * self._size))
        while self._num_submitted < ahead and self._lowest - reached >= _AHEAD * self._per_group:
            num_submitted = self._num_submitted
            self._submit_down_to(self._lowest - self._per_group)
            if self._num_submitted == num_submitted:  # no room in L2
                return

    def _refused(self, group: Group) -> None:
        """Nothing of the group is loadable. If L2 had no room, claim it and those before it again later."""
        lower = self._groups[: self._groups.index(group) + 1]
        if group.claim.refusal is Outcome.NO_SLOT and not any(each.answered for each in lower):
            for each in lower:
                self._cancel(each)
            self._crowded, self._lowest = True, group.stop
            return
        self._num_gone += group.stop - group.first
        self._cancel(group)

    def _cancel(self, group: Group) -> None:
        if group.state is GroupState.SUBMITTED:
            self._tiers.cancel(group.claim)
            group.state = GroupState.GONE
            self._groups.remove(group)

    def _ahead(self, num_computed: int) -> Group | None:
        """The next group that has arrived or may still arrive."""
        live = (each for each in self._groups if each.state is not GroupState.GONE)
        return next((each for each in live if each.first * self._size >= num_computed), None)

    def _is_late(self, group: Group) -> bool:
        """Whether waiting for the group takes longer than computing it."""
        return self._pace.wait(self._num_submitted, self._clock()) > self._pace.compute(
            (group.stop - group.first) * self._size
        )

    def _next_stop(self, num_computed: int, floor: int) -> int:
        """At most half of the way: what arrives meanwhile is noticed only at the end of the step."""
        unit = self._per_group * self._size
        return min(floor, num_computed + max(unit, (floor - num_computed) // 2 // unit * unit))

    @property
    def _num_submitted(self) -> int:
        return sum(each.state is GroupState.SUBMITTED and not each.answered for each in self._groups)


class _Pace:
    """Speed of the front and the back: as planned at first, then increasingly as measured."""

    def __init__(self, split: SplitPoint, num_front: int, num_groups: float, now: float) -> None:
        """The plan: a front of `num_front` tokens and a back of `num_groups`."""
        self._num_computed = 0  # tokens
        self._seconds = 0.0  # for these
        self._num_arrived = 0  # groups
        self._began = self._last_at = now
        self._token = split.seconds / max(1, num_front)
        self._group = split.seconds / num_groups

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The front advanced by so many tokens."""
        if num_tokens > 0:
            self._num_computed += num_tokens
            self._seconds += seconds

    def arrived(self, now: float) -> None:
        """A group is in L2."""
        self._num_arrived += 1
        self._last_at = now

    def compute(self, num_tokens: int) -> float:
        """Expected seconds to compute so many tokens."""
        weight = _GROUP_TOKENS  # of the plan
        return num_tokens * (self._seconds + weight * self._token) / (self._num_computed + weight)

    def groups_a_step(self, num_tokens: int) -> int:
        """How many groups may arrive while so many tokens are computed: they are polled after that."""
        return int(self.compute(num_tokens) / max(1e-9, self._per_group))

    def wait(self, num_submitted: int, now: float) -> float:
        """Expected seconds until so many groups have arrived. An overdue one is expected to take as long again."""
        waited, usual = now - self._last_at, self._per_group
        return max(num_submitted * max(usual, waited) - waited, waited - usual)

    @property
    def _per_group(self) -> float:
        return (self._last_at - self._began + self._group) / (self._num_arrived + 1)
