"""The prefill for Hopper in the interpreter, with race detection: values and ordering.

Products are modelled there (``tensor_core``); copies, barriers and warpgroups are the
interpreter's own.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import bits
from pallas_cases import (
    check,
    compiled,
    grid_lengths,
    grid_shape,
    llama_config,
    needs_early_exit,
    option_grid,
    poisoned,
    run,
    wgmma_table,
)
from test_pallas_attention import BASE, STEPS

from pallas_kernels.paged_attention.mosaic_gpu import config
from pallas_kernels.paged_attention.mosaic_gpu.target import Target

# Values are compared with the reference to 3e-6: code that is optimised rounds less often.
pytestmark = [needs_early_exit, pytest.mark.timeout(300), pytest.mark.optimized]

HEAD_DIMS = (64, 80, 96, 128)


@pytest.fixture(autouse=True, scope="module")
def wgmma():
    """The interpreter takes the kernel for Hopper, with fewer stages than a prompt has chunks."""
    # What other tests compiled has the other kernel in it.
    compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.tuning, "lookup", wgmma_table)
        yield
    compiled.cache_clear()


# Chunks are of 64 tokens, tiles of 42 queries (3 heads each). Prompts of one and two tiles; chunks
# of longer prompts, so that stages are filled again, across tiles too; contexts that end beside
# the edges of blocks and chunks; 304 is all that a table holds.
PROMPTS = {
    "prompt": ([64], [64]),
    "prompts": ([9, 0, 16, 17, 22], [9, 0, 16, 17, 22]),
    "chunk of a longer prompt": ([40, 0, 21], [304, 0, 22]),
    "mixed": ([1, 22, 1, 3, 36], [130, 22, 1, 90, 192]),
    "edges": ([15, 2, 43, 2, 2], [63, 64, 65, 128, 129]),
}


@pytest.mark.parametrize("name", ["chunk of a longer prompt", "mixed"])
def test_float32(name):
    check(BASE, poisoned(BASE, *PROMPTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt", "prompts", "edges"])
def test_float32_more(name):
    check(BASE, poisoned(BASE, *PROMPTS[name]))


OPTIONS = {
    "bfloat16, window, cap, short blocks": (
        dataclasses.replace(BASE, dtype="bfloat16", block_size=8, max_blocks=38, num_blocks=140),
        (("sliding_window", 33), ("soft_cap", 2.0)),
    ),
    "head_dim 128, blocks longer than a chunk, 16 heads": (
        dataclasses.replace(
            BASE, head_dim=128, num_heads=16, num_kv_heads=1, block_size=128, max_blocks=3,
            num_blocks=16,
        ),
        (("sliding_window", 100),),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "step", ["chunk of a longer prompt", pytest.param("mixed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, step):
    shape, options = OPTIONS[name]
    check(shape, poisoned(shape, *PROMPTS[step]), options)


def test_same_again_and_whatever_lies_in_unseen_slots():
    outputs = [
        bits(run(BASE, poisoned(BASE, *PROMPTS["mixed"], **kw)))
        for kw in (
            {"poison": np.nan},
            {"poison": np.nan},
            {"poison": 0.0, "garbage": False},
            {"poison": np.inf, "seed": 5},
        )
    ]
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


@pytest.mark.slow
def test_row_is_the_same_alone_and_in_a_crowd():
    """A row's bits do not depend on the rows beside it nor on its place."""
    shape = dataclasses.replace(BASE, num_rows=9, num_tokens=96, dtype="bfloat16", num_blocks=150)
    rng = np.random.default_rng(0)
    identities = list(range(9))
    counts = [1, 20, 2, 1, 14, 3, 1, 43, 8]
    lens = [int(n + rng.integers(0, 150)) for n in counts]
    together = bits(run(shape, poisoned(shape, counts, lens, rows=identities)))
    starts = np.cumsum([0, *counts])
    for order in ([*identities[4:], *identities[:4]], [7], [99, 1], [99, 99, 4]):
        known = [i for i in order if i < 9]
        padding = [0] * (len(order) - len(known))
        step = poisoned(
            shape,
            padding + [counts[i] for i in known],
            padding + [lens[i] for i in known],
            seed=len(order),
            rows=order,
        )
        got, token = bits(run(shape, step)), 0
        for i in known:
            expected = together[starts[i] : starts[i + 1]]
            np.testing.assert_array_equal(got[token : token + counts[i]], expected)
            token += counts[i]


@pytest.mark.slow
@pytest.mark.parametrize("case", option_grid(HEAD_DIMS), ids=lambda c: "-".join(map(str, c[:4])))
def test_grid(case):
    shape, options = grid_shape(BASE, case), case[-1]
    # As many queries as there is room for in a step, two at least where the context has them.
    steps = [
        ([min(n, 2 + 5 * j) for j, n in enumerate(lens)], lens) for lens in grid_lengths(shape, 2)
    ]
    for counts, seq_lens in [*steps, *PROMPTS.values(), STEPS["nothing"]]:
        check(shape, poisoned(shape, counts, seq_lens), options)


def choose(target, **changes):
    return llama_config(target, **({"block_size": 16} | changes)).prefill


HOPPER = Target(wgmma=True)


def test_it_is_chosen_on_hopper_where_it_fits(monkeypatch):
    monkeypatch.setattr(config.tuning, "lookup", lambda *_, **__: {})
    assert [choose(HOPPER, head_dim=d).instruction for d in (*HEAD_DIMS, 256)] == [
        *["wgmma"] * 4,
        "mma_sync",
    ]
    assert choose(HOPPER).rows == 128
    assert choose(HOPPER, num_heads=9, num_kv_heads=3).queries == 42
    for other in (Target(), Target(tma=False), Target(interpret=True)):
        assert choose(other).instruction == "mma_sync"


def test_a_table_can_choose_the_other(monkeypatch):
    assert choose(HOPPER).stages == 2
    for target, head_dim in ((Target(), 128), (HOPPER, 256)):
        with pytest.raises(ValueError, match="'wgmma'"):
            choose(target, head_dim=head_dim)

    def portable(kernel, *_, **__):
        return {"instruction": "mma_sync", "stages": 2} if "prefill" in kernel else {}

    monkeypatch.setattr(config.tuning, "lookup", portable)
    tile = choose(HOPPER)
    assert (tile.instruction, tile.rows, tile.stages) == ("mma_sync", 64, 2)


def test_a_product_that_nobody_waited_for_cannot_be_read():
    from pallas_kernels.paged_attention.mosaic_gpu.tensor_core import run_products

    def body(accs):
        accs[0].add(jnp.ones((64, 8)), jnp.ones((8, 8)))
        return (accs[0].read(in_flight=1),)

    with pytest.raises(RuntimeError, match="under way"):
        run_products(body, [jnp.zeros((64, 8))], (), Target(interpret=True))
