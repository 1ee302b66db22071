from .consumer import EventConsumer
from .guard import CurveKeys
from .prefix_index import PrefixIndex, prompt_hashes
from .publisher import AnnouncedBlocks, Publisher, Source, TierFeed
from .wire import MAX_BLOCK_SIZE, BlockRemoved, BlockStored, KVEvent, as_u64, namespace_of, topic_of

__all__ = [
    "MAX_BLOCK_SIZE",
    "AnnouncedBlocks",
    "BlockRemoved",
    "BlockStored",
    "CurveKeys",
    "EventConsumer",
    "KVEvent",
    "PrefixIndex",
    "Publisher",
    "Source",
    "TierFeed",
    "as_u64",
    "namespace_of",
    "prompt_hashes",
    "topic_of",
]
