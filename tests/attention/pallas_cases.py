"""Steps for the GPU kernels, run in the interpreter with the race detector on."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LAYER, Shape, Step, make_step

from pallas_kernels import make_metadata, paged_attention
from pallas_kernels.interpret import interpret_mode
from pallas_kernels.paged_attention.mosaic_gpu.config import BLOCK_SIZES, choose_config

SCALE = 0.25

needs_mosaic_gpu = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the Mosaic GPU of jax 0.10 has no mma.sync, and a weak interpreter",
)
needs_early_exit = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="the interpreter of jax 0.11 wants every warpgroup to wait for every barrier",
)


GROUPS = {1: (2, 2), 2: (4, 2), 3: (3, 1), 4: (4, 1), 5: (10, 2), 8: (8, 1), 16: (16, 1)}
"""Query heads and KV heads, by how many of the former share one of the latter."""


def option_grid(head_dims: Sequence[int]) -> list[tuple]:
    """Every head dimension with every block size; groups, types and options in turn: tuples
    (head_dim, block_size, group, dtype, options)."""
    return [
        (head_dim, block_size, group, dtype, options)
        for (head_dim, block_size), group, dtype, options in zip(
            itertools.product(head_dims, BLOCK_SIZES),
            itertools.cycle(GROUPS),
            itertools.cycle(["float32", "bfloat16", "float16"]),
            itertools.cycle(
                [
                    (),
                    (("sliding_window", 1),),
                    (("soft_cap", 3.0),),
                    (("sliding_window", 70), ("soft_cap", 1.5)),
                ]
            ),
        )
    ]


def grid_shape(base: Shape, case: tuple) -> Shape:
    """The shape of a case of ``option_grid``: contexts of 300 tokens in five rows."""
    head_dim, block_size, group, dtype, _ = case
    num_heads, num_kv_heads = GROUPS[group]
    max_blocks = -(-300 // block_size)
    return dataclasses.replace(
        base,
        head_dim=head_dim,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        max_blocks=max_blocks,
        num_blocks=5 * max_blocks + 2,
    )


def grid_lengths(shape: Shape, filler: int) -> list[list[int]]:
    """Context lengths at the edges, five at a time, the last ones filled up with ``filler``."""
    lens = edge_lengths(shape.block_size, 64, 128, shape.max_blocks * shape.block_size)
    lens += [filler] * (-len(lens) % 5)
    return [lens[i : i + 5] for i in range(0, len(lens), 5)]


def llama_config(target, **changes):
    """The tiles that are chosen for 64 rows of a model like Llama-3-8B, or for something else."""
    shape = dict(
        num_rows=64,
        max_context=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=64,
        dtype=jnp.bfloat16,
        decode_queries=1,
    )
    return choose_config(target=target, **(shape | changes))


def wgmma_table(kernel: str, *_, **__) -> dict:
    """A tuning table that has the prefill for Hopper, with fewer stages than a prompt has chunks;
    in place of ``tuning.lookup``."""
    return dict(instruction="wgmma", stages=2) if "prefill" in kernel else {}


def edge_lengths(block_size: int, chunk: int, split: int, most: int) -> list[int]:
    """Context lengths on both sides of the edges of blocks, chunks and splits; 1, and the most."""
    found = {1, 2, most}
    for edge in (block_size, chunk, split):
        found |= {edge - 1, edge, edge + 1}
    return sorted(x for x in found if 1 <= x <= most)


def poisoned(shape: Shape, query_lens: list[int], seq_lens: list[int], **kw) -> Step:
    """A step with NaN wherever no query may look, and out-of-range block ids in unused entries."""
    kw = dict(garbage=True, spare_ends=True) | kw
    step = make_step(shape, query_lens, seq_lens, **kw)
    # Queries of the pool's type, as a model has them, in float32 so that the output is not rounded.
    q = step.arrays[0].astype(shape.dtype).astype(np.float32)
    return dataclasses.replace(step, arrays=(q, *step.arrays[1:]))


@functools.cache
def compiled(shape: Shape, implementation: str, options: tuple = (), decode_queries: int = 1):
    """``paged_attention`` of a step's arrays, with a work list where the kernels are meant."""

    def call(q, k_pool, v_pool, tables, starts, lens):
        metadata = make_metadata(
            starts,
            lens,
            tables,
            num_tokens=q.shape[0],
            block_size=shape.block_size,
            sliding_window=dict(options).get("sliding_window"),
            num_heads=q.shape[1],
            k_pool=k_pool,
            decode_queries=decode_queries,
            implementation=implementation,
        )
        return paged_attention(
            q,
            k_pool,
            v_pool,
            tables,
            starts,
            lens,
            layer=LAYER,
            scale=SCALE,
            implementation=implementation,
            metadata=metadata,
            **dict(options),
        )

    return jax.jit(call)


def run(shape: Shape, step: Step, options: tuple = (), *, decode_queries: int = 1) -> np.ndarray:
    """The kernels' output, float32, computed under the race detector."""
    with interpret_mode(detect_races=True):
        got = compiled(shape, "pallas", options, decode_queries)(*step.arrays)
        return np.asarray(got, np.float32)


def expect(shape: Shape, step: Step, options: tuple = ()) -> np.ndarray:
    """The reference's output from the same pool."""
    return np.asarray(compiled(shape, "reference", options)(*step.arrays), np.float32)


def check(shape: Shape, step: Step, options: tuple = (), *, decode_queries: int = 1) -> None:
    """The kernels give what the reference gives, to float32 or to 16-bit rounding."""
    got = run(shape, step, options, decode_queries=decode_queries)
    expected = expect(shape, step, options)
    assert np.isfinite(got).all()
    used = sum(step.query_lens)
    np.testing.assert_array_equal(got[used:], 0.0)
    if shape.dtype == "float32":
        np.testing.assert_allclose(got, expected, atol=3e-6)
    elif used:
        error = np.linalg.norm((got - expected)[:used], axis=-1)
        error = error / np.linalg.norm(expected[:used], axis=-1)
        assert error.max() < 1e-2
