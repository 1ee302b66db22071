"""A relay that only passes bytes on, by asyncio: what anything must pay that reads and writes each piece of a stream.

argv: its port, and that of whom it passes every connection on to.
"""

import asyncio
import sys


class Side(asyncio.Protocol):
    """One side of a connection that is passed on; what it reads, the other writes."""

    transport: asyncio.Transport
    other: "Side"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.transport.close()


class Asking(Side):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self.connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        _, self.other = await asyncio.get_running_loop().create_connection(Side, "127.0.0.1", int(sys.argv[2]))
        self.other.other = self
        self.transport.resume_reading()


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Asking, "127.0.0.1", int(sys.argv[1]))
    print("ready on", sys.argv[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
