"""From a configuration to a hierarchy with its tiers open: those of the table that the configuration asks for."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from importlib import import_module
from typing import Final, Protocol, cast

from kvtier.tiers import (
    TIERS,
    BlockShape,
    ConfigError,
    ConfiguredTier,
    Finding,
    FormatError,
    Fp8Codec,
    Fp8Loops,
    KVMismatch,
    Metrics,
    Tier,
    lower_tiers,
)
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.io_queue import begun
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PackedShape, PortSettings, Rates, TierPort
from kvtier.tiers.host import HostRegion, HostTier, slot_stride
from kvtier.tiers.naming import KVProbe

_log = logging.getLogger(__name__)
_CAUSE: Final = "by another release of a library or by code that was replaced"
_PATIENCE: Final = 10.0  # seconds that a disk may take to be looked at
_LOOPS: Final = "kvtier.tiers.fp8_compiled"


class TierModule(Protocol):
    """What the module of a lower tier has: the table of tiers (`kinds.py`) names it, nobody else knows it."""

    def configured(self, config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
        """The tier for the blocks of one model, None if it is off; opens nothing. ConfigError for what the user fixes.

        `fingerprint` is `ModelIdentity.fingerprint`, 32 bytes: blocks of another are never to be found.
        """

    def checked(self, config: Config) -> str | None:
        """What it is going to use, as a line for the log; None if it is off. Asks nobody over a network.

        ConfigError, with the fix, for a setting that no model could use. What may pass by itself is none: a server that
        is away, a disk that hangs.
        """

    def answers(self, config: Config) -> list[Finding]:
        """Whether the servers it needs answer now; nothing where it is off or needs none. As quick as `examine`, and
        cheap: a daemon calls it four times a minute.
        """

    def examine(self, config: Config) -> list[Finding]:
        """What `kvtier doctor` says of it, on or off. Changes nothing, ends within seconds, raises nothing."""


def lower_modules() -> Iterator[tuple[str, TierModule]]:
    """Name and module of every tier below L2 that there can be, nearest first."""
    for kind in lower_tiers():
        assert kind.module is not None
        yield kind.name, cast(TierModule, import_module(kind.module))


def check_tiers(config: Config) -> list[str]:
    """Look at the settings of the lower tiers before anything waits for them: what each is going to use.

    Options of tiers that are off are a warning. ConfigError as `TierModule.checked`.
    """
    for idle in config.idle_options():
        _log.warning("%s", idle)
    lines = []
    for name, module in lower_modules():
        looked = begun(f"kvtier-{name}-check", partial(module.checked, config))
        if not wait((looked,), _PATIENCE).done:
            _log.warning("[%s] hangs: no answer within %g s; look at its storage", name, _PATIENCE)
        elif (line := looked.result()) is not None:
            lines.append(line)
    return lines


def open_hierarchy(
    config: Config,
    fingerprint: bytes,
    shape: BlockShape,
    *,
    lossy: str | None = None,
    lease_deadline: float = 60.0,
    kv_probe: KVProbe | None = None,
) -> Hierarchy:
    """The hierarchy a configuration describes, for the blocks of one model (`ModelIdentity.fingerprint`, 32 bytes).

    A promise nobody asks about is kept for `lease_deadline` seconds. `lossy` is `ModelIdentity.lossy`: how tiers that
    nodes share keep blocks. The fingerprint is made of it, too. `kv_probe`: what the model computes of a few tokens.

    Raises ConfigError where memory or disk are too small or a key is not the one needed, StoreLocked, FormatError,
    FingerprintMismatch, and KVMismatch if a tier keeps another model's probe. A directory that cannot be used is one
    warning, and the tier attaches when it can.
    """
    metrics, rates = Metrics(), Rates(config.cache.load_or_recompute)
    if config.host.size < shape.block_bytes:
        raise ConfigError(
            f'[host] size "{config.host.size}": one block of this model takes {shape.block_bytes} bytes; raise it'
        )
    region = HostRegion.allocate(
        max(1, config.host.size // slot_stride(shape.block_bytes)),
        shape.block_bytes,
        shared=config.host.shared,
        huge_pages=config.host.huge_pages,
    )
    host = HostTier(
        region,
        block_size=shape.block_size,
        policy=config.cache.policy,
        verify=config.host.verify == "always",
        partial_blocks=config.cache.partial_blocks,
    )
    try:
        ports = _open_ports(config, fingerprint, shape, metrics, rates, (lossy, kv_probe))
    except BaseException:
        host.close()
        raise
    settings = HierarchySettings(
        write_policy=config.cache.write_policy,
        admit_after=config.cache.admit_after,
        store_queue=config.cache.store_queue,
        prefetch_deadline=config.cache.prefetch_deadline,
        lease_deadline=lease_deadline,
    )
    return Hierarchy(host, ports, settings, metrics, rates)


def open_ports(config: Config, fingerprint: bytes, shape: BlockShape, metrics: Metrics, rates: Rates) -> list[TierPort]:
    """The tiers below host memory alone, for an engine that keeps its own; raises and warns as `open_hierarchy`.

    Nobody asks these for a block's children, so they keep no index of them.
    """
    whole_blocks = config.cache.model_copy(update={"partial_blocks": False})
    return _open_ports(config.model_copy(update={"cache": whole_blocks}), fingerprint, shape, metrics, rates)


def _open_ports(
    config: Config,
    fingerprint: bytes,
    shape: BlockShape,
    metrics: Metrics,
    rates: Rates,
    about: tuple[str | None, KVProbe | None] = (None, None),
) -> list[TierPort]:
    """`about`: how tiers that nodes share keep the blocks, and the model's probe."""
    lossy, probe = about
    fp8 = None if lossy is None else Fp8Codec.of(lossy, shape.block_bytes, cast("Fp8Loops | None", extension(_LOOPS)))
    ports: list[TierPort] = []
    openings: list[ProbedOpening] = []
    try:
        for name, module in lower_modules():
            codec = fp8 if TIERS[name].takes_fp8 else None
            packed = shape if codec is None else PackedShape(shape.block_size, codec.packed_bytes)
            if (tier := module.configured(config, fingerprint, packed)) is not None:
                if codec is not None:
                    _log.info("[cache] lossy: %s keeps K and V as %s", TIERS[name].shown, lossy)
                breaker = config.breaker
                patience = PortSettings(
                    tier.deadline,
                    breaker.failures,
                    breaker.retry_after,
                    joined=tier.joined,
                    takes_stores=tier.takes_stores,
                    codec=codec,
                )
                openings.append(ProbedOpening(TIERS[name].shown, tier.open, probe))
                ports.append(TierPort(name, openings[-1], patience, metrics, rates))
        for opening, port in zip(openings, ports, strict=True):
            opening.settle(port.tier)
    except BaseException:
        for port in ports:
            port.close(0.0)
        raise
    return ports


