"""The GPU kernel of ``write_kv`` in Pallas's interpreter: bit for bit what the reference does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import OLD_JAX, OLD_JAX_REASON, interpreted, planted

from pallas_kernels import NULL, write_kv
from pallas_kernels.kv_write import mosaic_gpu, reference

pytestmark = pytest.mark.skipif(OLD_JAX, reason=OLD_JAX_REASON)
L, N = 3, 6


def case(*, block_size=8, heads=2, head_dim=64, dtype=jnp.bfloat16, num_tokens=10, seed=0):
    """Pools full of NaN (any write to a wrong place shows), rows, and slots of every kind: the
    first and the last of the pool, just past the end, negative, NULL.
    """
    rng = np.random.default_rng(seed)
    nan = np.full((L, N, block_size, heads, head_dim), np.nan, np.float32)
    pool_type = jnp.bfloat16 if dtype == jnp.uint16 else dtype
    pools = [jnp.asarray(nan).astype(pool_type) for _ in range(2)]
    if dtype == jnp.uint16:
        pools = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in pools]
    rows = jnp.asarray(rng.normal(size=(2, num_tokens, heads, head_dim)), jnp.float32)
    slots = rng.permutation(np.arange(1, N * block_size - 1))[:num_tokens].astype(np.int32)
    for t, slot in enumerate((NULL, 0, N * block_size, N * block_size - 1, -1, NULL)):
        if 2 * t < num_tokens:
            slots[2 * t] = slot
    return *pools, rows[0], rows[1], jnp.asarray(slots)


def run(write, arguments, layer=1):
    with interpreted():
        return jax.block_until_ready(jax.jit(write)(*arguments, layer=jnp.int32(layer)))


def assert_as_reference(got, arguments, layer=1):
    expected = arguments[:2]
    if 0 <= layer < L:
        expected = reference.write_kv(*arguments, layer=layer)
    for result, wanted in zip(got, expected, strict=True):
        assert result.dtype == wanted.dtype
        kind = np.dtype(f"u{wanted.dtype.itemsize}")
        np.testing.assert_array_equal(np.asarray(result).view(kind), np.asarray(wanted).view(kind))


GRID = [
    dict(block_size=8, heads=2, head_dim=64, dtype=jnp.bfloat16),
    dict(block_size=16, heads=3, head_dim=64, dtype=jnp.bfloat16),
    dict(block_size=16, heads=8, head_dim=128, dtype=jnp.float16),
    dict(block_size=32, heads=1, head_dim=80, dtype=jnp.float32),
    dict(block_size=64, heads=4, head_dim=96, dtype=jnp.uint16),
    dict(block_size=128, heads=1, head_dim=256, dtype=jnp.bfloat16),
    dict(block_size=16, heads=32, head_dim=80, dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("options", GRID, ids=lambda x: "-".join(str(v) for v in x.values()))
def test_options(options):
    arguments = case(**options)
    assert_as_reference(run(mosaic_gpu.write_kv, arguments), arguments)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 12])
def test_number_of_tokens_and_of_tokens_a_thread_block(monkeypatch, num_tokens):
    monkeypatch.setattr(mosaic_gpu, "tokens_per_block", lambda *_: 4)
    arguments = case(num_tokens=num_tokens)
    assert_as_reference(run(mosaic_gpu.write_kv, arguments, layer=2), arguments, layer=2)


def test_two_runs_give_the_same_bits_and_nothing_is_written_for_padding():
    arguments = case()
    first, second = (run(mosaic_gpu.write_kv, arguments) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view("u2"), np.asarray(b).view("u2"))
    padding = (*arguments[:4], jnp.full(10, NULL, jnp.int32))
    assert_as_reference(run(mosaic_gpu.write_kv, padding), padding)


def test_a_layer_that_is_not_there_is_dropped():
    arguments = case()
    for layer in (-1, L):
        assert_as_reference(run(mosaic_gpu.write_kv, arguments, layer), arguments, layer)


def test_in_a_scan_over_layers_through_the_dispatcher():
    k_pool, v_pool, k, v, slots = case()

    def layers(k_pool, v_pool):
        def body(pools, layer):
            scale = 1 + layer.astype(jnp.float32)
            pools = write_kv(*pools, k * scale, v, slots, layer=layer, implementation="pallas")
            return pools, None

        return jax.lax.scan(body, (k_pool, v_pool), jnp.arange(L))[0]

    with interpreted():
        got = jax.jit(layers)(k_pool, v_pool)
    for layer in range(L):
        k_pool, v_pool = reference.write_kv(k_pool, v_pool, k * (1 + layer), v, slots, layer=layer)
    np.testing.assert_array_equal(np.asarray(got[0]).view("u2"), np.asarray(k_pool).view("u2"))
    np.testing.assert_array_equal(np.asarray(got[1]).view("u2"), np.asarray(v_pool).view("u2"))


def test_rows_that_no_layout_fits_are_refused():
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        mosaic_gpu.write_kv(*case(heads=1, head_dim=72), layer=0)


STORE_K = "store(k_pool_ref.at[layer, slot], k_row)"
STORE_V = "store(v_pool_ref.at[layer, slot], v_row)"
# Fault: what is changed in the kernel's source. Each must be found by the comparison above, or by
# the interpreter itself.
FAULTS = {
    "padding is written": ("& (slot >= 0) & (slot < num_slots)", ""),
    "one slot past the end": ("(slot < num_slots)", "(slot <= num_slots)"),
    "the last slot is dropped": ("(slot < num_slots)", "(slot < num_slots - 1)"),
    "negative slots wrap": ("& (slot >= 0)", ""),
    "another layer": ("layer = layer_ref[0]", "layer = layer_ref[0] - 1"),
    "the layer is not checked": ("& layer_exists", ""),
    "keys and values exchanged": (STORE_K, STORE_K.replace("k_row", "v_row")),
    "values are not stored": (STORE_V, "pass"),
    "the block's first slot": ("slot = slot_ref[t]", "slot = slot_ref[jnp.minimum(first, t)]"),
    "the block's first rows": ("x.at[t]", "x.at[jnp.minimum(first, t)]"),
    "the end is not clamped": ("t = jnp.minimum(first + i, num_tokens - 1)", "t = first + i"),
    "thread blocks overlap": ('lax.axis_index("tokens") * tokens', 'lax.axis_index("tokens")'),
    "no last thread block": ("pl.cdiv(num_tokens, tokens)", "num_tokens // tokens"),
    "rounded twice": ("to_storage(x,", "to_storage(x.astype(jnp.float16),"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    module = planted(mosaic_gpu, FAULTS[fault])
    module.tokens_per_block = lambda *_: 4
    layer = L if fault == "the layer is not checked" else 1

    def check():
        arguments = case()
        assert_as_reference(run(module.write_kv, arguments, layer), arguments, layer)

    with pytest.raises(Exception, match=r".") as found:
        check()
    assert not isinstance(found.value, NameError | TypeError | AttributeError), found.value


def test_without_a_fault_the_planted_copy_is_right():
    module = planted(mosaic_gpu)
    module.tokens_per_block = lambda *_: 4
    arguments = case()
    assert_as_reference(run(module.write_kv, arguments), arguments)
