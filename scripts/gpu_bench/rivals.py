"""Paged attention in several implementations, behind one signature for timing.

A rival is made for a case: ``make(case, arrays) -> (call, q, rest)``, to be called as ``call(q,
layer, *rest)``. One that cannot run raises ``Unavailable`` with the reason.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpu_bench.cases import Arrays, Case
from gpu_bench.tables import using
from pallas_kernels import make_metadata, paged_attention, tuning

Made = tuple[Callable[..., jax.Array], jax.Array, tuple]


class Unavailable(RuntimeError):
    """An implementation that cannot run this case, and why."""


def ours(implementation: str) -> Callable[[Case, Arrays], Made]:
    """This project's attention; the work list is made once, as in a step."""

    def make(case: Case, arrays: Arrays) -> Made:
        q, k_pool, v_pool, tables, starts, lens = arrays.as_tuple()
        work = jax.jit(
            lambda starts, lens, tables, k_pool: make_metadata(
                *(starts, lens, tables),
                num_tokens=case.num_tokens,
                block_size=case.block_size,
                num_heads=case.num_heads,
                k_pool=k_pool,
                implementation=implementation,
            )
        )(starts, lens, tables, k_pool)

        def call(q, layer, k_pool, v_pool, tables, starts, lens, work):
            return paged_attention(
                *(q, k_pool, v_pool, tables, starts, lens),
                layer=layer,
                scale=case.head_dim**-0.5,
                implementation=implementation,
                metadata=work,
            )

        return call, q, (k_pool, v_pool, tables, starts, lens, work)

    return make


def mma_sync(case: Case, arrays: Arrays) -> Made:
    """This project's attention with the other chips' prefill on Hopper, which has its own."""
    if max(case.query_lens) == 1:
        raise Unavailable("prefill only")
    if tuning.current_chip() not in tuning.HOPPER:
        raise Unavailable("what 'pallas' does on every chip but Hopper")
    with using("paged_attention_prefill", {"instruction": "mma_sync"}):
        return ours("pallas")(case, arrays)


def deprecated_op(case: Case, arrays: Arrays) -> Made:
    """``jax.experimental.pallas.ops.gpu.paged_attention``: decode only, in a layout of its own
    (made before the clock runs), and unscaled.
    """
    _require_decode(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.pallas.ops.gpu import paged_attention as module
    except ImportError as error:
        raise Unavailable(str(error)) from error
    q, k_pool, v_pool, tables, _, lens = arrays.as_tuple()
    k_pages, v_pages = (_heads_first(x, case) for x in (k_pool, v_pool))
    # The split count must divide the table's width, and the pages of a step the rest of it.
    tables, splits = _padded_tables(tables, case.num_blocks)
    per_split = tables.shape[1] // splits
    step = next(n for n in (8, 4, 2, 1) if per_split % n == 0)
    on_cpu = jax.default_backend() == "cpu"

    def call(q, layer, k_pages, v_pages, tables, lens):
        return module.paged_attention(
            q * case.head_dim**-0.5,
            k_pages,
            v_pages,
            tables + layer * case.num_blocks,
            lens,
            k_splits=splits,
            pages_per_compute_block=step,
            interpret=on_cpu,
        )

    return call, q, (k_pages, v_pages, tables, lens)


def cudnn(case: Case, arrays: Arrays) -> Made:
    """cuDNN's paged attention, which jax wraps privately: same layout as ours."""
    if jax.default_backend() != "gpu":
        raise Unavailable("cuDNN needs an NVIDIA GPU")
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        attend, mask = module.paged_attention, module.MaskType.PADDING
    except (ImportError, AttributeError) as error:
        raise Unavailable(str(error)) from error
    _require_decode(case)
    q, k_pool, v_pool, tables, _, lens = arrays.as_tuple()
    pages = [x.reshape(-1, *x.shape[2:]) for x in (k_pool, v_pool)]
    tables = jnp.where(tables < case.num_blocks, tables, 0)
    ones = jnp.ones_like(lens)

    def call(q, layer, k_pages, v_pages, tables, ones, lens):
        table = (tables + layer * case.num_blocks)[:, None, :, None]
        out = attend(
            *(q[:, None], k_pages, v_pages, ones, lens, table, table),
            scale=case.head_dim**-0.5,
            mask_type=mask,
        )
        return (out[0] if isinstance(out, tuple | list) else out)[:, 0]

    return call, q, (*pages, tables, ones, lens)


RIVALS: dict[str, Callable[[Case, Arrays], Made]] = {
    "pallas": ours("pallas"),
    "mma.sync": mma_sync,
    "xla": ours("xla"),
    "deprecated op": deprecated_op,
    "cudnn": cudnn,
}
"""By the name in the tables; this project's kernels first."""


def _require_decode(case: Case) -> None:
    if max(case.query_lens) > 1:
        raise Unavailable("decode only")


def _heads_first(pool: jax.Array, case: Case) -> jax.Array:
    pages = pool.reshape(-1, case.block_size, case.num_kv_heads, case.head_dim)
    return pages.transpose(2, 0, 1, 3)


def _padded_tables(tables: jax.Array, num_blocks: int) -> tuple[jax.Array, int]:
    splits = min(16, tables.shape[1])
    padding = -tables.shape[1] % splits
    tables = jnp.pad(tables, ((0, 0), (0, padding)))
    return jnp.where(tables < num_blocks, tables, 0), splits


def make_call(name: str, case: Case, arrays: Arrays) -> Made:
    """The rival for a case, compiled by nobody yet.

    Raises:
      Unavailable: it cannot run the case; so does whatever stops it from being built.
    """
    try:
        return RIVALS[name](case, arrays)
    except NotImplementedError as error:
        raise Unavailable(str(error)) from error


def describe(error: Any) -> str:
    """The first line of an error, short."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
