"""Running the app under uvicorn: the socket, Ctrl-C, and a line of throughput now and then."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from pagedjax.engine import AsyncEngine, Engine, EngineStats
from pagedjax.server.body_limit import MAX_BODY_BYTES
from pagedjax.server.snapshots import ServerSnapshots

REPORT_EVERY_S = 5.0
SHUTDOWN_S = 15


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `OSError` whose message says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        reasons = {
            errno.EADDRINUSE: "is in use; stop what runs there, or choose another port",
            errno.EACCES: "may only be used by the administrator; choose one above 1023",
        }
        reason = reasons.get(error.errno, f"cannot be used: {error.strerror or error}")
        raise OSError(f"port {port} on {host} {reason}") from error
    return sock


def address(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def serve(
    engine: Engine,
    sock: socket.socket,
    *,
    log: Callable[[str], None],
    max_body_bytes: int = MAX_BODY_BYTES,
    snapshots: ServerSnapshots | None = None,
) -> bool:
    """Serve until Ctrl-C or SIGTERM; -> True when it stopped because it was asked to.

    The first signal ends running requests, or saves them if there are snapshots, and lets their
    connections close. The second leaves at once, with status 130.
    """
    import uvicorn

    from pagedjax.server.app import create_app

    options = {} if snapshots is None else {"on_outputs": snapshots.record}
    async_engine = AsyncEngine(engine, **options)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # uvicorn would raise the signal again after it has stopped, which ends in a traceback.
            if self.should_exit:
                os._exit(130)
            self.should_exit = True
            os.write(2, b"\nstopping; once more stops at once\n")

    async def main() -> bool:
        config = uvicorn.Config(
            create_app(async_engine, max_body_bytes=max_body_bytes, snapshots=snapshots),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
            lifespan="on",
        )
        server = Server(config)
        tasks = [
            asyncio.create_task(_report(async_engine, log)),
            asyncio.create_task(_end_requests_at_exit(server, async_engine, snapshots)),
        ]
        if snapshots is not None:
            tasks.append(asyncio.create_task(snapshots.save_at_intervals()))
        try:
            await server.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
        return server.should_exit

    stopped = asyncio.run(main())
    # uvicorn has put Python's own handler back, whose traceback nobody wants on the way out.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    return stopped


async def _end_requests_at_exit(
    server: Any, engine: AsyncEngine, snapshots: ServerSnapshots | None
) -> None:
    while not server.should_exit:
        await asyncio.sleep(0.05)
    if snapshots is not None:
        await snapshots.save_and_stop()
        return
    # Requests that are just arriving on open connections are caught by the next round.
    while True:
        engine.abort_all()
        await asyncio.sleep(0.2)


async def _report(engine: AsyncEngine, log: Callable[[str], None]) -> None:
    before, then = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        after, now = engine.stats(), time.monotonic()
        if after.steps != before.steps:
            log(throughput_line(before, after, now - then))
        before, then = after, now
        if engine.error is not None:
            log(f"the engine has failed: {engine.error!r}")
            return


def throughput_line(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """One line on what happened between two snapshots."""

    def rate(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / seconds

    prompt = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    used = after.num_blocks - after.num_free_blocks - after.num_evictable_blocks
    return (
        f"running {after.num_running}, waiting {after.num_waiting} | "
        f"prompt {rate('prompt_tokens'):.1f} tok/s"
        + (f" ({cached / prompt:.0%} cached)" if cached else "")
        + f", output {rate('output_tokens'):.1f} tok/s | "
        f"blocks {used} used, {after.num_evictable_blocks} cached of {after.num_blocks}"
    )


def log_line(text: str) -> None:
    """Print with the time of day; a closed terminal is no reason to fail."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True, file=sys.stdout)
