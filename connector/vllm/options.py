"""Parses vLLM's `kv_connector_extra_config`: kvtier's configuration, and options for keys, loads and resets."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvtier.tiers import ConfigError
from kvtier.tiers.config import Config, nearest, options, show_size

_log = logging.getLogger(__name__)

Keys = Literal["vllm", "kvtier"]
OnReset = Literal["drop", "keep"]
Order = Literal["head-token", "physical"]

_STEPS: Final = 3  # steps that fit into L2: one is planned, one is copied, one is hashed

_OWN: Final = {
    "config": "a TOML file with kvtier's configuration",
    "keys": '"vllm" (its own hashes) or "kvtier" (names every engine shares)',
    "layerwise": "true to load each layer under the compute of the ones before",
    "order": '"head-token" (one order for every backend) or "physical" (as vLLM\'s memory has it, without a transpose)',
    "on_reset": '"drop" (vLLM\'s reset of the connector, and so its sleep, empties the tiers) or "keep"',
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    config: Config
    keys: Keys = "vllm"
    layerwise: bool = False
    on_reset: OnReset = "drop"
    order: Order = "head-token"

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "VllmOptions":
        """Parse the extra configuration. An unknown name is a warning; an unusable value raises ConfigError."""
        own = {name: value for name, value in extra.items() if name in _OWN}
        sections = {name: _known(name, value) for name, value in extra.items() if name not in _OWN}
        keys, layerwise = own.get("keys", "vllm"), own.get("layerwise", False)
        if keys not in ("vllm", "kvtier"):
            raise ConfigError(f"kv_connector_extra_config, keys {keys!r}: use {_OWN['keys']}")
        if not isinstance(layerwise, bool):
            raise ConfigError(f"kv_connector_extra_config, layerwise {layerwise!r}: use true or false")
        if (on_reset := own.get("on_reset", "drop")) not in ("drop", "keep"):
            raise ConfigError(f"kv_connector_extra_config, on_reset {on_reset!r}: use {_OWN['on_reset']}")
        if (order := own.get("order", "head-token")) not in ("head-token", "physical"):
            raise ConfigError(f"kv_connector_extra_config, order {order!r}: use {_OWN['order']}")
        if order == "physical" and keys == "kvtier":
            fix = 'keys "kvtier" has one order for every engine; leave order out, or use keys "vllm"'
            raise ConfigError(f"kv_connector_extra_config, order {order!r}: {fix}")
        given = {name: value for name, value in sections.items() if value is not None}
        return cls(Config.load(own.get("config"), **given), keys, layerwise, on_reset, order)

    def shared(self, replica: int = 0, num_replicas: int = 1) -> Config:
        """The configuration with L2 in memory that vLLM's workers can map. They pin it; this process need not.

        Data-parallel replicas of one server divide the file tier's size, each with its own directory: a slab has one
        owner.
        """
        host = self.config.host.model_copy(update={"shared": True, "pin": False})
        file = self.config.file
        if file.path is not None and num_replicas > 1:
            own = {"path": file.path / f"replica-{replica}", "size": file.size // num_replicas}
            file = file.model_copy(update=own)
        return self.config.model_copy(update={"host": host, "file": file})

    def warn(self, block_size: int, max_model_len: int, *, stores: bool = True) -> None:
        """Warn of valid settings that are probably not intended. `stores`: this engine fills its tiers itself.

        `block_size` and `max_model_len` are in tokens.
        """
        cache = self.config.cache
        if block_size >= max_model_len:  # the last token of a text has no KV
            _log.warning(
                "--max-model-len %d: a block has %d tokens here, the least number that all KV groups' blocks divide; "
                "so no text fills one and nothing is kept; raise it, or leave --kv-transfer-config out",
                *(max_model_len, block_size),
            )
        shared = (self.config.redis.url, self.config.objects.bucket, self.config.service.socket)
        if not stores and shared == (None, None, None):
            _log.warning(
                'kv_role "kv_consumer": this vLLM only loads, and nothing else fills its tiers; name a [redis] url, '
                'an [objects] bucket or a [service] socket that the prefill node has as well, or use "kv_both"'
            )
        if "block_size" in cache.model_fields_set and cache.block_size != block_size:
            _log.warning(
                "[cache] block_size %d: vLLM's blocks have %d tokens and so have kvtier's here; leave the option out, "
                "or start vLLM with --block-size %d",
                *(cache.block_size, block_size, cache.block_size),
            )

    def warn_of_memory(self, block_size: int, block_bytes: int, step_tokens: int) -> None:
        """Warn of an L2 that a few steps fill, so that stores find no slot. Not for a daemon's L2.

        `block_size` and `step_tokens`, the most that one step computes, are in tokens.
        """
        a_step = -(-step_tokens // block_size)
        size, least = self.config.host.size, _STEPS * a_step * block_bytes
        if size < least and self.config.service.socket is None:
            _log.warning(
                "[host] size %s: room for %d blocks, and one step fills up to %d (--max-num-batched-tokens %d); while "
                'the last steps\' stores are copied, others are dropped as "queue_full"; give it %s or more',
                *(show_size(size), size // block_bytes, a_step, step_tokens, show_size(least)),
            )


def warn_of_policy(failure_policy: str) -> None:
    """Warn of the cost of vLLM's default policy. Under MultiConnector the outer policy applies."""
    if failure_policy == "fail":
        _log.warning(
            'kv_load_failure_policy "fail": a request whose KV cannot be loaded (a disk error, say) ends with an '
            'error; with "recompute" vLLM computes that KV instead'
        )


def _known(name: str, value: Any) -> Mapping[str, Any] | None:
    """A section without its unknown options; None for an unknown section."""
    sections: dict[str, set[str]] = {}
    for section, option, _ in options():
        sections.setdefault(section, set()).add(option)
    if name not in sections:
        _log.warning("kv_connector_extra_config, %s: unknown and ignored%s", name, nearest(name, {*sections, *_OWN}))
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"kv_connector_extra_config, {name} {value!r}: not a section; write its options in braces")
    for option in value.keys() - sections[name]:
        hint = nearest(option, sections[name])
        _log.warning("kv_connector_extra_config, %s.%s: unknown and ignored%s", name, option, hint)
    return {option: value[option] for option in value.keys() & sections[name]}
