"""A TCP proxy that makes a server far away: each request waits a latency, all answers share a bandwidth.

python proxy.py HOST PORT LATENCY_SECONDS BYTES_PER_SECOND      # prints its own port, ends with its standard input
"""

from __future__ import annotations

import asyncio
import os
import sys

_PIECE_BYTES = 64 << 10


class Pipe:
    """When the bytes that all answers share have come through."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free = bytes_per_second, 0.0

    async def through(self, size: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + size / self._rate
        if self._free - now > 0.001:
            await asyncio.sleep(self._free - now)


async def _requests(source: asyncio.StreamReader, target: asyncio.StreamWriter, latency: float) -> None:
    while piece := await source.read(_PIECE_BYTES):
        await asyncio.sleep(latency)
        target.write(piece)
        await target.drain()
    target.close()


async def _answers(source: asyncio.StreamReader, target: asyncio.StreamWriter, pipe: Pipe) -> None:
    while piece := await source.read(_PIECE_BYTES):
        await pipe.through(len(piece))
        target.write(piece)
        await target.drain()
    target.close()


async def _main(host: str, port: int, latency: float, rate: float) -> None:
    pipe = Pipe(rate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(_requests(reader, back, latency), _answers(there, writer, pipe), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # with whatever connections there are


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
