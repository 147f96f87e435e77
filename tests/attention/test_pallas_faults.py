"""Tests of the attention kernels' tests: faults planted in the kernels' source must be found.

Of the faults that need a compiler to be seen, spills and too much shared memory are the compile
gate's to find; ``test_pallas_design`` has the occupancy. Escapes, that is faults that nothing here
finds:

- a block id that is not kept within the pool: what it brings is masked, and TMA fills with zeros
  what lies outside an array (``test_escapes`` pins this). ``cp.async`` would read out of bounds.
- a missing barrier between the store of the softmax weights and their load: the compiler inserts
  it, there is nothing in the source to remove.
- anything in the ``cp.async`` copies themselves, which the interpreter cannot run; the order of
  their waits is tested in ``test_pallas_design``.
- missing waits for queries: they are loaded synchronously, there is none.
"""

import jax
import numpy as np
import pytest
from attention_cases import LAYER, Shape
from pallas_cases import SCALE, expect, needs_mosaic_gpu, poisoned
from planted import hangs, interpreted, planted

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.mosaic_gpu import (
    combine,
    config,
    decode,
    entry,
    launch,
    piece,
    pipeline,
    prefill,
    prefill_wgmma,
    work,
)

pytestmark = [needs_mosaic_gpu, pytest.mark.timeout(300)]

SHAPE = Shape(
    block_size=16,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    num_rows=4,
    max_blocks=37,
    num_blocks=90,
    num_tokens=48,
)
# A row of several splits and of more chunks than stages, one query beside a block's edge, a chunk
# of a prompt over more chunks than stages, and a prompt.
STEP = ([1, 1, 22, 24], [580, 17, 270, 24])
WINDOW = (("sliding_window", 200),)


def outcome(options: tuple = (), lens: tuple = STEP) -> str:
    """What the checks say of the kernels as they are now: "pass", or what they found."""
    step = poisoned(SHAPE, *lens)

    def call(*arrays):  # a new function, so that jit compiles it again
        return paged_attention(
            *arrays, layer=LAYER, scale=SCALE, implementation="pallas", **dict(options)
        )

    try:
        with interpreted():
            got = np.asarray(jax.jit(call)(*step.arrays))
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        known = {"RACE DETECTED": "race", "Out-of-bounds": "out of bounds", "arrier": "barrier"}
        return next((finding for part, finding in known.items() if part in text), text)
    except RuntimeError as error:  # of the model of wgmma
        return "under way" if "under way" in str(error) else str(error)
    if not np.isfinite(got).all():
        return "not finite"
    wrong = np.abs(got - expect(SHAPE, step, options)).max() > 3e-6
    return "wrong" if wrong else "pass"


def plant(monkeypatch, module, *edits):
    """The kernels with the faulty copy of ``module`` in it."""
    copy = planted(module, *edits)
    if module is pipeline:
        monkeypatch.setattr(launch, "Stream", copy.Stream)
        for user in (decode, prefill, prefill_wgmma):
            for name in ("scratch_types", "to_logits"):
                monkeypatch.setattr(user, name, getattr(copy, name))
        return
    if module is piece:
        for user in (prefill, prefill_wgmma):
            monkeypatch.setattr(user, "open_piece", copy.open_piece)
        return
    where = {
        decode: (entry, "decode"),
        prefill: (entry, "prefill"),
        prefill_wgmma: (entry, "prefill_wgmma"),
        combine: (entry, "combine"),
        work: (entry, "make_work_list"),
    }[module]
    monkeypatch.setattr(*where, getattr(copy, where[1]))


MASK = "seen = tokens <= positions"
VALUES = "v = jnp.where((tokens >= oldest) & (tokens < end), v, jnp.zeros((), dtype))"
LOGITS = "logits = jnp.where(visible(first), logits, HIDDEN)"

# Of what both prefills go by.
PREFILL_MASK = (
    piece,
    [("tokens <= spread(positions)", "tokens <= spread(positions) + 1")],
    (),
    "not finite|wrong",
)
PREFILL_WINDOW = (piece, [("tokens > spread(", "tokens >= spread(")], WINDOW, "wrong")
PREFILL_WHOLE = (
    piece,
    [("(self.position + 1 - stream.begin) //", "(self.end - stream.begin) //")],
    (),
    "wrong",
)
WRONG_HEAD = (pipeline, [("pl.ds(self.head * self", "pl.ds((1 - self.head) * self")], (), "wrong")

