"""The tier of other nodes' memory from the configuration section [peers], and the doctor's checks. A `TierModule`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvtier.tiers import BATCH_BYTES, BlockShape, ConfigError, ConfiguredTier, Finding, error, ok, refusal, warning
from kvtier.tiers.config import Config
from kvtier.tiers.peers.link import IsMyself, PeerLink
from kvtier.tiers.peers.owners import most_nodes
from kvtier.tiers.peers.peer import PeerAddresses
from kvtier.tiers.peers.store import PeersStore
from kvtier.tiers.peers.stream import PeerFailed, address_text
from kvtier.tiers.peers.wire import LentBlocks, shared_key

_ANSWER_SECONDS = 2.0  # the doctor waits longer than the tier
_CHECKED_AT_ONCE = 16


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [peers] names no nodes."""
    peers = config.peers
    if not peers.nodes and peers.listen is None:
        return None

    def reach() -> PeersStore:
        return PeersStore.open(config, fingerprint, slot_bytes=shape.block_bytes, block_size=shape.block_size)

    # the store's own time limit for the largest batch, and for a connection that it may have to open first
    batch = max(BATCH_BYTES, shape.block_bytes) / peers.bandwidth
    return ConfiguredTier(reach, peers.connect_timeout + peers.deadline + batch, takes_stores=False)


def checked(config: Config) -> str | None:
    """Reads the key, without a connection: a peer that is down is found later."""
    peers = config.peers
    if not peers.nodes and peers.listen is None:
        return None
    assert peers.key_file is not None
    shared_key(peers.key_file)
    borrows = f"borrows from {', '.join(peers.nodes)}" if peers.nodes else "borrows from no node"
    lends = f"lends on {peers.listen}" if peers.listen is not None else "lends nothing"
    return "; ".join([f"[peers] {borrows}, {lends}", *_knowledge(config)])


def _knowledge(config: Config) -> Iterator[str]:
    """How this node knows which blocks others hold, and others which it holds."""
    if config.peers.nodes:
        yield (
            "queries a ring of owners for who holds what"
            if config.peers.index == "ring"
            else "knows what others hold by their KV events if they publish them, else by queries"
            if config.peers.events
            else "queries others for what they hold"
        )
    if config.peers.listen is not None:
        is_announced = all(each and each.startswith("tcp://") for each in (config.events.publish, config.events.replay))
        yield (
            "its KV events show others what it holds"
            if is_announced
            else "others have to query it: [events] publish and replay are not both tcp:// addresses"
        )


def answers(config: Config) -> list[Finding]:
    """None: peers come and go, and each model's status says how many answer."""
    return []


def examine(config: Config) -> list[Finding]:
    """Every address that [peers] nodes have, some at once, and every node that has none. Each reply has a deadline."""
    peers = config.peers
    if not peers.nodes and peers.listen is None:
        return [ok("peers", "off: no [peers] nodes and no listen")]
    assert peers.key_file is not None
    try:
        key = shared_key(peers.key_file)
    except ConfigError as refused:
        return [refusal("peers", refused)]
    if not peers.nodes:
        return [ok("peers", f"lends on {peers.listen}, borrows from no node: no [peers] nodes")]
    unknown = [node for node in peers.nodes if not PeerAddresses([node]).look_up()]
    found = PeerAddresses(peers.nodes, most=most_nodes(peers)).look_up()
    findings = [warning(f"peer {node}", "no address", "fix [peers] nodes, or start this node") for node in unknown]
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
        return [*findings, *pool.map(lambda address: _check_peer(address, key), found)]


def _check_peer(address: tuple[str, int], key: bytes) -> Finding:
    """Whether a daemon answers there, under the same key."""
    name = f"peer {address_text(address)}"
    try:
        PeerLink.opened(address, key, LentBlocks(bytes(32), 1, 1), _ANSWER_SECONDS).close()
    except IsMyself:
        return ok(name, "this process")
    except PeerFailed as failed:
        if failed.reason == "key":
            return error(name, "it has another key", "give all nodes the same [peers] key_file")
        if failed.reason == "no_connection":
            return warning(name, "not reachable", "start its daemon with [peers] listen, or fix [peers] nodes")
        return warning(name, f"no good answer: {failed.reason}", "see whether a daemon of this version listens there")
    return ok(name, "answers, and has the same key")
