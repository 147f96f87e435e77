"""Faults planted in the prefill for Hopper must be found, as in ``test_pallas_faults``.

Escapes:

- a missing fence between the zeros that replace stale values and the products that read them: the
  products are modelled by ordinary reads, which need none.
- registers of an operand or an accumulator that are touched while a product is under way: the
  model has values, not registers. The assembler makes products wait then, and the compile gate
  fails on that (``test_gpu_gate``), as on spills and too much shared memory.
"""

import pytest
from pallas_cases import needs_early_exit, wgmma_table
from planted import hangs
from test_pallas_faults import (
    PREFILL_MASK,
    PREFILL_WHOLE,
    PREFILL_WINDOW,
    WINDOW,
    WRONG_HEAD,
    find,
    outcome,
    plant,
)

from pallas_kernels.paged_attention.mosaic_gpu import config, pipeline, prefill_wgmma

pytestmark = [needs_early_exit, pytest.mark.timeout(300)]

# A chunk of a prompt over more chunks than stages, and a prompt, of two KV heads each: four pieces
# of one thread block.
LENS = ([22, 0, 24], [270, 0, 24])

READ = "product = logits.read(in_flight=0 if masked else 1)\n"
ADD = "out.add(weight, shared.v_stages.at[stream.slot(i - 1)])\n"
KEYS_USED = "            keys_used(i)\n            new"
VALUES_USED = "        plgpu.barrier_arrive(shared.v_free.at[stream.slot(i - 1)])\n"
ARRIVED = "        plgpu.barrier_arrive(shared.cleaned)\n"
CLEANED = ARRIVED + "        plgpu.barrier_wait(shared.cleaned)\n"
CLEAN = "_clean(piece, shared, order."


FAULTS = {
    # name: (module, edits, options, what finds it)
    "mask one too far": PREFILL_MASK,
    "window one too wide": PREFILL_WINDOW,
    "logits not masked": (
        prefill_wgmma, [("logits = jnp.where(visible(i), logits, HIDDEN)", "pass")], (),
        "not finite|wrong",
    ),
    "too many chunks unmasked": PREFILL_WHOLE,
    "chunks in a wrong order": (
        prefill_wgmma, [("chunk - self.num_chunks, chunk", "chunk - self.num_chunks + 1, chunk")],
        (), "not finite|wrong",
    ),
    "values not cleaned": (
        prefill_wgmma, [(CLEAN, CLEAN.replace("_clean", "(lambda *_: None)"))], (), "not finite",
    ),
    "cleaned, but nobody waits": (prefill_wgmma, [(CLEANED, "")], (), "race"),
    "sums not rescaled": (
        prefill_wgmma, [("return out * spread(shrink, out_shape)", "return out")], (), "wrong",
    ),
    "weights not rescaled": (
        prefill_wgmma, [("total * shrink +", "total +")], (), "wrong",
    ),
    "both warpgroups take the same queries": (
        prefill_wgmma, [("queries.at[pl.ds(group *", "queries.at[pl.ds(0 *")], (), "wrong",
    ),
    "no wait for queries": (
        prefill_wgmma, [("plgpu.barrier_wait(shared.q_barrier)", "pass")], (), "race|barrier",
    ),
    "no wait for keys": (
        prefill_wgmma, [("stream.wait_keys(i)", "pass")], (), "race|barrier",
    ),
    "no wait for values": (
        prefill_wgmma, [("stream.wait_values(i)", "pass")], (), "race|barrier",
    ),
    "no wait for the product with keys": (
        prefill_wgmma, [(READ, "product = logits.read(in_flight=2)\n")], (), "under way",
    ),
    "keys given back while they are read": (
        prefill_wgmma,
        [(KEYS_USED, "            new"), (READ, f"keys_used(i)\n            {READ}")],
        (),
        "race",
    ),
    "values given back while they are read": (
        prefill_wgmma,
        [
            (VALUES_USED, ""),
            (ADD, ADD + "            plgpu.barrier_arrive(shared.v_free.at[stream.slot(i - 1)])\n"),
        ],
        (),
        "race",
    ),
    "queries given back while they are read": (
        prefill_wgmma, [("@pl.when(i == chunks - 1)", "@pl.when(i == 0)")], (), "race|barrier",
    ),
    "copies into stages of keys in use": (
        prefill_wgmma, [("plgpu.barrier_wait(shared.k_free.at[slot])", "pass")], (), "race|barrier",
    ),
    "copies into stages of values in use": (
        prefill_wgmma, [("plgpu.barrier_wait(shared.v_free.at[slot])", "pass")], (), "race|barrier",
    ),
    "copies over queries in use": (
        prefill_wgmma, [("plgpu.barrier_wait(shared.q_free)", "pass")], (), "race|barrier",
    ),
    "one warpgroup gives stages back for both": (
        prefill_wgmma,
        [("plgpu.Barrier(num_arrivals=groups, num_b", "plgpu.Barrier(num_arrivals=1, num_b")],
        (),
        "race|barrier",
    ),
    "wrong KV head": WRONG_HEAD,
    "table read past its row": (
        pipeline,
        [("jnp.minimum(token // block_size, max_blocks - 1)", "token // block_size + max_blocks")],
        (),
        "out of bounds",
    ),
}  # fmt: skip

QUICK = "keys given back while they are read"


@pytest.fixture(autouse=True)
def wgmma(monkeypatch):
    use_wgmma(monkeypatch)


def use_wgmma(monkeypatch):
    monkeypatch.setattr(config.tuning, "lookup", wgmma_table)


def test_found(monkeypatch):
    find(monkeypatch, FAULTS[QUICK], LENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in FAULTS if x != QUICK])
def test_found_too(name, monkeypatch):
    find(monkeypatch, FAULTS[name], LENS)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), WINDOW])
def test_without_a_fault(options):
    assert outcome(options, LENS) == "pass"


@pytest.mark.slow
def test_more_arrivals_than_warpgroups_hang():
    assert hangs(
        "import pytest, test_pallas_wgmma_faults as t\n"
        "patch = pytest.MonkeyPatch()\n"
        "t.use_wgmma(patch)\n"
        "edit = ('num_arrivals=groups, num_b', 'num_arrivals=groups + 1, num_b')\n"
        "t.plant(patch, t.prefill_wgmma, edit)\n"
        "print(t.outcome((), t.LENS))\n"
    )


@pytest.mark.slow
def test_escapes(monkeypatch):
    plant(monkeypatch, prefill_wgmma, ("        plgpu.commit_smem()\n" + ARRIVED, ARRIVED))
    assert outcome((), LENS) == "pass"
