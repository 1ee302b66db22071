"""The common parts of tiers that nodes share: how records are written and verified, and which changes are reported."""

from kvtier.tiers.shared.changes import MAX_NAMES, KnownNames
from kvtier.tiers.shared.forms import ClearForm, RecordForm, form_of, format_epoch, parse_epoch
from kvtier.tiers.shared.life import OutcomeCounts, SharedEpoch, SharedTier, StorageFailed, cut_off
from kvtier.tiers.shared.stream import ByteStream, SendBuffer, TlsStream, Transfer, cut
