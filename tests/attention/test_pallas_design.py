"""What the kernels' design promises and a computer without a GPU can check without compiling."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import make_step
from pallas_cases import llama_config, needs_mosaic_gpu
from planted import planted

from pallas_kernels import make_metadata, paged_attention
from pallas_kernels.interpret import interpret_mode
from pallas_kernels.paged_attention.mosaic_gpu import pipeline
from pallas_kernels.paged_attention.mosaic_gpu.config import (
    BLOCK_SIZES,
    HEAD_DIMS,
    blocks_per_sm,
)
from pallas_kernels.paged_attention.mosaic_gpu.target import Target
from pallas_kernels.paged_attention.mosaic_gpu.work import make_work_list

HOPPER = Target()
AMPERE = Target(tma=False, num_sms=108, shared_bytes=167936)
# Bandwidth in bytes per second; a load takes about 700 ns.
CHIPS = {
    "a100": (AMPERE, 2.04e12),
    "h100": (HOPPER, 3.35e12),
    "h200": (HOPPER, 4.8e12),
    "b200": (Target(num_sms=148), 7.67e12),
}


def config(target=HOPPER, **changes):
    return llama_config(target, **changes)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_keeps_enough_bytes_in_flight(chip, head_dim):
    """Twice what bandwidth times latency asks; three thread blocks per SM on Hopper and later."""
    target, bandwidth = CHIPS[chip]
    for num_heads in (8, 24, 64):
        tile = config(target, head_dim=head_dim, num_heads=num_heads).decode
        blocks = blocks_per_sm(tile, head_dim, target)
        assert blocks >= (3 if target.tma else 2)
        in_flight = blocks * (tile.stages - 1) * 2 * tile.chunk * head_dim * 2
        assert in_flight >= 2 * bandwidth / target.num_sms * 700e-9


def test_splits_depend_on_shapes_only_and_are_whole_chunks():
    for rows, context, head_dim in itertools.product((1, 8, 64, 256), (64, 2048, 2**17), HEAD_DIMS):
        tile = config(num_rows=rows, max_context=context, head_dim=head_dim).decode
        assert tile.split % tile.chunk == 0
        partial = rows * 8 * tile.columns * head_dim * 4 * -(-context // tile.split)
        assert partial <= 2**27 or tile.split >= context


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("head_dim", 72),
        ("block_size", 4),
        ("query heads per KV head", 32),
        ("pool dtype", jnp.float32),
        ("decode_queries", 9),
    ],
)
def test_refusals_name_the_option(option, value):
    key, value = {
        "query heads per KV head": ("num_heads", 256),
        "pool dtype": ("dtype", value),
    }.get(option, (option, value))
    with pytest.raises(NotImplementedError, match=option):
        config(**{key: value})


def test_before_hopper_three_pairs_have_too_small_blocks():
    for head_dim, block_size in itertools.product(HEAD_DIMS, BLOCK_SIZES):
        size = dict(head_dim=head_dim, block_size=block_size)
        assert config(**size).decode.swizzle
        if (head_dim, block_size) in ((80, 8), (80, 16), (96, 8)):
            words = f"block_size {block_size} with head_dim {head_dim}"
            with pytest.raises(NotImplementedError, match=words):
                config(AMPERE, **size)
        else:
            assert config(AMPERE, **size).decode.swizzle


@needs_mosaic_gpu
@pytest.mark.parametrize("width", [64, 32])
def test_that_is_how_mosaic_gpu_deals_tiles_out_to_warps(width):
    """Were it to learn more, the refusals could go."""
    from jax.experimental.mosaic.gpu import fragmented_array

    for head_dim, block_size in ((80, 8), (80, 16), (96, 8)):
        if head_dim * 2 % width == 0:
            with pytest.raises(NotImplementedError, match="multiple of 4"):
                fragmented_array.tiled_copy_smem_gmem_layout(
                    block_size // 8, head_dim * 2 // width, width, 16
                )


def test_work_list():
    """Two decode rows of 3 and 1 splits, an empty row, a chunk of three tiles, padding."""
    made = config(num_rows=4, max_context=2048, num_kv_heads=1, num_heads=8)
    split, tile = made.decode.split, made.prefill.queries
    assert (split, tile) == (128, 8)
    starts, lens = jnp.array([0, 1, 2, 2, 19]), jnp.array([300, 5, 0, 100])
    work = make_work_list(
        starts, lens, num_tokens=24, max_context=2048, sliding_window=None, config=made
    )
    assert work.decode_count.tolist() == [4]
    assert work.decode_items[:4].tolist() == [
        [0, 0, 299, 300],
        [0, 128, 299, 300],
        [0, 256, 299, 300],
        [1, 0, 4, 5],
    ]
    assert work.first_items[:2].tolist() == [0, 3]
    assert work.num_items.tolist() == [3, 1, 0, 0]
    assert work.prefill_count.tolist() == [3]
    assert work.prefill_items[:3].tolist() == [[3, 8, 83, 2], [3, 8, 91, 10], [3, 1, 99, 18]]
    assert work.token_tiles.tolist() == [-1] * 2 + [0] * 8 + [1] * 8 + [2] + [-2] * 5
    windowed = make_work_list(
        starts, lens, num_tokens=24, max_context=2048, sliding_window=100, config=made
    )
    assert windowed.decode_items[:3].tolist() == [
        [0, 128, 299, 300],
        [0, 256, 299, 300],
        [1, 0, 4, 5],
    ]


class CopyQueue:
    """``cp.async`` as the programming guide has it: groups complete in order, a wait leaves at most
    n of them under way. Checks that a chunk is complete when it is used, and unused when its stage
    is filled again.
    """

    def __init__(self, monkeypatch, module, *, stages, num_chunks, block_size=16, chunk=64):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        self.pending, self.landed, self.at = [], {}, None
        monkeypatch.setattr(plgpu, "copy_gmem_to_smem", self.copy)
        monkeypatch.setattr(plgpu, "wait_gmem_to_smem", self.wait)
        monkeypatch.setattr(module.pl, "when", lambda c: (lambda f: f()) if c else lambda f: None)
        tile = config(AMPERE, block_size=block_size).decode
        tile = type(tile)(**(vars(tile) | dict(stages=stages, chunk=chunk)))
        ref = type("Ref", (), dict(shape=(8, block_size, 128), at=_At()))()
        table = type("Table", (), dict(shape=(1, 64), __getitem__=lambda _, i: i[1]))()
        self.stream = module.Stream(
            k_ref=ref, v_ref=ref, table_ref=table, k_stages=ref, v_stages=ref, k_barriers=None,
            v_barriers=None, tile=tile, target=AMPERE, row=0, head=0, begin=0,
            num_chunks=num_chunks, first_block=0, num_blocks=64, head_dim=128,
        )  # fmt: skip
        self.per_chunk = 2 * chunk // block_size

    def copy(self, source, destination, barrier, **_):
        assert barrier is None
        block, slot = int(source[0]), int(destination[0])
        self.pending.append((block * 16 // 64, slot))

    def wait(self, n):
        while len(self.pending) > n:
            chunk, slot = self.pending.pop(0)
            assert self.landed.get(slot, [None])[0] in (None, chunk, chunk - self.stages)
            count = self.landed[slot][1] if self.landed.get(slot, [None])[0] == chunk else 0
            self.landed[slot] = (chunk, count + 1)

    @property
    def stages(self):
        return self.stream.tile.stages

    def play(self):
        self.stream.start()
        for i in range(int(self.stream.num_chunks)):
            self.stream.wait_keys(jnp.int32(i))
            self.stream.wait_values(jnp.int32(i))
            assert self.landed.get(i % self.stages) == (i, self.per_chunk), f"chunk {i} not there"
            # What is filled while chunk i is used must not be chunk i's stage.
            assert all(slot != i % self.stages for _, slot in self.pending)
            self.stream.advance(jnp.int32(i), self.stream.upcoming(jnp.int32(i)))
        assert not self.pending


class _At:
    def __getitem__(self, index):
        return index


@needs_mosaic_gpu
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_cp_async_waits(stages, monkeypatch):
    """The order of A100's copies and waits, which the interpreter cannot run."""
    for num_chunks in range(8):
        with monkeypatch.context() as patch:
            CopyQueue(patch, pipeline, stages=stages, num_chunks=num_chunks).play()


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "edit",
    [
        ("(stages - 2) * per_chunk", "(stages - 1) * per_chunk"),
        ("i + stages - 1 <= self.num_chunks", "i + stages - 3 <= self.num_chunks"),
        ("ahead = i + stages - 1", "ahead = i + stages"),
    ],
)
def test_cp_async_waits_finds_faults(edit, monkeypatch):
    faulty = planted(pipeline, edit)

    def play():
        for num_chunks in range(8):
            with monkeypatch.context() as patch:
                CopyQueue(patch, faulty, stages=3, num_chunks=num_chunks).play()

    with pytest.raises(AssertionError):
        play()


