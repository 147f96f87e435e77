"""Every kernel against float64 (attention) or bit for bit (what only moves data)."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gpu_bench.cases import Arrays, Case, make_arrays
from gpu_bench.tables import using
from pallas_kernels import (
    NULL,
    copy_blocks,
    gather_blocks,
    paged_attention,
    scatter_blocks,
    tuning,
    write_kv,
)

TOLERANCE = 1e-2
"""Largest error relative to the largest element, for 16-bit pools."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: ``error`` is relative, 0 for what must agree bit for bit and does."""

    name: str
    error: float
    passed: bool
    note: str = ""


def attention_float64(
    case: Case,
    arrays: Arrays,
    *,
    layer: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Attention of every token with numpy in float64: ``[T, H, D]``."""
    q, k_pool, v_pool = (
        np.asarray(x, np.float64) for x in (arrays.q, arrays.k_pool[layer], arrays.v_pool[layer])
    )
    tables = np.asarray(arrays.block_tables)
    out, start = np.zeros(q.shape), 0
    group = case.num_heads // case.num_kv_heads
    for row, (queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        blocks = tables[row, : -(-length // case.block_size)]
        keys, values = (
            np.repeat(x[blocks].reshape(-1, *x.shape[2:])[:length], group, axis=1)
            for x in (k_pool, v_pool)
        )
        logits = np.einsum("qhd,khd->hqk", q[start : start + queries], keys) * case.head_dim**-0.5
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        distance = np.arange(length - queries, length)[:, None] - np.arange(length)
        seen = distance >= 0
        if sliding_window is not None:
            seen &= distance < sliding_window
        logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[start : start + queries] = np.einsum("hqk,khd->qhd", weights, values)
        start += queries
    return out


def check_attention(name: str, case: Case, *, implementation: str, **options) -> Check:
    """One attention call on poisoned arrays."""
    arrays = make_arrays(case, poison=True)
    layer = case.num_layers - 1

    def call(*args):
        return paged_attention(
            *args,
            layer=layer,
            scale=case.head_dim**-0.5,
            implementation=implementation,
            **options,
        )

    try:
        got = np.asarray(jax.jit(call)(*arrays.as_tuple()), np.float64)
    except NotImplementedError as error:
        return Check(name=name, error=np.inf, passed=False, note=str(error))
    wanted = attention_float64(case, arrays, layer=layer, **options)
    error = float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))
    return Check(name=name, error=error, passed=bool(error < TOLERANCE))


def attention_cases(*, tiny: bool) -> Iterator[tuple[str, Case, dict]]:
    """Name, case and options: decode and prefill over the option grid."""
    if tiny:
        small = dict(num_heads=4, num_kv_heads=2, head_dim=64)
        yield "decode", Case(query_lens=(1, 1), seq_lens=(1, 21), **small), {}
        yield "mixed", Case(query_lens=(1, 9), seq_lens=(17, 12), **small), {}
        return
    lens = (1, 15, 16, 17, 127, 128, 129, 1000)
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in ("bfloat16", "float16"):
            for heads in ((8, 8), (9, 3), (32, 8), (16, 1)):
                options = dict(
                    num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype
                )
                label = f"d{head_dim} {heads[0]}/{heads[1]} {dtype}"
                decode = Case(query_lens=(1,) * 8, seq_lens=lens, num_layers=2, **options)
                yield f"decode {label}", decode, {}
                if heads in ((9, 3), (32, 8)):
                    mixed = Case(query_lens=(1, 15, 9, 1, 70), seq_lens=(300, 15, 73, 16, 70))
                    yield f"mixed {label}", dataclasses.replace(mixed, **options), {}
    for block_size in (8, 32, 64, 128):
        case = Case(query_lens=(1, 40, 1), seq_lens=(257, 70, 8), block_size=block_size)
        yield f"blocks of {block_size}", case, {}
    case = Case(query_lens=(1, 90, 1), seq_lens=(500, 90, 30))
    yield "sliding window", case, dict(sliding_window=33)
    yield "soft cap", case, dict(soft_cap=5.0)


def check_copies(*, implementation: str, tiny: bool) -> Iterator[Check]:
    """``write_kv``, ``copy_blocks``, ``gather_blocks`` and ``scatter_blocks``, bit for bit."""
    shapes = [(8, 2, 64)] if tiny else [(16, 8, 128), (16, 3, 64), (32, 4, 80), (8, 1, 96)]
    dtypes = ["bfloat16"] if tiny else ["bfloat16", "float16", "float32"]
    for block, heads, head_dim in shapes:
        for dtype in dtypes:
            label = f"{block}x{heads}x{head_dim} {dtype}"
            for name, same in _copy_checks((block, heads, head_dim), dtype, implementation):
                yield Check(name=f"{name} {label}", error=0.0 if same else np.inf, passed=same)


def _copy_checks(
    block_shape: tuple[int, int, int], dtype: str, implementation: str
) -> Iterator[tuple[str, bool]]:
    num_layers, num_blocks, tokens = 2, 12, 19
    keys = jax.random.split(jax.random.key(1), 4)
    shape = (num_layers, num_blocks, *block_shape)
    pools = [jax.random.normal(key, shape).astype(dtype) for key in keys[:2]]
    rows = [jax.random.normal(k, (tokens, *block_shape[1:])).astype(dtype) for k in keys[2:]]
    rng = np.random.default_rng(0)
    slots = rng.permutation(num_blocks * block_shape[0])[:tokens].astype(np.int32)
    slots[::5] = NULL
    src = jnp.asarray([1, 2, NULL, 6, 7, 0, 3], jnp.int32)
    dst = jnp.asarray([2, 1, 5, 7, 8, 11, NULL], jnp.int32)
    buffers = gather_blocks(*pools, src, implementation="reference")
    calls: list[tuple[str, Callable, tuple, dict]] = [
        ("write_kv", write_kv, (*pools, *rows, jnp.asarray(slots)), dict(layer=1)),
        ("copy_blocks", copy_blocks, (*pools, src, dst), {}),
        ("gather_blocks", gather_blocks, (*pools, src), {}),
        ("scatter_blocks", scatter_blocks, (*pools, *buffers, dst), {}),
    ]
    for name, function, args, options in calls:

        def run(implementation, function=function, args=args, options=options):
            call = jax.jit(lambda *xs: function(*xs, implementation=implementation, **options))
            return [np.asarray(x).view(np.uint8) for x in call(*args)]

        pairs = zip(run(implementation), run("reference"), strict=True)
        yield name, all(np.array_equal(a, b) for a, b in pairs)


def check_all(*, implementation: str = "pallas", tiny: bool = False) -> Iterator[Check]:
    """Every comparison, the quick ones first."""
    yield from check_copies(implementation=implementation, tiny=tiny)
    for name, case, options in attention_cases(tiny=tiny):
        yield check_attention(name, case, implementation=implementation, **options)
        # On Hopper prompts have a kernel of their own; what other chips do is checked there too.
        if tuning.current_chip() in tuning.HOPPER and max(case.query_lens) > 1:
            with using("paged_attention_prefill", {"instruction": "mma_sync"}):
                check = check_attention(
                    f"{name}, mma.sync", case, implementation=implementation, **options
                )
            yield check
