"""Feeds a parser bytes that coverage chooses, by atheris: `_fuzz_child.py TARGET -max_total_time=SECONDS …`.

Whatever comes in, a parser returns a value or raises FormatError; anything else ends this process with an error.
"""

import sys
from collections.abc import Callable
from typing import Final

import atheris

with atheris.instrument_imports(include=["kvtier"]):
    from kvtier.connector.events import decode_batch
    from kvtier.connector.frames import MAX_FRAME, FrameReader
    from kvtier.connector.greetings import unpack_greeting, unpack_reception
    from kvtier.connector.messages import unpack_reply, unpack_request
    from kvtier.connector.plan import StepPlan
    from kvtier.service.archive_format import decode_header
    from kvtier.service.lookup_trace import _parse
    from kvtier.service.prefix_index import PrefixIndex
    from kvtier.tiers.errors import FormatError
    from kvtier.tiers.redis_records import Namespace

NAME: Final = b"n" * 32


def frames(data: bytes) -> None:
    """The daemon's socket, both ways, before and after the greeting."""
    for unpack in (unpack_greeting, unpack_reception, unpack_request, unpack_reply):
        try:
            for body in FrameReader(MAX_FRAME).feed(len(data).to_bytes(4, "little") + data):
                unpack(body)
        except FormatError:
            continue


def record(data: bytes) -> None:
    """The head of a value in Redis."""
    namespace = Namespace("kvtier", b"f" * 32, slot_bytes=4096, block_size=4)
    head = data[: namespace.head_bytes].ljust(namespace.head_bytes, b"\0")
    namespace.decode(head, NAME, 7)


def events(data: bytes) -> None:
    """A batch of KV events, and what it does to an index."""
    try:
        batch = decode_batch(data)
    except FormatError:
        return
    index = PrefixIndex(1)
    for event in batch.events:
        index.apply("w", event)
    index.check()


def raising(parse: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """For parsers that return or raise."""

    def target(data: bytes) -> None:
        try:
            parse(data)
        except FormatError:
            return

    return target


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "frames": frames,
    "record": record,
    "events": events,
    "plan": raising(StepPlan.decode),
    "archive": raising(decode_header),
    "trace": raising(_parse),
}

if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
