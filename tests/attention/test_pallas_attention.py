"""The GPU attention kernels in the interpreter, with race detection: values and ordering.

Shapes are equal between the steps of a case, so that they share one compilation; lengths vary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, bits
from pallas_cases import (
    GROUPS,
    SCALE,
    check,
    grid_lengths,
    grid_shape,
    needs_mosaic_gpu,
    option_grid,
    poisoned,
    run,
)

from pallas_kernels import make_metadata, paged_attention
from pallas_kernels.interpret import interpret_mode
from pallas_kernels.paged_attention.mosaic_gpu import config
from pallas_kernels.paged_attention.mosaic_gpu.config import HEAD_DIMS

pytestmark = [needs_mosaic_gpu, pytest.mark.timeout(300)]

BASE = Shape(
    block_size=16,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    num_rows=5,
    max_blocks=19,
    num_blocks=64,
    num_tokens=64,
)

# Query and context lengths. 0 and 1, both sides of the edges of a block (16), of a chunk (64) and
# of a split (128), prompts and chunks of longer ones; 304 is all that a table holds.
STEPS = {
    "decode, edges of blocks": ([1] * 5, [1, 2, 15, 16, 17]),
    "decode, edges of chunks": ([1] * 5, [63, 64, 65, 33, 3]),
    "decode, edges of splits": ([1] * 5, [127, 128, 129, 255, 304]),
    "decode among empty rows": ([0, 1, 0, 1, 0], [0, 257, 0, 1, 0]),
    "prompt": ([64], [64]),
    "chunk of a longer prompt": ([40, 0, 21], [304, 0, 22]),
    "mixed": ([1, 22, 1, 3, 36], [130, 22, 1, 90, 192]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", STEPS)
def test_float32(name):
    check(BASE, poisoned(BASE, *STEPS[name]))


def test_stages_filled_again(monkeypatch):
    """Splits of more chunks than stages."""

    def lookup(kernel, *_, **__):
        return {"stages": 2, "split": 320} if "decode" in kernel else {}

    monkeypatch.setattr(config.tuning, "lookup", lookup)
    shape = dataclasses.replace(BASE, num_tokens=63)
    check(shape, poisoned(shape, *STEPS["decode, edges of splits"]))


OPTIONS = {
    "bfloat16, window, cap": (
        dataclasses.replace(BASE, dtype="bfloat16", block_size=8, max_blocks=38, num_blocks=140),
        (("sliding_window", 33), ("soft_cap", 2.0)),
        1,
    ),
    "float16, head_dim 128, one KV head, 8 queries": (
        dataclasses.replace(
            BASE,
            dtype="float16",
            head_dim=128,
            num_heads=4,
            num_kv_heads=1,
            block_size=32,
            max_blocks=10,
            num_blocks=34,
        ),
        (),
        8,
    ),
    "head_dim 80, blocks longer than a chunk": (
        dataclasses.replace(
            BASE, head_dim=80, num_heads=2, block_size=128, max_blocks=3, num_blocks=16
        ),
        (("sliding_window", 100),),
        1,
    ),
}


# The kernel for Hopper is run with blocks longer than a chunk by default.
SLOW = {"head_dim 80, blocks longer than a chunk"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in OPTIONS]
)
def test_options(name):
    shape, options, decode_queries = OPTIONS[name]
    for step in ("mixed", "decode, edges of splits"):
        step = poisoned(shape, *STEPS[step])
        check(shape, step, options, decode_queries=decode_queries)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_a_chunk_of_a_longer_prompt(name):
    shape, options, decode_queries = OPTIONS[name]
    step = poisoned(shape, *STEPS["chunk of a longer prompt"])
    check(shape, step, options, decode_queries=decode_queries)


def test_same_again_and_whatever_lies_in_unseen_slots():
    name = "mixed"
    outputs = [
        bits(run(BASE, poisoned(BASE, *STEPS[name], **kw)))
        for kw in (
            {"poison": np.nan},
            {"poison": np.nan},
            {"poison": 0.0, "garbage": False},
            {"poison": np.inf, "seed": 5},
        )
    ]
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


CROWD = dataclasses.replace(
    BASE,
    num_rows=64,
    num_heads=3,
    num_kv_heads=1,
    dtype="bfloat16",
    max_blocks=10,
    num_blocks=400,
    num_tokens=90,
)


@pytest.mark.slow
def test_row_is_the_same_alone_and_in_a_crowd():
    """A row's output does not depend on the 63 beside it nor on its place, to the last bit."""
    rng = np.random.default_rng(0)
    identities = list(range(64))
    lens = rng.integers(1, 160, 64).tolist()
    counts = [1] * 64
    for long in (7, 50):
        counts[long], lens[long] = 14, 100
    together = bits(run(CROWD, poisoned(CROWD, counts, lens, rows=identities)))

    turned = identities[23:] + identities[:23]
    step = poisoned(
        CROWD, [counts[i] for i in turned], [lens[i] for i in turned], seed=1, rows=turned
    )
    moved = bits(run(CROWD, step))
    starts = np.cumsum([0, *counts])
    token = 0
    for i in turned:
        expected = together[starts[i] : starts[i + 1]]
        np.testing.assert_array_equal(moved[token : token + counts[i]], expected)
        token += counts[i]

    for i, place in ((5, 0), (7, 63), (50, 31)):
        step = poisoned(
            CROWD,
            [0] * place + [counts[i]],
            [0] * place + [lens[i]],
            seed=2,
            rows=[99] * place + [i],
        )
        alone = bits(run(CROWD, step))[: counts[i]]
        np.testing.assert_array_equal(alone, together[starts[i] : starts[i + 1]])


