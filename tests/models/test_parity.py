"""Forward passes against a Llama in plain numpy: paged and dense, unrolled and scanned."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.forward import forward_dense
from pagedjax.models.llama import LlamaModel
from pagedjax.models.modules import stack_layers, unstack_layers
from pagedjax.models.weights import load_model
from pallas_kernels import init_pool
from tests.models.support import (
    LINEAR,
    LLAMA3,
    make_batch,
    numpy_llama,
    random_tensors,
    tiny_hf_config,
    write_hf,
)

BLOCK_SIZE = 4
NUM_TOKENS = 16
# Blocks out of order and not next to each other; 0 and the last one are nobody's.
BLOCK_TABLES = [[9, 2, 14, 5, 1], [4, 12, 6, 2**31 - 1, 2**31 - 1], [13, 3, 8, 11, 2**31 - 1]]
ROWS = [
    np.random.default_rng(row).integers(0, 40, length).tolist()
    for row, length in enumerate((17, 10, 13))
]
# Tokens of each row that a step computes: prefill, chunks, decode, a row that pauses, padding.
STEPS = [(7, 5, 2), (9, 1, 0), (1, 4, 10), (0, 0, 1)]

CASES = {
    "mha": tiny_hf_config(num_key_value_heads=4),
    "gqa-linear-tied": tiny_hf_config(rope_scaling=LINEAR, tie_word_embeddings=True),
    "mqa-llama3": tiny_hf_config(num_key_value_heads=1, rope_scaling=LLAMA3),
    "gqa-llama3-tied": tiny_hf_config(rope_scaling=LLAMA3, tie_word_embeddings=True),
    "wide-heads-window": tiny_hf_config(
        model_type="mistral", architectures=["MistralForCausalLM"], head_dim=16, sliding_window=6
    ),
}

# The layouts that each case runs in: every pair once would only compile the same again.
PAGED = {name: ["unrolled"] for name in CASES} | {
    "mqa-llama3": ["scanned"],
    "wide-heads-window": ["scanned"],
}
DENSE = {name: ("scanned", "unrolled")[PAGED[name] == ["scanned"]] for name in CASES}


@functools.partial(jax.jit, static_argnums=0)
def paged_step(model, params, k_pool, v_pool, batch):
    k_pool, v_pool, hidden = model.forward(params, k_pool, v_pool, SimpleNamespace(**batch))
    return k_pool, v_pool, model.compute_logits(params, hidden)


def run_paged(model, params, dtype=jnp.float32):
    """Logits of every token of ROWS, computed in STEPS over a pool that starts full of NaN."""
    config = model.config
    pools = init_pool(
        config.num_hidden_layers, 16, BLOCK_SIZE, config.num_key_value_heads, config.head_dim, dtype
    )
    nan = 0x7FC0 if pools[0].dtype == jnp.uint16 else jnp.nan
    pools = tuple(jnp.full_like(pool, nan) for pool in pools)
    done = [0] * len(ROWS)
    logits = [[] for _ in ROWS]
    for counts in STEPS:
        done = [d + c for d, c in zip(done, counts, strict=True)]
        chunks = [(ROWS[r][: done[r]], counts[r]) for r in range(len(ROWS))]
        batch = make_batch(chunks, BLOCK_TABLES, BLOCK_SIZE, NUM_TOKENS)
        *pools, out = paged_step(model, params, *pools, vars(batch))
        assert np.isfinite(np.asarray(out)).all()
        for row, start in enumerate(batch.query_start_loc[:-1]):
            logits[row].extend(np.asarray(out[start : start + counts[row]]))
    assert done == [len(row) for row in ROWS]
    return logits


ALIKE = {"gqa-llama3-tied"}  # what it has, others have


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in ALIKE)) for x in CASES]
)
def test_paged_and_dense_equal_numpy(name, tmp_path):
    config, tensors = CASES[name], random_tensors(CASES[name])
    loaded = load_model(write_hf(tmp_path, config, tensors), dtype="float32", stacked=False)
    stacked = loaded.params | {"layers": stack_layers(loaded.params["layers"])}
    expected = [numpy_llama(config, tensors, row) for row in ROWS]
    assert max(np.abs(rows).max() for rows in expected) > 2  # 1e-5 then means something

    layouts = {"unrolled": loaded.params, "scanned": stacked}

    model = LlamaModel(config=loaded.config)
    for layout in PAGED[name]:
        for row, logits in enumerate(run_paged(model, layouts[layout])):
            np.testing.assert_allclose(np.stack(logits), expected[row], atol=1e-5, rtol=1e-5)

    length = min(len(row) for row in ROWS)
    tokens = jnp.asarray([row[:length] for row in ROWS])
    dense = jax.jit(forward_dense, static_argnums=2)(layouts[DENSE[name]], tokens, loaded.config)
    for row in range(len(ROWS)):
        np.testing.assert_allclose(dense[row], expected[row][:length], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny checkpoint, loaded in float32 and unrolled."""
    config = tiny_hf_config()
    path = write_hf(tmp_path_factory.mktemp("tiny"), config, random_tensors(config))
    return load_model(path, dtype="float32", stacked=False)


