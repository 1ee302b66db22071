"""Hands a prompt's blocks from a prefill node to a decode node: names what was stored, and waits for it there.

A proxy asks the prefill node with `kv_transfer_params` {"do_remote_decode": true}. It passes what that answers as
`kv_transfer_params` on to the decode node. Ours are under one key of our own, beside those of other connectors:

    {"kvtier": {"store": <hex: the namespace>, "blocks": <how many>, "last": <hex: the name of the last one>}}

They come back from outside, so nothing of them is believed: they only say how long a lookup may be put off.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtier.connector.daemon import RemoteTiers
from kvtier.connector.vllm.requests import Awaited, TrackedRequest
from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import CacheTiers, Hierarchy
from kvtier.tiers.naming import state_name

if TYPE_CHECKING:
    from kvtier.connector.vllm.slots import SlotPlan

_log = logging.getLogger(__name__)

_KEY: Final = "kvtier"
_LOOK: Final = 0.02  # seconds between two looks: over a daemon each is a round trip
_FIXES: Final = {
    "model": "give both nodes one checkpoint, dtype, --block-size, drafter, parallel sizes, keys and [cache] epoch",
    "prompt": "have the proxy send both nodes the same prompt, cache_salt and adapter",
}


class Handovers:
    """The hand-overs of one engine, of either side. Called from the scheduler's thread; nothing here waits."""

    def __init__(self, tiers: CacheTiers, plan: "SlotPlan", store: bytes, patience: float) -> None:
        """`store` names the namespace. `patience`: for so many seconds a request waits for what was handed over."""
        self._tiers = tiers
        self._size = plan.block_size
        self._groups = [state.group for state in plan.states]
        self._lookahead = plan.lookahead
        self._keeps_blocks = bool(plan.attention)  # or states alone
        self._store = store.hex()
        self._patience = patience
        self._warned = False

    def offer(self, row: TrackedRequest) -> dict[str, Any] | None:
        """The `kv_transfer_params` of the answer to a request that has ended; None if nobody asked for them.

        With states it names the last border behind which the decode node can go on. vLLM has few of those.
        """
        asked = row.request.kv_transfer_params
        if not isinstance(asked, dict) or not asked.get("do_remote_decode") or _KEY in asked:
            return None
        in_prompt = (row.request.num_prompt_tokens - self._lookahead) // self._size  # those that the prompt alone names
        num_blocks = row.border if self._groups else min(row.stored or 0, in_prompt)
        if not num_blocks:
            return None
        said = {"store": self._store, "blocks": num_blocks, "last": row.chain.hashes[num_blocks - 1].hex()}
        # Noted there, too: under MultiConnector a second kvtier must not answer under the same key.
        row.request.kv_transfer_params = {**asked, _KEY: said}
        return {_KEY: said}

    def admit(self, row: TrackedRequest) -> None:
        """Note what a new request is to wait for, if a prefill node says that it has stored something for it."""
        given, hashes = row.request.kv_transfer_params, row.chain.hashes
        said = given.get(_KEY) if isinstance(given, Mapping) else None
        if not isinstance(said, Mapping) or given.get("do_remote_prefill") or given.get("do_remote_decode"):
            return  # if another connector delivers the KV, there is nothing to wait for
        num_blocks = said.get("blocks")
        if not isinstance(num_blocks, int) or not 0 < num_blocks <= len(hashes):
            return
        if said.get("store") != self._store:
            return self._warn("model")
        if said.get("last") != hashes[num_blocks - 1].hex():
            return self._warn("prompt")
        states = [state_name(hashes[num_blocks - 1], group) for group in self._groups]
        until = time.monotonic() + self._patience
        blocks = hashes[:num_blocks] if self._keeps_blocks else ()
        row.awaited = Awaited(num_blocks * self._size, [*blocks, *states], until)

    def is_coming(self, row: TrackedRequest, now: float) -> bool:
        """Whether to delay a lookup: something is not there yet, it may still come, and there is time."""
        awaited = row.awaited
        if awaited is None or now < awaited.look_at:
            return awaited is not None
        awaited.look_at = now + _LOOK
        has_time = now < awaited.until and row.asked < awaited.num_tokens and self._may_come()
        if not has_time or self._is_there(awaited.names):
            row.awaited = None
        return row.awaited is not None

    def _is_there(self, names: Sequence[ChainHash]) -> bool:
        """Whether all is there. What is stored last is looked at first: mostly that costs one name, not thousands."""
        last = names[-1 - len(self._groups) :]
        return not (self._tiers.locate(last, 0.0).miss or self._tiers.locate(names, 0.0).miss)

    def _may_come(self) -> bool:
        """Whether what others store is seen here: through the daemon, or through a shared tier that answers."""
        if isinstance(self._tiers, RemoteTiers):
            return self._tiers.member is not None
        return not isinstance(self._tiers, Hierarchy) or any(port.locates for port in self._tiers.ports)

    def _warn(self, differs: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "the prefill node's blocks have other names than this node's, so the %s differs: %s",
                *(differs, _FIXES[differs]),
            )
