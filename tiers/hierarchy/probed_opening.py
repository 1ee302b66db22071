"""Opens a lower tier only for a model that computes the KV which is kept there."""

import logging
from collections.abc import Callable
from typing import Final

from kvtier.tiers import FormatError, KeepsKVProbe, KVMismatch, TellsKVProbe, Tier
from kvtier.tiers.naming import KVProbe

_log = logging.getLogger(__name__)

_CAUSE: Final = "by another release of a library or by code that was replaced"


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
        self._tells: TellsKVProbe | None = None  # the tier as it was opened last, if it is of that kind
        self._settled = self._warned = False

    def __call__(self) -> Tier:
        tier = self._open()
        keeps: object = tier
        if isinstance(keeps, KeepsKVProbe):
            try:
                self._compare(keeps)
                if self._settled:
                    self._keep(keeps)
            except BaseException as error:
                tier.close()
                if isinstance(error, KVMismatch) and self._settled and not self._warned:
                    self._warned = True  # at start whoever opens the tiers says so
                    _log.warning("%s; it stays off until this engine is started again", error)
                raise
        if isinstance(keeps, TellsKVProbe):
            self._tells = keeps
            self._tell()
        return tier

    def settle(self, tier: object) -> None:
        """All tiers agree. Give the tier, or None that is not open yet, the probe if it keeps none. KVMismatch, too."""
        self._settled = True
        if isinstance(tier, KeepsKVProbe):
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
        if self._tells is not None and self._probe is not None:
            self._tells.tell_kv_probe(self._probe.packed())

    def _keep(self, tier: KeepsKVProbe) -> None:
        if self.kept is None and self._probe is not None:
            tier.keep_kv_probe(self._probe.packed())
            self._compare(tier)  # somebody else may have been first

    def _compare(self, tier: KeepsKVProbe) -> None:
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
