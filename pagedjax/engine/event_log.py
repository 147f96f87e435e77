"""What an engine says of itself at the head of its event log."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from pagedjax.config import EngineConfig
from pagedjax.core.config import SchedulerConfig
from pagedjax.engine.device import Device
from pagedjax.eventlog import Recorder


def open_event_log(
    config: EngineConfig, device: Device, fingerprint: Mapping[str, Any]
) -> Recorder:
    """The recorder that `config.event_log` asks for. Raises `OSError`."""
    header = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "fingerprint": fingerprint,
        "engine": dataclasses.asdict(config),
        "jax": jax.__version__,
        "device": device.name,
    }
    path = Path(config.event_log)
    path.parent.mkdir(parents=True, exist_ok=True)
    return Recorder(
        path,
        header,
        config=SchedulerConfig(**fingerprint["scheduler"]),
        text=config.event_log_text,
        checksum_every=config.event_log_checksum_every,
        kv=config.event_log_kv,
    )