def test_in_a_loop_over_layers():
    """As the engine calls it: the layer is traced and the pools are the loop's carry."""
    step = poisoned(BASE, *STEPS["mixed"])

    @jax.jit
    def layers(q, k_pool, v_pool, tables, starts, lens):
        metadata = make_metadata(
            starts,
            lens,
            tables,
            num_tokens=q.shape[0],
            block_size=BASE.block_size,
            num_heads=q.shape[1],
            k_pool=k_pool,
            implementation="pallas",
        )

        def body(layer, carry):
            k_pool, v_pool, out = carry
            got = paged_attention(
                q,
                k_pool,
                v_pool,
                tables,
                starts,
                lens,
                layer=layer,
                scale=SCALE,
                implementation="pallas",
                metadata=metadata,
            )
            return k_pool, v_pool, out.at[layer].set(got)

        out = jnp.zeros((2, *q.shape))
        return jax.lax.fori_loop(0, 2, body, (k_pool, v_pool, out))[2]

    with interpret_mode(detect_races=True):
        out = np.asarray(layers(*step.arrays))
    np.testing.assert_array_equal(bits(out[1]), bits(run(BASE, step)))
    assert np.isnan(out[0, :1]).all(), "layer 0 holds nothing but NaN"


@pytest.mark.slow
@pytest.mark.parametrize("case", option_grid(HEAD_DIMS), ids=lambda c: "-".join(map(str, c[:4])))
def test_grid(case):
    shape, options = grid_shape(BASE, case), case[-1]
    steps = [([1] * 5, lens) for lens in grid_lengths(shape, 1)]
    for counts, seq_lens in [*steps, *(STEPS[x] for x in STEPS if "decode" not in x)]:
        check(shape, poisoned(shape, counts, seq_lens), options)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_few_queries_are_split_too(group):
    """Rows of up to 8 queries, as speculative decoding has them."""
    num_heads, num_kv_heads = GROUPS[group]
    shape = dataclasses.replace(BASE, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for options in ((), (("sliding_window", 6),)):
        for counts, lens in (
            ([8, 7, 1, 2, 3], [304, 7, 1, 129, 65]),
            ([4, 5, 6, 8, 9], [130, 128, 6, 8, 200]),
        ):
            check(shape, poisoned(shape, counts, lens), options, decode_queries=8)
