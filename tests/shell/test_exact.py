"""The bit-exact mode: the same tokens and logprobs to the last bit, however a request is served."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.core.execute import StepConfig
from pagedjax.engine import Engine
from pagedjax.engine.build import scheduler_config
from pagedjax.models.llama import LlamaModel
from pagedjax.models.params import init_params
from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import MODEL, SETTINGS, ByteTokenizer, drain

# Bits must be those of the code that people run.
pytestmark = pytest.mark.optimized

# Sizes at which the library's kernels have full and partial tiles, and roundings that show.
CONFIG = replace(
    MODEL.config,
    hidden_size=120,
    intermediate_size=200,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
)
BASE = SETTINGS | {
    "num_blocks": 200,
    "max_num_seqs": 8,
    "num_rows": 16,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
}
SHARED = "what every one of them begins with, at some length, "
REQUESTS = [
    (SHARED[: 11 * i % 53] + chr(97 + i) * (1 + 3 * i % 7), 12 + 5 * i % 17, 0.8 * (i % 2))
    for i in range(10)
]


def make_engine(**changes):
    config = EngineConfig(**(BASE | {"deterministic": True} | changes))
    params = init_params(CONFIG, jax.random.key(3), dtype=jnp.float32, stacked=False)
    return Engine(
        jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params),
        StepConfig(
            scheduler=scheduler_config(config, platform="cpu"),
            model=LlamaModel(config=CONFIG, deterministic=config.deterministic),
        ),
        ByteTokenizer(),
        config=config,
        kv_dtype=jnp.float32,
    )


def serve(engine, order, *, alone=False):
    """-> number of the request -> (token ids, logprobs of the five best, as bits)."""
    got = {}

    def collect():
        for delta in drain(engine):
            output = delta.outputs[0]
            ids, bits = got.setdefault(int(delta.request_id), ([], []))
            ids += output.token_ids
            for entries in output.logprobs:
                values = [(i, np.float32(e.logprob).view(np.uint32)) for i, e in entries.items()]
                bits.append(sorted(values))

    for number in order:
        prompt, count, temperature = REQUESTS[number]
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=count, ignore_eos=True, logprobs=5
        )
        engine.add_request(str(number), prompt, params)
        if alone:
            collect()
    collect()
    return got


EVERYONE = range(len(REQUESTS))
SHUFFLED = np.random.default_rng(0).permutation(len(REQUESTS))
# Seven tokens a step, so that a prompt's chunks depend on who else is there; a pool for two rows.
SMALL = {
    "max_num_batched_tokens": 7,
    "token_buckets": (7,),
    "max_num_seqs": 5,
    "num_blocks": 21,
    "watermark": 0.0,
}


@pytest.fixture(scope="module")
def engine():
    return make_engine(**SMALL)


@pytest.fixture(scope="module")
def expected(engine):
    outputs = serve(engine, EVERYONE, alone=True)
    assert engine.stats().preemptions == 0
    return outputs


def test_among_others_in_other_chunks_preempted_and_from_the_cache(engine, expected):
    before = engine.stats()
    assert serve(engine, SHUFFLED) == expected
    assert serve(engine, SHUFFLED[::-1]) == expected
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.cached_tokens > before.cached_tokens


@pytest.mark.slow
def test_without_the_prefix_cache(expected):
    engine = make_engine(**SMALL, enable_prefix_caching=False)
    assert serve(engine, EVERYONE) == expected
    assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_in_larger_steps(expected):
    """Other sizes of everything, and room for all."""
    engine = make_engine()
    for order in (EVERYONE, SHUFFLED):
        assert serve(engine, order) == expected
    assert engine.stats().preemptions == 0
    assert engine.stats().cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "num_host_blocks": 40}])
def test_in_whole_prompts_and_preempted(expected, settings):
    engine = make_engine(num_blocks=21, watermark=0.0, enable_prefix_caching=False, **settings)
    assert serve(engine, EVERYONE) == expected
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.swaps_out == stats.preemptions) == bool(settings)


@pytest.mark.slow
def test_without_the_mode_bits_differ(expected):
    """Otherwise the tests above would say nothing."""
    assert serve(make_engine(deterministic=False), EVERYONE) != expected
