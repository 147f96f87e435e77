"""From settings to an engine: what is decided on the way."""

import jax
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine.build import compilation_cache_dir, scheduler_config, use_compilation_cache


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "blocks"),
    [(5825, 0.01, 58), (28, 0.01, 0), (100, 0.29, 29), (100, 0.0, 0), (3, 0.99, 2)],
)
def test_watermark_is_a_share_of_the_pool(num_blocks, watermark, blocks):
    config = EngineConfig(num_blocks=num_blocks, watermark=watermark, max_model_len=64)
    assert scheduler_config(config, platform="cpu").watermark_blocks == blocks


@pytest.fixture
def no_cache_in_jax():
    """JAX without a folder of compiled programs, and as it was afterwards."""
    from jax.experimental.compilation_cache import compilation_cache

    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_compiled_programs_lie_beside_the_models(no_cache_in_jax, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path))
    assert compilation_cache_dir(EngineConfig()) == tmp_path / "compiled"
    monkeypatch.delenv("PAGEDJAX_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(compilation_cache_dir(EngineConfig())) == "/home/someone/.cache/pagedjax/compiled"
    assert compilation_cache_dir(EngineConfig(compilation_cache_dir="off")) is None
    given = EngineConfig(compilation_cache_dir="~/x")
    assert str(compilation_cache_dir(given)) == "/home/someone/x"
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert compilation_cache_dir(EngineConfig()) is None  # somebody has chosen already
    assert compilation_cache_dir(given) is not None


def test_compiled_programs_are_kept_even_if_jax_has_compiled_before(no_cache_in_jax, tmp_path):
    jax.jit(lambda x: x + 1)(1.0)
    use_compilation_cache(tmp_path / "a" / "b")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: x * 3 + 1)(1.0)
    assert list((tmp_path / "a" / "b").iterdir())
