"""Times of paged attention, one layer, beside the obvious way to write it.

    python scripts/bench_attention.py [--dtype bfloat16] [--repeats 30]

The obvious way gathers every row's context with its block table and calls einsum and softmax
over a static context (the longest of the step): for decode alone, since for prompts it would
need ``[T, context]`` memory. For prompts the yardstick is one matrix product of ``[T, 576] x
[576, 1536]``, of which a layer of SmolLM2-135M has the worth of about four. Shapes are
SmolLM2-135M's: 9 query heads, 3 KV heads, dimension 64, blocks of 16. Layers are chained, so
that the pool of each is cold. Times are minima over repeats; ratios are from the same run.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NULL, init_pool, make_metadata, paged_attention
from pallas_kernels.pool import to_float32, to_storage

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 9, 3, 64
NUM_BLOCKS = 2048
SCALE = HEAD_DIM**-0.5


def cases() -> dict[str, dict]:
    """Name to query lengths, context lengths and tokens of prefix that all rows share."""
    rng = np.random.default_rng(1)
    lens = rng.integers(33, 512, 32).tolist()
    one = [1] * 32
    return {
        "decode 1 x 256": dict(query_lens=[1], seq_lens=[256]),
        "decode 1 x 256 of 32 rows": dict(query_lens=[1], seq_lens=[256], num_rows=32),
        "decode 32 x 256": dict(query_lens=one, seq_lens=[256] * 32),
        "decode 32 x 33..512": dict(query_lens=one, seq_lens=lens),
        "decode 32 x 560, 512 shared": dict(query_lens=one, seq_lens=[560] * 32, shared=512),
        "31 decode + 97 prompt": dict(query_lens=[*one[1:], 97], seq_lens=[*lens[1:], 97]),
        "prompt 1 x 1024": dict(query_lens=[1024], seq_lens=[1024]),
    }


def make_step(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_layers: int,
    dtype: str,
    num_rows: int | None = None,
    shared: int = 0,
) -> tuple[jax.Array, ...]:
    """Arguments of ``paged_attention`` with blocks scattered over the pool."""
    rng = np.random.default_rng(0)
    num_rows = num_rows or len(seq_lens)
    num_tokens = max(sum(query_lens), num_rows)
    free = rng.permutation(NUM_BLOCKS).tolist()
    common = [free.pop() for _ in range(shared // BLOCK_SIZE)]
    tables = np.full((num_rows, 128), NULL, np.int32)
    for r, length in enumerate(seq_lens):
        own = [free.pop() for _ in range(-(-length // BLOCK_SIZE) - len(common))]
        tables[r, : len(common) + len(own)] = common + own
    starts = np.full(num_rows + 1, sum(query_lens), np.int32)
    starts[: len(query_lens)] = np.cumsum([0, *query_lens])[:-1]
    lens = np.zeros(num_rows, np.int32)
    lens[: len(seq_lens)] = seq_lens
    pools = init_pool(num_layers, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    k_pool, v_pool = (
        to_storage(jax.random.normal(key, pool.shape), pool)
        for key, pool in zip(keys, pools, strict=False)
    )
    q = jax.random.normal(keys[2], (num_tokens, NUM_HEADS, HEAD_DIM))
    return (q, k_pool, v_pool, *map(jnp.asarray, (tables, starts, lens)))


def ours(num_layers: int) -> Callable:
    @jax.jit
    def chain(q, k_pool, v_pool, tables, starts, lens):
        metadata = make_metadata(
            starts, lens, tables, num_tokens=q.shape[0], block_size=k_pool.shape[2]
        )
        for layer in range(num_layers):
            q = paged_attention(
                q, k_pool, v_pool, tables, starts, lens,
                layer=layer, scale=SCALE, metadata=metadata,
            )  # fmt: skip
        return q

    return chain


def gather_einsum(num_layers: int, max_blocks: int) -> Callable:
    @jax.jit
    def chain(q, k_pool, v_pool, tables, starts, lens):
        rows = lens.shape[0]
        blocks = jnp.clip(tables[:, :max_blocks], 0, NUM_BLOCKS - 1)
        for layer in range(num_layers):
            shape = (rows, max_blocks * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
            k = to_float32(k_pool[layer, blocks]).reshape(shape)
            v = to_float32(v_pool[layer, blocks]).reshape(shape)
            heads = q.reshape(rows, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_DIM)
            logits = jnp.einsum("rkgd,rckd->rkgc", heads, k) * SCALE
            seen = jnp.arange(shape[1]) < lens[:, None]
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), axis=-1)
            q = jnp.einsum("rkgc,rckd->rkgd", weights, v).reshape(q.shape)
        return q

    return chain


def product(num_layers: int) -> Callable:
    @jax.jit
    def chain(x, up):
        for _ in range(num_layers):
            y = jax.lax.dot_general(x, up, (((1,), (1,)), ((), ())))
            x = y[:, : x.shape[1]] * 1e-3
        return x

    weights = jnp.ones((1536, NUM_HEADS * HEAD_DIM))
    return lambda q, *_: chain(q.reshape(q.shape[0], -1), weights)


def best(functions: list[Callable], arguments: tuple, repeats: int) -> list[float]:
    """Least seconds of each, taken in turns so that noise falls on all alike."""
    for function in functions:
        jax.block_until_ready(function(*arguments))
    seconds = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.default_backend()}, {args.dtype} pool; ms a layer")
    print(f"{'':28s} {'ours':>8s} {'other':>8s} {'ratio':>6s}  other is")
    for name, case in cases().items():
        is_prompt = max(case["query_lens"]) > 1
        num_layers = 2 if is_prompt else 8
        arguments = make_step(**case, num_layers=num_layers, dtype=args.dtype)
        if is_prompt:
            other, label = product(num_layers), "one product, 576 x 1536"
        else:
            longest = -(-max(case["seq_lens"]) // BLOCK_SIZE)
            other, label = gather_einsum(num_layers, longest), "gather and einsum"
        repeats = max(3, args.repeats // 4) if is_prompt else args.repeats
        times = best([ours(num_layers), other], arguments, repeats)
        mine, theirs = (t / num_layers * 1e3 for t in times)
        print(f"{name:28s} {mine:8.3f} {theirs:8.3f} {theirs / mine:6.2f}  {label}", flush=True)


if __name__ == "__main__":
    main()
