"""What stories of the slab share: a whole read of a slab that a store has open."""

import numpy as np

from kvtier.tiers.file.slab_check import VerifyReport, check_payloads
from kvtier.tiers.file.slab_space import read_rows
from kvtier.tiers.file.store import FileStore


def verify(store: FileStore) -> VerifyReport:
    """Read the whole slab of an idle store and compare it with what the store believes of it; repairs nothing."""
    with store._inside() as is_open:
        assert is_open, "a closed store"
        with store._lock:
            held = {slot: chain_hash for chain_hash, slot in store._blocks.index.items()}
            slots = sorted(held)
            held_rows = store._rows[slots]
        bad, unreadable = check_payloads(store._payload, store.superblock, slots, store._codec, held_rows)
        try:
            with store._file.rewriting:  # the table stays as long as it is
                rows = read_rows(store._io, store._file.fd, store.superblock)
            store._codec.show_names(rows, np.array(slots, np.int64))
            bad_rows = [slot for slot in slots if rows[slot].tobytes() != store._rows[slot].tobytes()]
        except OSError:
            bad_rows = slots
    names = ([held[slot] for slot in found] for found in (bad, bad_rows, unreadable))
    return VerifyReport(store.superblock.num_slots, len(held), *names)
