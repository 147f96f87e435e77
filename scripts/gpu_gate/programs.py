"""What is compiled: every kernel's own calls, and whole steps of the engine."""

import dataclasses
import functools
import importlib
from typing import Any

KERNEL_FOLDERS = (
    "pallas_kernels.kv_write.specs",
    "pallas_kernels.block_copy.specs",
    "pallas_kernels.paged_attention.mosaic_gpu.specs",
)

MAX_NUM_SEQS = 64
PREFILL_TOKENS = 2048
NUM_BLOCKS = 24576
"""Of the pool: with Llama-3-8B 51.5 GB, which with the weights fills most of an 80 GB card. The
same for all chips and models, so that they share the scheduler's compiled kernels.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One whole step of the engine.

    Attributes:
      name: ``step.<model>.<kind>``.
      function: of (params, state); args: their abstract values.
      pool_bytes: of both pools, which must come back aliased.
      pool_shape: of one of them.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    pool_bytes: int
    pool_shape: tuple[int, ...]


MODELS = {"llama_3_8b": "llama-3.1-8b", "smollm2_135m": "smollm2-135m"}
"""Name in the tables, by preset."""


def kernel_specs(chip_name: str) -> list[Any]:
    """The ``KernelSpec`` of every kernel for one chip."""
    specs = []
    for folder in KERNEL_FOLDERS:
        specs += importlib.import_module(folder).specs(chip_name)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"kernel specs must have different names: {sorted(names)}")
    return specs


def step_kernels(attention: str | None, chip_name: str) -> tuple[str, ...]:
    """Kernels that must be in a step with this attention. Both models' heads are of a size that the
    prefill for Hopper takes.
    """
    from pallas_kernels import tuning
    from pallas_kernels.block_copy.mosaic_gpu import COPY_NAME
    from pallas_kernels.kv_write.mosaic_gpu import NAME
    from pallas_kernels.paged_attention.mosaic_gpu import combine, decode, prefill, prefill_wgmma

    fill = prefill_wgmma if chip_name in tuning.HOPPER else prefill
    attend = (decode.NAME, combine.NAME, fill.NAME)
    return (NAME, COPY_NAME, *(attend if attention == "pallas" else ()))


def step_specs(*, attention: str | None, only: str = "") -> list[StepSpec]:
    """Decode and prefill steps of both models.

    Args:
      only: part of the names of those wanted.
    """
    kinds = {"decode": MAX_NUM_SEQS, "prefill": PREFILL_TOKENS}
    return [
        _step(model, kind, num_tokens=num_tokens, attention=attention)
        for model in MODELS
        for kind, num_tokens in kinds.items()
        if only in f"step.{model}.{kind}"
    ]


def _step(model_name: str, kind: str, *, num_tokens: int, attention: str | None) -> StepSpec:
    import jax
    import jax.numpy as jnp

    from pagedjax.core.execute import StepConfig
    from pagedjax.core.step import init_state, step
    from pagedjax.models.llama import LlamaModel
    from pagedjax.models.params import init_params
    from pagedjax.models.presets import preset_config
    from pallas_kernels.pool import block_bytes

    config = preset_config(MODELS[model_name])
    params = jax.eval_shape(
        functools.partial(init_params, config, dtype=jnp.bfloat16, stacked=True),
        jax.random.key(0),
    )
    one_block = block_bytes(
        config.num_hidden_layers, 16, config.num_key_value_heads, config.head_dim, jnp.bfloat16
    )
    step_config = StepConfig(
        scheduler=_scheduler_config(config.max_position_embeddings),
        model=LlamaModel(config=config, attention=attention),
    )
    state = jax.eval_shape(functools.partial(init_state, step_config, kv_dtype=jnp.bfloat16))
    # Traced on a CPU, init_state chooses the CPU's storage type.
    pool = jax.ShapeDtypeStruct(state.k_pool.shape, jnp.bfloat16)
    return StepSpec(
        name=f"step.{model_name}.{kind}",
        function=functools.partial(step, config=step_config, num_tokens=num_tokens),
        args=(params, dataclasses.replace(state, k_pool=pool, v_pool=pool)),
        pool_bytes=NUM_BLOCKS * one_block,
        pool_shape=pool.shape,
    )


def _scheduler_config(max_position_embeddings: int) -> Any:
    from pagedjax.config import EngineConfig
    from pagedjax.engine.build import scheduler_config

    return scheduler_config(
        EngineConfig(
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=PREFILL_TOKENS,
            max_model_len=min(8192, max_position_embeddings),
        ),
        platform="gpu",
    )