def test_dispatch():
    """On a CPU: pallas only when asked for and interpreted, and then it says what is missing."""
    from attention_cases import Shape

    step = make_step(Shape(), [1], [1])
    call = jax.jit(
        lambda implementation: paged_attention(
            *step.arrays, layer=0, scale=1.0, implementation=implementation
        ),
        static_argnums=0,
    )
    assert "pallas_call" not in str(call.trace(None).jaxpr)
    with pytest.raises(NotImplementedError, match=r"NVIDIA GPU|jax 0\.11"):
        call("pallas")


@needs_mosaic_gpu
def test_dispatch_interpreted():
    from attention_cases import Shape

    step = make_step(Shape(), [1], [1])
    _, k_pool, _, tables, starts, lens = step.arrays
    with interpret_mode():
        with pytest.raises(NotImplementedError, match="head_dim 8"):
            paged_attention(*step.arrays, layer=0, scale=1.0, implementation="pallas")
        # Without the shapes there is no work list to make ahead.
        assert (
            make_metadata(
                starts, lens, tables, num_tokens=150, block_size=4, implementation="pallas"
            )
            is None
        )
        with pytest.raises(NotImplementedError, match=r"block_size|head_dim"):
            make_metadata(
                starts, lens, tables, num_tokens=150, block_size=4, num_heads=4, k_pool=k_pool,
                implementation="pallas",
            )  # fmt: skip