FAULTS = {
    # name: (module, edits, options, what finds it)
    "decode: mask one too far": (decode, [(MASK, MASK + " + 1")], (), "not finite|wrong"),
    "decode: logits not masked": (decode, [(LOGITS, "")], (), "not finite|wrong"),
    "decode: values not masked": (decode, [(VALUES, "")], (), "not finite"),
    "decode: window one too wide": (
        decode, [("tokens > positions - call.sl", "tokens >= positions - call.sl")], WINDOW,
        "wrong",
    ),
    "decode: sums not rescaled": (
        decode, [("out = out * spread(shrink, out_shape)", "")], (), "wrong",
    ),
    "decode: weights not rescaled": (
        decode, [("total * spread(shrink, logits_shape) + weight", "total + weight")], (),
        "wrong",
    ),
    "decode: split ends early": (
        decode, [("begin + tile.split", "begin + tile.chunk")], (), "wrong",
    ),
    "decode: cut off at the split instead of the context": (
        decode, [("queries + position, context - 1", "queries + position, end - 1")], WINDOW,
        "wrong",
    ),
    "decode: stages refilled before they are used": (
        decode,
        [
            ("        stream.advance(i, upcoming)\n", ""),
            ("        stream.wait_keys(i)\n", "        stream.advance(i, upcoming)\n"
             "        stream.wait_keys(i)\n"),
        ],
        (),
        "race|barrier",
    ),
    "combine: splits not weighted": (
        combine, [("jnp.exp2(part_high - high)", "jnp.exp2(high - high)")], (), "wrong",
    ),
    "combine: last split counted again": (
        combine, [(" * real.astype(jnp.float32)", "")], (), "wrong",
    ),
    "prefill: mask one too far": PREFILL_MASK,
    "prefill: values not masked": (
        prefill, [("v = without_unseen(v, first + start)", "pass")], (), "not finite",
    ),
    "prefill: too many chunks unmasked": PREFILL_WHOLE,
    "prefill: sums not rescaled": (
        prefill, [("out * spread(shrink, out.shape)", "out")], (), "wrong",
    ),
    "prefill: window one too wide": PREFILL_WINDOW,
    "pipeline: no wait for keys": (
        pipeline,
        [("plgpu.barrier_wait(self.k_barriers.at[self.slot(i)])", "pass")],
        (),
        "race|barrier",
    ),
    "pipeline: no wait for values": (
        pipeline,
        [("plgpu.barrier_wait(self.v_barriers.at[", "(lambda _: None)(self.v_barriers.at[")],
        (),
        "race|barrier",
    ),
    "pipeline: copies into the next stage": (
        pipeline,
        [("blocks, self.slot(i))", "blocks, self.slot(i + 1))")],
        (),
        "barrier",
    ),
    "pipeline: barrier expects too few copies": (
        pipeline, [("num_arrivals=arrivals", "num_arrivals=arrivals - 1")], (),
        "race|barrier",
    ),
    "pipeline: no fence before a stage is filled again": (
        pipeline, [("plgpu.commit_smem()\n            self.copy(later", "self.copy(later")],
        (), "race",
    ),
    "pipeline: table read past its row": (
        pipeline, [("jnp.minimum(token // block_size, max_blocks - 1)", "token // block_size")], (),
        "out of bounds",
    ),
    "pipeline: wrong KV head": WRONG_HEAD,
    "pipeline: wrong layer": (
        pipeline, [("found.append(block + self.first_block)", "found.append(block)")], (),
        "not finite",
    ),
    "work list: rows begin one split late": (
        work, [("(first_splits[rows] + within) * split", "(within + 1) * split")], (), "not finite",
    ),
}  # fmt: skip

HANGS = {
    "barrier expects too many copies": ("num_arrivals=arrivals", "num_arrivals=arrivals + 1"),
}  # fmt: skip

QUICK = ("decode: values not masked", "pipeline: no fence before a stage is filled again")


@pytest.fixture(autouse=True)
def long_splits(monkeypatch):
    """Splits of more chunks than there are stages, so that decoding fills stages again."""
    lengthen(monkeypatch)


def lengthen(monkeypatch):
    def lookup(kernel, *_, **__):
        return {"stages": 2, "split": 384} if "decode" in kernel else {}

    monkeypatch.setattr(config.tuning, "lookup", lookup)


def find(monkeypatch, fault, lens=STEP):
    module, edits, options, finding = fault
    plant(monkeypatch, module, *edits)
    assert outcome(options, lens) in finding.split("|")


@pytest.mark.parametrize("name", QUICK)
def test_found(name, monkeypatch):
    find(monkeypatch, FAULTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in FAULTS if x not in QUICK])
def test_found_too(name, monkeypatch):
    find(monkeypatch, FAULTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), WINDOW])
def test_without_a_fault(options):
    assert outcome(options) == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_hangs(name):
    assert hangs(
        "import pytest, test_pallas_faults as t\n"
        "patch = pytest.MonkeyPatch()\n"
        "t.lengthen(patch)\n"
        f"t.plant(patch, t.pipeline, t.HANGS[{name!r}])\n"
        "print(t.outcome())\n"
    )


@pytest.mark.slow
def test_escapes(monkeypatch):
    kept = "jnp.clip(self.table_ref[self.row, column], 0, self.num_blocks - 1)"
    plant(monkeypatch, pipeline, (kept, "self.table_ref[self.row, column]"))
    assert outcome() == "pass"
