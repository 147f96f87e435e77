#!/usr/bin/env python
"""Serve a model on an OpenAI-compatible address of this machine.

    python scripts/serve_local.py
    python scripts/serve_local.py --model path/to/model.gguf --port 9000 --max-num-seqs 8
    python scripts/serve_local.py --config configs/engines/small.toml

    python scripts/serve_local.py --snapshot-dir runs/snapshots

Ctrl-C stops it; pressed twice, at once. A GPU is used when JAX sees one. With --snapshot-dir it
saves its requests when it stops, and goes on with them when it is started again.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagedjax.config import EngineConfig, parse_args
from pagedjax.server.body_limit import MAX_BODY_BYTES


@dataclass(frozen=True, kw_only=True)
class Args:
    """Command line of serve_local.py."""

    model: str = "smollm2-135m"
    """A preset's name, a Hugging Face directory or a GGUF file."""

    model_name: str | None = None
    """What clients call the model. None: the preset's, directory's or file's name."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    max_body_bytes: int = MAX_BODY_BYTES
    """Largest body of a request; a larger one is refused (HTTP 413)."""

    snapshot_dir: Path | None = None
    """Folder for a snapshot of all requests: resumed at start, saved when it stops and at POST
    /snapshot. None: no snapshots, requests end when it stops."""

    snapshot_interval_s: float | None = None
    """Save a snapshot every so many seconds, too. The engine stands still while it is saved."""

    config: Path | None = None
    """TOML file of engine settings; flags override it."""

    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        """Raises `ValueError` for a value out of range."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535 (got {self.port})")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1 (got {self.max_body_bytes})")
        interval_s = self.snapshot_interval_s
        if interval_s is not None:
            if not 0.1 <= interval_s < 1e9:
                raise ValueError(
                    f"snapshot_interval_s must be from 0.1 to 1e9 seconds (got {interval_s})"
                )
            if self.snapshot_dir is None:
                raise ValueError("snapshot_interval_s needs snapshot_dir")


def main() -> int:
    """Returns the exit status: 0 after Ctrl-C, 1 when it could not start, or save at its end."""
    args = parse_args(Args, description=__doc__.split("\n")[0])
    try:
        return _serve(args)
    except KeyboardInterrupt:  # while it was starting: do not wait for the compiler
        print("\nstopped", file=sys.stderr, flush=True)
        os._exit(0)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _serve(args: Args) -> int:
    from pagedjax.server.run import bind, log_line

    # Before the model: a port in use should not take a minute.
    with bind(args.host, args.port) as sock, contextlib.ExitStack() as at_end:
        snapshots = _snapshots(args, log_line)
        if snapshots is not None:
            at_end.callback(snapshots.close)
        return _serve_engine(args, sock, snapshots)


def _snapshots(args: Args, log: Any) -> Any:
    """The server's snapshots, if it is to have any; a damaged one is refused at once."""
    if args.snapshot_dir is None:
        return None
    from pagedjax.server.snapshots import ServerSnapshots

    snapshots = ServerSnapshots(args.snapshot_dir, interval_s=args.snapshot_interval_s, log=log)
    with _told_what_to_do():
        snapshots.check()
    return snapshots


@contextlib.contextmanager
def _told_what_to_do() -> Iterator[None]:
    from pagedjax.engine import SnapshotError

    try:
        yield
    except SnapshotError as error:
        raise ValueError(
            f"{error}. The file is left as it is: move it away to start without it."
        ) from error


def _serve_engine(args: Args, sock: Any, snapshots: Any) -> int:
    from pagedjax.engine import build_engine
    from pagedjax.server.run import address, log_line, serve

    engine = build_engine(
        args.model,
        args.engine,
        model_name=args.model_name,
    )
    config, url = engine.config, address(sock)
    print(f"model    {engine.model_name}, {config.dtype}, {engine.max_model_len} tokens a request")
    print(
        f"KV pool  {engine.num_blocks:,} blocks of {engine.block_size}: "
        f"{engine.num_blocks * engine.block_size:,} tokens ({config.kv_cache_dtype})"
    )
    print(f"device   {engine.device_name}")
    if snapshots is not None:
        print(f"snapshot {_resume(snapshots, engine)}")
    print(f"address  {url}  (OpenAI clients: base_url={url}/v1)", flush=True)
    serve(engine, sock, log=log_line, max_body_bytes=args.max_body_bytes, snapshots=snapshots)
    print("stopped", file=sys.stderr)
    return 0 if snapshots is None or snapshots.error is None else 1


def _resume(snapshots: Any, engine: Any) -> str:
    """Go on from the snapshot, if there is one; -> what to say of it."""
    with _told_what_to_do():
        count = snapshots.resume(engine)
    if count is None:
        return f"{snapshots.path} (none yet)"
    return f"{snapshots.path}: resumed {count} requests"


if __name__ == "__main__":
    sys.exit(main())
