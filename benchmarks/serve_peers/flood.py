"""Connections that no server wants: flood.py PORT NUMBER SECONDS. They begin evenly over these seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

HEAD = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
#: How long a connection is kept, unless the server closes it.
KEPT_SECONDS = 8.0


async def no_token(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 16\r\n\r\n" + b'{"input": [0.0]}')
    await reader.read()


async def slow_loris(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A head that never ends, a few bytes at a time."""
    writer.write(HEAD)
    while True:
        writer.write(b"X-a: b\r\n")
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            if not await asyncio.wait_for(reader.read(1), 1.0):
                return


async def large_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """1 GB, until the server closes."""
    writer.write(HEAD + b"Content-Length: 1000000000\r\n\r\n")
    for _ in range(16_000):
        writer.write(bytes(1 << 16))
        await writer.drain()


async def random_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(os.urandom(512))
    await reader.read()


KINDS = (no_token, slow_loris, large_body, random_bytes)


async def one(port: int, number: int) -> None:
    writer = None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(KEPT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await KINDS[number % len(KINDS)](reader, writer)
    if writer is not None:
        writer.transport.abort()


async def flood(port: int, number: int, seconds: float) -> None:
    began = time.monotonic()
    tasks = set()
    for index in range(number):
        wait = began + seconds * index / number - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        elif index % 16 == 0:
            await asyncio.sleep(0)
        task = asyncio.create_task(one(port, index))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(flood(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
