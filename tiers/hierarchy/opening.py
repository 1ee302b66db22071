"""Opens a hierarchy from a configuration: host memory and the lower tiers that it enables."""

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
_PATIENCE: Final = 10.0  # seconds for the check of one tier's storage
_LOOPS: Final = "kvtier.tiers.fp8_compiled"


class TierModule(Protocol):
    """The interface of a lower tier's module, which only the table of tiers (`kinds.py`) names."""

    def configured(self, config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
        """The tier for one model's blocks, or None if it is off. Opens nothing. ConfigError for a user's error.

        `fingerprint` is `ModelIdentity.fingerprint`, 32 bytes: blocks with another fingerprint must not be found.
        """

    def checked(self, config: Config) -> str | None:
        """A log line about the resources it will use, or None if it is off. Makes no network request.

        ConfigError, with the fix, for a setting that no model could use. A transient fault (a server that is down, a
        disk that hangs) is not one.
        """

    def answers(self, config: Config) -> list[Finding]:
        """Whether the servers it needs answer now; empty if it is off or needs none. As quick as `examine`, and cheap:
        the daemon calls it four times a minute.
        """

    def examine(self, config: Config) -> list[Finding]:
        """What `kvtier doctor` prints, also if the tier is off. Changes nothing, takes seconds, never raises."""


def lower_modules() -> Iterator[tuple[str, TierModule]]:
    """Name and module of every tier below L2 in the table, nearest first."""
    for kind in lower_tiers():
        assert kind.module is not None
        yield kind.name, cast(TierModule, import_module(kind.module))


def check_tiers(config: Config) -> list[str]:
    """Check the settings of the lower tiers before startup. Returns one line about what each tier will use.

    Logs a warning for options of tiers that are off. ConfigError as `TierModule.checked`.
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

    A promise that is not polled for `lease_deadline` seconds expires. `lossy` is `ModelIdentity.lossy`: the encoding of
    blocks in shared tiers; it is part of the fingerprint. `kv_probe`: the KV that the model computes for a few tokens.

    Raises ConfigError if memory or disk are too small or a key is wrong, StoreLocked, FormatError, FingerprintMismatch,
    and KVMismatch if a tier keeps another model's probe. A directory that cannot be used is one warning; the tier
    attaches when it can.
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
    """Only the tiers below host memory, for an engine that has its own; raises and warns as `open_hierarchy`.

    They keep no index of a block's children, since such an engine does not look them up.
    """
    whole_blocks = config.cache.model_copy(update={"partial_blocks": False})
    ports = _open_ports(config.model_copy(update={"cache": whole_blocks}), fingerprint, shape, metrics, rates)
    for port in ports:
        port.probe_alone()
    return ports


def _open_ports(
    config: Config,
    fingerprint: bytes,
    shape: BlockShape,
    metrics: Metrics,
    rates: Rates,
    about: tuple[str | None, KVProbe | None] = (None, None),
) -> list[TierPort]:
    """`about`: the encoding of blocks in shared tiers, and the model's probe."""
    lossy, probe = about
    fp8 = None if lossy is None else Fp8Codec.of(lossy, shape.block_bytes, extension(_LOOPS))
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
    """Opens one tier, any number of times. Each time it compares the tier's probe with the model's own.

    KVMismatch if they differ. A tier without a probe gets one at `settle`, after all tiers agreed; later openings write
    it at once.
    """

    def __init__(self, name: str, open: Callable[[], Tier], probe: KVProbe | None) -> None:
        """`probe` None: the model computed none, so nothing is compared or kept."""
        self.kept: KVProbe | None = None  # as the tier had it at the last opening
        self._name = name
        self._open = open
        self._probe = probe
        self._tier: Tier | None = None  # of the last opening
        self._settled = self._warned = False

    def __call__(self) -> Tier:
        tier = self._open()
        try:
            self._compare(tier)
            if self._settled:
                self._keep(tier)
            self._tier = tier
            self._pass_on()
        except BaseException as error:
            tier.close()
            if isinstance(error, KVMismatch) and self._settled and not self._warned:
                self._warned = True  # at startup the caller reports it
                _log.warning("%s; it stays off until this engine is started again", error)
            raise
        return tier

    def settle(self, tier: Tier | None) -> None:
        """All tiers agree: write the probe to the tier (None: not open yet) if it has none. Raises KVMismatch."""
        self._settled = True
        if tier is not None:
            self._keep(tier)

    def adopt(self, probe: KVProbe) -> None:
        """Compare with this probe, and with it from now on if there was none. KVMismatch if they differ."""
        self.require_alike(probe)
        if self._probe is None:
            self._probe = probe
            self._pass_on()

    def require_alike(self, probe: KVProbe) -> None:
        """KVMismatch if the tier has the probe of a model that computes different KV."""
        if self.kept is not None:
            require_alike(self.kept, probe, self._name)

    def _pass_on(self) -> None:
        if self._tier is not None and self._probe is not None:
            self._tier.set_kv_probe(self._probe.packed())
            self._tier.compares_kv(partial(self._compare_again, self._tier))

    def _compare_again(self, tier: Tier) -> None:
        """The tier may have been emptied or reset: keep the probe there, unless another model was first."""
        try:
            self._compare(tier)
            self._keep(tier)
        except KVMismatch as error:
            _log.warning("%s; nothing there is used until it is reset", error)
            raise

    def _keep(self, tier: Tier) -> None:
        if self.kept is None and self._probe is not None:
            tier.keep_kv_probe(self._probe.packed())
            self._compare(tier)  # another process may have written one first

    def _compare(self, tier: Tier) -> None:
        packed = tier.kv_probe()
        try:
            self.kept = None if packed is None else KVProbe.unpack(packed)
        except FormatError:  # of a later release, or no probe: nothing to compare
            self.kept = None
        if self._probe is not None:
            self.require_alike(self._probe)


def require_alike(kept: KVProbe, probe: KVProbe, place: str) -> None:
    """KVMismatch if two models' KV of the same tokens differ by more than rounding."""
    if (distance := kept.distance(probe)) > probe.tolerance:
        problem = f"{place}: the KV kept under this model's name was computed otherwise"
        raise KVMismatch(f"{problem} ({distance:.2g} apart, where rounding makes {probe.tolerance:g}), {_CAUSE}")
