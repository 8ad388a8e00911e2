"""One-to-all over plain HTTP, what a web server or an object store gives: all download from the source."""

import asyncio
from time import monotonic

import aiohttp
from aiohttp import web

from benchmarks.broadcast_system import SOURCE, Task, answer_check
from benchmarks.lab_process import Channel

PORT = 4002
_PIECE = 256 * 1024


def run_http(channel: Channel, task: Task) -> None:
    """Work of a lab process: the server or one client."""
    asyncio.run(_serve(channel, task) if task.is_source else _download(channel, task))


async def _serve(channel: Channel, task: Task) -> None:
    async def answer(request: web.Request) -> web.FileResponse:
        return web.FileResponse(task.file.path)  # sent by the kernel's sendfile

    app = web.Application()
    app.router.add_get("/file", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, task.address, PORT).start()
    channel.send(address=f"http://{task.address}:{PORT}/file")
    await asyncio.to_thread(channel.receive)
    channel.send(connected=True)
    await asyncio.to_thread(channel.receive)
    await asyncio.Event().wait()  # serves until it is killed


async def _download(channel: Channel, task: Task) -> None:
    channel.send(address="")
    url = (await asyncio.to_thread(channel.receive))["connect"][SOURCE]
    path = task.directory / "file"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=60)) as session:
        channel.send(connected=True)
        await asyncio.to_thread(channel.receive)
        async with session.get(url) as response:
            response.raise_for_status()
            with path.open("wb") as file:
                async for piece in response.content.iter_chunked(_PIECE):
                    file.write(piece)
        channel.send(at=monotonic())
    await asyncio.to_thread(answer_check, channel, path)
