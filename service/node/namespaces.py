"""The tiers of each model that the daemon serves: one hierarchy per fingerprint, inside one memory budget."""

import logging
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from kvtier.connector.daemon import ID_BYTES, Hello
from kvtier.service.explain import RequestLog
from kvtier.service.node.loop import now
from kvtier.service.node.peer_server import LentModel
from kvtier.service.node.served_tiers import ServedTiers, default_limits
from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.config import Config, format_size
from kvtier.tiers.file import record_beside
from kvtier.tiers.hierarchy import EventSource, Hierarchy, ProbedOpening, open_hierarchy, require_alike
from kvtier.tiers.host import available_bytes, slot_stride
from kvtier.tiers.naming import KVProbe

_log = logging.getLogger(__name__)
NAME_DIGITS = 16  # hexadecimal ones of a fingerprint that people and Prometheus see


def name_of(fingerprint: bytes) -> str:
    return fingerprint.hex()[:NAME_DIGITS]


_SHARE: Final = 2  # a model that names no size gets one part of what is available
_MIN_BLOCKS: Final = 8  # fewer are of no use: promises take half of L2, each prefetch a quarter


class NamespaceUser(Protocol):
    """A user of a namespace, dead or alive: while it has one, the namespace stays open."""

    @property
    def holds_slots(self) -> bool:
        """Whether it has leases, or slots to fill."""

    def notify(self) -> None:
        """A claim may have an answer, or the epoch may have changed: check, and report it."""


class OperatorHold:
    """Keeps a namespace open without a client: for a pin or an export. Implements `NamespaceUser`."""

    holds_slots = True

    def notify(self) -> None:
        """An operator waits for no claim."""


class BlockDimensions(NamedTuple):
    block_size: int
    block_bytes: int


@dataclass(eq=False)
class Namespace:
    fingerprint: bytes
    blocks: BlockDimensions
    size: int  # bytes of L2
    tiers: ServedTiers
    source: EventSource | None  # blocks stored and removed, if events are published
    lent: LentModel | None = None  # what other nodes' daemons may borrow
    lossy: str | None = None  # how shared tiers keep the blocks; None: exact
    kv_probe: KVProbe | None = None  # of the first client's model that sent one
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(ID_BYTES))
    about: dict[str, str] = field(default_factory=dict)  # what the fingerprint was made from; empty: not known
    members: set[NamespaceUser] = field(default_factory=set)
    idle_since: float = field(default_factory=now)
    opened: float = field(default_factory=now)
    progressed: bool = False  # a claim may have an answer: set by any thread, read by the loop
    hierarchy: Hierarchy = field(init=False)  # behind the tiers

    def __post_init__(self) -> None:
        self.hierarchy = self.tiers.hierarchy

    def close(self, timeout: float = 5.0, *, is_used: bool = False) -> None:
        """`is_used`: a client's copy may be under way. Else idle clients that still map its memory keep none of it."""
        if self.lent is not None:
            self.lent.close()
        self.hierarchy.close(timeout, for_all=not is_used)

    def require_alike(self, packed: bytes | None) -> None:
        """KVMismatch if a client's model computes other KV than the tiers hold. FormatError if this is no probe."""
        if packed is None:
            return
        probe = KVProbe.unpack(packed)
        for port in self.hierarchy.ports:
            if isinstance(port.opening, ProbedOpening):
                port.opening.adopt(probe)
        self.kv_probe = self.kv_probe or probe
        require_alike(self.kv_probe, probe, "host memory")

    def notify(self) -> None:
        """A claim may have an answer, or the epoch may have changed. On the loop's thread."""
        for member in list(self.members):
            member.notify()

    @property
    def name(self) -> str:
        return name_of(self.fingerprint)

    @property
    def is_shared(self) -> bool:
        """Whether other nodes write to one of the tiers, so that lookups wait."""
        return any(port.locates for port in self.hierarchy.ports)

    def capacity(self) -> int:
        """Blocks that this node's tiers hold at most; shared tiers are left out."""
        below = [port.tier.stats() for port in self.hierarchy.ports if port.tier is not None and not port.is_shared]
        slots = sum(value for each in below for key, value in each.items() if key.startswith("slots_"))
        return self.hierarchy.num_slots + int(slots)

    def slab_used(self, tenant: ChainHash) -> int:
        """Bytes of a tenant's blocks in tiers that bound tenants."""
        return sum(port.tier.used_by(tenant) for port in self.hierarchy.ports if port.tier is not None)

    @property
    def in_use(self) -> bool:
        return any(member.holds_slots for member in self.members)