def prefilled(tiny, tokens, dtype):
    """Pools that hold the context of all of ``tokens`` but the last, and the next step's chunk."""
    model = LlamaModel(config=tiny.config, attention=None if dtype == jnp.float32 else "reference")
    pools = init_pool(2, 16, BLOCK_SIZE, 2, 8, dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny.params)
    prefix = make_batch([(tokens[:-1], len(tokens) - 1)], BLOCK_TABLES[:1], BLOCK_SIZE, NUM_TOKENS)
    *pools, _ = paged_step(model, params, *pools, vars(prefix))
    return model, params, pools, (tokens, 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_token_alone_equals_the_same_token_with_padding(tiny, dtype):
    model, params, pools, chunk = prefilled(tiny, ROWS[0][:9], dtype)
    results = []
    for num_tokens in (1, 2):
        batch = make_batch([chunk], BLOCK_TABLES[:1], BLOCK_SIZE, num_tokens)
        k_pool, v_pool, logits = paged_step(model, params, *pools, vars(batch))
        assert logits.shape == (num_tokens, 40)
        results.append((k_pool, v_pool, logits[:1]))
    for alone, padded in zip(*results, strict=True):
        np.testing.assert_allclose(
            np.asarray(alone, np.float32), np.asarray(padded, np.float32), atol=2e-6, rtol=2e-6
        )


@pytest.mark.parametrize(
    ("layout", "dtype", "rows"),
    [
        pytest.param("unrolled", jnp.float32, 3, marks=pytest.mark.slow),
        ("scanned", jnp.float32, 3),
        ("unrolled", jnp.bfloat16, 1),  # where one row is padded to two
    ],
)
def test_output_indices_pick_the_same_hidden_states(tiny, layout, dtype, rows):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny.params)
    if layout == "scanned":
        params = params | {"layers": stack_layers(params["layers"])}
    model = LlamaModel(config=tiny.config, attention="reference")
    chunks = [(ROWS[row][:5], 5) for row in range(rows)]
    batch = make_batch(chunks, BLOCK_TABLES[:rows], BLOCK_SIZE, NUM_TOKENS)
    last = jnp.asarray(batch.query_start_loc[1:] - 1)
    pools = init_pool(2, 16, BLOCK_SIZE, 2, 8, dtype)

    @jax.jit
    def forward(batch, last):
        return model.forward(params, *pools, SimpleNamespace(**batch), last)

    *pools_all, hidden = forward(vars(batch), None)
    *pools_picked, picked = forward(vars(batch), last)
    assert picked.shape == (rows, 32)
    np.testing.assert_allclose(picked, hidden[last], atol=1e-5, rtol=1e-5)
    for one, two in zip(pools_all, pools_picked, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_bfloat16_rounds_operands_only(tiny):
    """Against numpy on the same rounded weights: off by what rounding activations costs."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params)
    rounded = {
        name: np.asarray(jnp.asarray(tensor).astype(jnp.bfloat16)).astype(np.float32)
        for name, tensor in random_tensors(tiny_hf_config()).items()
    }
    logits = run_paged(LlamaModel(config=tiny.config), params, jnp.bfloat16)
    for row, tokens in enumerate(ROWS):
        expected = numpy_llama(tiny_hf_config(), rounded, tokens)
        error = np.abs(np.stack(logits[row]) - expected)
        assert 1e-4 < error.max() < 0.1  # float32 would be below, lost accumulation above
        assert error.mean() < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_accumulate_in_float32_at_full_precision(tiny, dtype):
    """On a GPU a float32 product would default to TF32, and a bfloat16 one could round sums."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny.params)
    text = str(
        jax.make_jaxpr(forward_dense, static_argnums=2)(
            params, jnp.asarray([[1, 2, 3]]), tiny.config
        )
    )
    dots = text.count("dot_general[")
    assert dots == 2 * 6 + 1  # qkv, scores, values, o, gate and up, down; head
    assert text.count("preferred_element_type=float32") == dots
    if dtype == "float32":
        assert text.count("precision=HIGHEST") + text.count("(Precision.HIGHEST") >= dots


def test_dense_gradients_agree_between_layouts_and_reach_every_leaf(tiny):
    tokens = jnp.asarray([ROWS[0][:6], ROWS[1][:6]])

    @jax.jit
    def gradients(params):
        def loss(params):
            logits = jax.nn.log_softmax(forward_dense(params, tokens[:, :-1], tiny.config))
            return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

        return jax.grad(loss)(params)

    unrolled = gradients(tiny.params)
    scanned = gradients(tiny.params | {"layers": stack_layers(tiny.params["layers"])})
    scanned = scanned | {"layers": unstack_layers(scanned["layers"])}
    for one, two in zip(jax.tree.leaves(unrolled), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6, rtol=1e-4)
        assert np.abs(one).max() > 0


def test_one_token_does_not_copy_the_pool(tiny):
    """XLA:CPU makes a scatter of one row an update that reads the old value; still in place."""
    model = LlamaModel(config=tiny.config)
    pools = init_pool(2, 4096, BLOCK_SIZE, 2, 8, jnp.float32)
    batch = make_batch([(ROWS[0][:1], 1)], BLOCK_TABLES[:1], BLOCK_SIZE, 1)
    step = jax.jit(paged_step, static_argnums=0, donate_argnums=(2, 3))
    compiled = step.lower(model, tiny.params, *pools, vars(batch)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[0].nbytes // 8