class ProbedOpening:
    """Opens one tier, as often as it is asked; each time it compares what the tier keeps with the model's own probe.

    KVMismatch if they are apart. A tier that keeps none is left without one until `settle`, which is for when all tiers
    have agreed; one that is opened later gets the probe at once.
    """

    def __init__(self, name: str, open: Callable[[], Tier], probe: KVProbe | None) -> None:
        """`probe` None: the model was not asked, so nothing is compared or kept."""
        self.kept: KVProbe | None = None  # in the tier as it was opened last
        self._name = name
        self._open = open
        self._probe = probe
        self._tier: Tier | None = None  # as it was opened last
        self._settled = self._warned = False

    def __call__(self) -> Tier:
        tier = self._open()
        try:
            self._compare(tier)
            if self._settled:
                self._keep(tier)
            self._tier = tier
            self._tell()
        except BaseException as error:
            tier.close()
            if isinstance(error, KVMismatch) and self._settled and not self._warned:
                self._warned = True  # at start whoever opens the tiers says so
                _log.warning("%s; it stays off until this engine is started again", error)
            raise
        return tier

    def settle(self, tier: Tier | None) -> None:
        """All tiers agree. Give the tier, or None that is not open yet, the probe if it keeps none. KVMismatch, too."""
        self._settled = True
        if tier is not None:
            self._keep(tier)

    def adopt(self, probe: KVProbe) -> None:
        """Compare with this probe, and with it from now on if there was none. KVMismatch if they are apart."""
        self.require_alike(probe)
        if self._probe is None:
            self._probe = probe
            self._tell()

    def require_alike(self, probe: KVProbe) -> None:
        """KVMismatch if the tier keeps the probe of a model that computes something else."""
        if self.kept is not None:
            require_alike(self.kept, probe, self._name)

    def _tell(self) -> None:
        if self._tier is not None and self._probe is not None:
            self._tier.tell_kv_probe(self._probe.packed())

    def _keep(self, tier: Tier) -> None:
        if self.kept is None and self._probe is not None:
            tier.keep_kv_probe(self._probe.packed())
            self._compare(tier)  # somebody else may have been first

    def _compare(self, tier: Tier) -> None:
        packed = tier.kv_probe()
        try:
            self.kept = None if packed is None else KVProbe.unpack(packed)
        except FormatError:  # of a later release, or no probe at all: nothing to compare with
            self.kept = None
        if self._probe is not None:
            self.require_alike(self._probe)


def require_alike(kept: KVProbe, probe: KVProbe, place: str) -> None:
    """KVMismatch if two models' KV of the same tokens differ by more than rounding."""
    if (distance := kept.distance(probe)) > probe.tolerance:
        said = f"{place}: the KV kept under this model's name was computed otherwise"
        raise KVMismatch(f"{said} ({distance:.2g} apart, where rounding makes {probe.tolerance:g}), {_CAUSE}")
