"""Shows for `kvtier doctor` which way copies between a GPU and L2 go, and why: what engines measured here, and kept."""

from kvtier import __version__
from kvtier.tiers import Finding, ok, warning
from kvtier.tiers.config import Config, format_size
from kvtier.tiers.copies import KeptChoice, KeptChoices

_OF: dict[str, str] = {"own": "kvtier's engine", "engine": "engines such as vLLM"}


def check_copies(config: Config, *, has_gpu: bool, kept: KeptChoices | None = None) -> Finding:
    """It measures nothing itself: the device belongs to the engines."""
    decided = _decided(config)
    if not has_gpu:
        return ok("copies", "not measured: no CUDA device" + decided)
    latest = dict[tuple[str, str], KeptChoice]()
    for each in (kept or KeptChoices()).all():
        if each.key.kvtier == __version__:
            latest.setdefault((each.key.device, each.key.kind), each)
    if not latest:
        return ok("copies", "not measured yet: an engine's first start on the GPU does" + decided)
    found = "; ".join(_shown(each) for each in latest.values()) + decided
    if any(each.choice.source != "measured" and "+" in each.key.ways for each in latest.values()):
        return warning("copies", found, "see the engine's log; its next start measures again")
    return ok("copies", found)


def _decided(config: Config) -> str:
    host = config.host
    parts = [
        *([f"batches from {format_size(host.batch_copies_from)}"] if host.batch_copies_from is not None else []),
        *([f"{host.copy_grid} blocks of threads"] if host.copy_grid is not None else []),
    ]
    return f"; configured: {', '.join(parts)}" if parts else ""


def _shown(kept: KeptChoice) -> str:
    key, choice = kept.key, kept.choice
    size = choice.batch_from
    batches = "never in batches" if size is None else f"in batches from {format_size(size)}" if size else "in batches"
    grid = f", kernel of {choice.grid} blocks" if "kernel" in key.ways else ""
    of = _OF.get(key.kind, key.kind)
    return f"{key.device}, {of}: {batches}{grid} ({choice.reason}; driver {key.driver}, {kept.at})"
