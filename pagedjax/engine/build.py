"""From the name of a model and settings to an engine that is ready to serve."""

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax import memory
from pagedjax.config import EngineConfig
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.execute import StepConfig
from pagedjax.engine.engine import Engine

MAX_EVICT_BATCH = 128
"""Cached blocks go in batches of a 64th of the pool, at most so many: finding the oldest costs the
same for one block as for many, and a batch this small never shows in what is found. There is
nothing to gain in choosing another size, so it is no setting."""


def build_engine(
    model: str | Path,
    config: EngineConfig | None = None,
    *,
    model_name: str | None = None,
    progress: bool = True,
    warm_up: bool = True,
) -> Engine:
    """Load weights and tokenizer, size the pool, compile every bucket.

    Args:
      model: a preset's name, a Hugging Face directory or a GGUF file.
      model_name: what users call it; by default the preset's, directory's or file's name.
      progress: show bars on stderr.
      warm_up: compile every step size now; otherwise each is compiled when it is first needed.
    """
    from pagedjax.models import params as model_params
    from pagedjax.models.llama import LlamaModel
    from pagedjax.models.presets import resolve_model
    from pagedjax.models.weights import load_model
    from pagedjax.tokenizers import load_tokenizer

    config = EngineConfig() if config is None else config
    folder = compilation_cache_dir(config)
    if folder is not None:
        use_compilation_cache(folder)
    device = jax.devices()[0]
    default_dtype = model_params.default_dtype(device.platform)
    config = memory.fill_dtypes(config, default_dtype=default_dtype.name)
    path = resolve_model(str(model))
    stacked = model_params.default_stacked(device.platform)
    loaded = load_model(path, dtype=jnp.dtype(config.dtype), stacked=stacked)
    tokenizer = load_tokenizer(path, vocab_size=loaded.config.vocab_size)
    config = memory.fill_sizes(
        config,
        loaded.config,
        platform=device.platform,
        available_bytes=memory.available_bytes(device),
    )
    attention = None if config.attention == "auto" else config.attention
    engine = Engine(
        jax.device_put(loaded.params, device),
        StepConfig(
            scheduler=scheduler_config(config, platform=device.platform, model=loaded.config),
            model=LlamaModel(
                config=loaded.config, attention=attention, deterministic=config.deterministic
            ),
        ),
        tokenizer,
        config=config,
        kv_dtype=jnp.dtype(config.kv_cache_dtype),
        model_name=model_name or _name(model),
        eos_token_ids=sorted({*tokenizer.eos_token_ids, *loaded.config.eos_token_ids}),
    )
    if warm_up:
        engine.warm_up(_bar if progress else _silent)
    return engine


def scheduler_config(config: EngineConfig, *, platform: str, model: Any = None) -> SchedulerConfig:
    """The scheduler's static sizes from settings in which nothing is left open.

    Args:
      model: its shape, from which the costs of swapping are (`swap_costs`); None without swapping.
    """
    on_cpu = platform == "cpu"
    # In the baselines a request's samples run as requests of their own.
    forks = config.batching == "continuous" and config.kv_cache == "paged"
    beams = min(config.max_beam_width, config.max_num_seqs, config.max_logprobs) if forks else 0
    costs = {} if model is None or not config.num_host_blocks else swap_costs(config, model, on_cpu)
    return SchedulerConfig(
        num_rows=config.table_rows,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=config.max_logprobs,
        max_stop_token_ids=config.max_stop_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        batching=config.batching,
        kv_cache=config.kv_cache,
        scheduling_policy=_policy("scheduling_policy", config.scheduling_policy),
        preemption_policy=_policy(
            "preemption_policy", config.preemption_policy or default_preemption_policy(config)
        ),
        max_passed_over=config.max_passed_over,
        time_slice_tokens=config.time_slice_tokens,
        enable_forks=forks,
        max_beam_width=beams,
        max_preemptions=max(16, config.max_beam_width),
        num_host_blocks=config.num_host_blocks or 0,
        preemption_mode=config.preemption_mode,
        **costs,
        # A GPU prefers one straight line of kernels to branches, and scatters are cheap there.
        use_cond=on_cpu,
        max_retirements=min(16, config.table_rows) if on_cpu else config.table_rows,
        evict_batch=min(max(config.num_blocks // 64, 1), MAX_EVICT_BATCH),
        # Rounded first: 0.29 of 100 blocks are 29, not the 28 of binary fractions.
        watermark_blocks=int(round(config.num_blocks * config.watermark, 6)),
    )


def swap_costs(config: EngineConfig, model: Any, on_cpu: bool) -> dict[str, float]:
    """Costs of `preemption_mode` auto, all in seconds.

    A token's attention costs as much as all else of it at a context of about six times the model's
    width: 24 w^2 operations a layer for the weights against 4 w for each token of the context.
    """
    gib_per_s = config.swap_gib_per_s or (8.0 if on_cpu else 20.0)
    token_s = 1 / (config.recompute_tokens_per_s or (1000.0 if on_cpu else 20000.0))
    block_bytes = memory.bytes_per_block(
        model, block_size=config.block_size, dtype=config.kv_cache_dtype
    )
    width = model.num_attention_heads * model.head_dim
    return {
        "swap_cost_per_block": block_bytes / (gib_per_s * memory.GIB),
        "recompute_cost_per_token": token_s,
        "recompute_cost_per_context": token_s / (6 * width),
    }


def default_preemption_policy(config: EngineConfig) -> str:
    """The victims' policy that goes with the scheduling policy, as in vLLM."""
    return "lowest_priority" if config.scheduling_policy == "priority" else "newest"


def _policy(name: str, value: str) -> str | Callable:
    """A policy's own name, or the function that module:function means."""
    if ":" not in value:
        return value
    module, function = value.split(":")
    try:
        policy = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} is {value!r}, which cannot be loaded: {error}") from error
    if not callable(policy):
        raise ValueError(f"{name} is {value!r}, which is no function")
    return policy


def _name(model: str | Path) -> str:
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name


def _silent(items: Iterable[Any], _count: int) -> Iterable[Any]:
    return items


def _bar(items: Iterable[Any], count: int) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(items, total=count, desc="compiling", unit="step size")


def compilation_cache_dir(config: EngineConfig) -> Path | None:
    """The folder that `config.compilation_cache_dir` means; None: leave JAX as it is."""
    from pagedjax.models.presets import cache_root

    given = config.compilation_cache_dir
    if given == "off" or (given is None and jax.config.jax_compilation_cache_dir):
        return None
    return cache_root() / "compiled" if given is None else Path(given).expanduser()


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in a folder, so that the next start need not compile them.

    This is a setting of the process (`jax_compilation_cache_dir`), for every engine in it.
    """
    from jax.experimental.compilation_cache import compilation_cache

    folder.mkdir(parents=True, exist_ok=True)
    if jax.config.jax_compilation_cache_dir != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        # JAX decides at the first compilation whether there is a cache, and where, for good.
        compilation_cache.reset_cache()
