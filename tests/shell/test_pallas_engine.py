"""The engine over the GPU kernels, in Pallas's interpreter, beside the engine over XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pagedjax.core.execute import StepConfig
from pagedjax.engine import Engine
from pagedjax.engine.build import scheduler_config
from pagedjax.models.llama import LlamaModel
from pagedjax.models.params import init_params
from pagedjax.sampling_params import SamplingParams
from pallas_kernels.interpret import interpret_mode
from tests.shell.tiny import MODEL, SETTINGS, ByteTokenizer, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11), reason="the Mosaic GPU of jax 0.10 has no mma.sync"
    ),
]

# The smallest head that the kernels take; three query heads to a KV head, as SmolLM2 has.
CONFIG = replace(
    MODEL.config, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=64
)


def engine(attention):
    from pagedjax.config import EngineConfig

    config = EngineConfig(**(SETTINGS | {"block_size": 8, "num_blocks": 9}))
    weights = init_params(CONFIG, jax.random.key(1), dtype=jnp.float32, stacked=False)
    return Engine(
        jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, weights),
        StepConfig(
            scheduler=scheduler_config(config, platform="cpu"),
            model=LlamaModel(config=CONFIG, attention=attention),
        ),
        ByteTokenizer(),
        config=config,
        kv_dtype=jnp.float32,
    )


def test_a_mixed_workload_gets_the_same_tokens():
    """Chunks of prompts beside decoding rows, a shared beginning, memory that runs out."""
    shared = "a beginning that all share, "
    requests = [
        (
            str(i),
            shared[: 9 * i] + "end" * (1 + i % 2),
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=5 + i),
        )
        for i in range(5)
    ]
    with_xla = engine("xla")
    expected = run(with_xla, requests)
    with interpret_mode():
        with_pallas = engine("pallas")
        got = run(with_pallas, requests)
    assert {r: o.outputs[0].token_ids for r, o in got.items()} == {
        r: o.outputs[0].token_ids for r, o in expected.items()
    }
    assert with_pallas.stats().steps == with_xla.stats().steps
    assert with_pallas.stats().cached_tokens == with_xla.stats().cached_tokens > 0
    assert with_pallas.stats().preemptions == with_xla.stats().preemptions