class Opening(NamedTuple):
    """What opens a namespace. It waits, so it runs on another thread than the loop's."""

    hello: Hello
    size: int
    close_first: list[Namespace]
    config: Config
    log: RequestLog | None

    def make_room(self) -> None:
        for namespace in self.close_first:
            namespace.close()

    def run(self) -> Namespace:
        fingerprint = self.hello.fingerprint
        blocks = BlockDimensions(self.hello.block_size, self.hello.block_bytes)
        host = self.config.host.model_copy(update={"size": self.size, "shared": True, "pin": False})
        config = self.config.model_copy(update={"host": host})
        lossy, packed = self.hello.lossy, self.hello.kv_probe
        probe = None if packed is None else KVProbe.unpack(packed)
        hierarchy = open_hierarchy(config, fingerprint, blocks, lossy=lossy, lease_deadline=math.inf, kv_probe=probe)
        service = config.service
        tiers = ServedTiers(
            hierarchy,
            fingerprint,
            default_limits(config),
            assumed_rate=service.prefill_rate,
            kept_lookups=service.kept_lookups,
            log=self.log,
        )
        if config.file.path is not None and self.hello.about:
            record_beside(config.file.path, fingerprint, dict(self.hello.about))
        source = EventSource(hierarchy) if config.events.publish is not None else None
        about = dict(self.hello.about)
        return Namespace(fingerprint, blocks, self.size, tiers, source, lossy=lossy, kv_probe=probe, about=about)


class Namespaces:
    """The open models and their host memory, those being opened included: within the budget (`check`)."""

    def __init__(self, config: Config, log: RequestLog | None = None) -> None:
        self.budget = config.host.size
        self.config, self._log = config, log
        self._open: dict[bytes, Namespace] = {}
        self.opening: dict[bytes, int] = {}  # fingerprint → bytes of L2 reserved for it

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._open.values()))

    @property
    def used(self) -> int:
        return sum(namespace.size for namespace in self._open.values()) + sum(self.opening.values())

    def find(self, hello: Hello) -> Namespace | None:
        """The model's namespace, if open. ConfigError: other blocks; KVMismatch: its model computes other KV."""
        if (namespace := self._open.get(hello.fingerprint)) is None:
            return None
        here, blocks = namespace.blocks, BlockDimensions(hello.block_size, hello.block_bytes)
        if here != blocks:
            raise ConfigError(
                f"blocks of {blocks.block_size} tokens in {blocks.block_bytes} bytes: this model's here are "
                f"{here.block_size} tokens in {here.block_bytes}; run one kvtier everywhere"
            )
        if namespace.lossy != hello.lossy:
            raise ConfigError(
                f"[cache] lossy: blocks as {hello.lossy or 'exact'}: this model's here are "
                f"{namespace.lossy or 'exact'}; run one kvtier everywhere"
            )
        namespace.require_alike(hello.kv_probe)
        return namespace

    def plan(self, hello: Hello) -> Opening:
        """Reserve memory for a model, from namespaces without users if need be, the longest unused first.

        A model without a size gets half of what is available, which leaves some for the next model.
        ConfigError if that is less than eight blocks.
        """
        stride = slot_stride(hello.block_bytes)
        idle = sorted((each for each in self if not each.members), key=lambda each: each.idle_since)
        left = self.budget - self.used
        could_have = left + sum(namespace.size for namespace in idle)
        wanted = hello.size
        if not wanted:  # [host] size may be more than there is
            wanted = max(min(could_have, available_bytes()) // _SHARE, min(could_have, _MIN_BLOCKS * stride))
        can_have = min(wanted, could_have)
        if can_have < _MIN_BLOCKS * stride:
            raise ConfigError(
                f"[host] size: the daemon has {format_size(max(0, can_have))} of {format_size(self.budget)} for this "
                f"model, {_MIN_BLOCKS} of its blocks take {format_size(_MIN_BLOCKS * stride)}; raise it there"
            )
        victims = []
        while left < wanted and idle:
            victims.append(idle.pop(0))
            left += victims[-1].size
            del self._open[victims[-1].fingerprint]
        size = min(wanted, left) // stride * stride
        self.opening[hello.fingerprint] = size
        return Opening(hello, size, victims, self.config, self._log)

    def opened(self, fingerprint: bytes, namespace: Namespace | None) -> None:
        del self.opening[fingerprint]
        if namespace is not None:
            self._open[fingerprint] = namespace

    def check(self) -> None:
        assert self.used <= self.budget, f"{self.used} bytes of L2 given away, {self.budget} is the budget"

    def clear(self) -> list[Namespace]:
        namespaces = list(self)
        self._open.clear()
        return namespaces
