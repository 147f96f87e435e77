"""Fixtures that more than one test folder needs: the real model, a real SentencePiece model."""

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path

import hypothesis
import pytest

# Compilation makes the first example of a property slow and the rest fast, so a deadline per
# example would only measure XLA. In CI the examples are the same in every run.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs in pytest's cache: most of the time of these tests is compilation, and
    many compile the same. XLA's key covers the program, the flags and the version.

    `--cache-clear` forgets them, `-p no:cacheprovider` does without.
    """
    cache = getattr(config, "cache", None)
    if cache is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    # Before jax is imported, and for the processes that tests start. With a limit JAX locks the
    # folder for each access, so several processes can share it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.mkdir("compiled"))
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 * 1024**3)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


_COMPILED_QUICKLY = ("attention", "core", "project", "replay", "sampling", "shell")
"""Folders whose programs LLVM need not optimise: what XLA does before it is the same. The real
model, the model's parity with references and what is marked `optimized` are compiled as the product
is."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compile a third faster where that proves as much."""
    quickly = item.path.parent.name in _COMPILED_QUICKLY
    quickly &= item.get_closest_marker("optimized") is None
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_disable_most_optimizations", quickly)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let go of compiled programs that later tests will not call.

    Each takes some memory maps, of which Linux gives a process 65,530; when they run out, LLVM
    aborts the process.
    """
    if nextitem is None or nextitem.path == item.path:
        return
    if nextitem.path.parent != item.path.parent or item.path.parent.name in ("attention", "models"):
        import jax

        jax.clear_caches()
        gc.collect()


def _may_fetch() -> bool:
    """Whether a test may download what it lacks: in CI, or where PAGEDJAX_FETCH=1 asks for it."""
    return bool(os.environ.get("CI")) or os.environ.get("PAGEDJAX_FETCH") == "1"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of the real SmolLM2-135M-Instruct GGUF file (checksum verified by the preset's loader).

    `make test` fetches it beforehand. A bare `pytest` run without it skips the tests that need it;
    where fetching is allowed and fails, they fail.
    """
    from pagedjax.models import presets

    path = presets.cached_model("smollm2-135m")
    if path is None and _may_fetch():
        path = presets.resolve_model("smollm2-135m")
    if path is None:
        pytest.skip("SmolLM2-135M is not on this machine; `make fetch` downloads it")
    return Path(path)


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Greedy outputs of SmolLM2-135M-Instruct by Hugging Face transformers (tests/golden)."""
    path = Path(__file__).parent / "golden" / "smollm2_135m_float32.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def sentencepiece_model() -> Path:
    """Path of a real SentencePiece `tokenizer.model`: one that the wheel mistral-common carries.

    The package is installed without its dependencies and never imported; only the file is read.
    """
    spec = importlib.util.find_spec("mistral_common")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "tokenizer.model.v1"
        if path.is_file():
            return path
    if os.environ.get("CI"):
        pytest.fail("mistral-common is not installed; scripts/environment.sh installs it")
    pytest.skip("mistral-common is not installed; `make test` installs it")
