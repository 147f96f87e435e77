"""Saving and resuming what is more than one row, or not on the device: several outputs, the best of
them, beam searches, requests that are swapped out."""

import random
import struct

import jax
import numpy as np
import pytest

from pagedjax import BeamSearchParams, SamplingParams
from pagedjax.engine import state_file
from tests.shell.test_snapshot import collect
from tests.shell.tiny import PRESSED, drain, make_engine

SIZES = PRESSED | {"check_invariants": True}
ENDS = (27, 155)
RANDOM = {"temperature": 1.0, "ignore_eos": True}


def engine(**changes):
    one = make_engine(**SIZES | changes)
    # With likely ends, so that searches have complete outputs before they are over.
    for part in (one._intake, one._snapshots):
        part._eos_token_ids = (*one.eos_token_ids, *ENDS)
    return one


def requests():
    """More samples than there are rows, in a pool that is too small for them."""
    yield (
        "several",
        "seventeen tokens!",
        SamplingParams(n=4, seed=1, stop=["e", "o", "z"], logprobs=2, max_tokens=24, **RANDOM),
    )
    yield "best", "another prompt", SamplingParams(n=2, best_of=4, seed=2, max_tokens=14, **RANDOM)
    yield "search", "find me", BeamSearchParams(beam_width=3, max_tokens=12)
    yield "long", "x" * 9, SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
    yield "drawn", "no seed of its own", SamplingParams(n=3, max_tokens=20, **RANDOM)
    yield "second", "find me", BeamSearchParams(beam_width=2, max_tokens=9, length_penalty=0.5)
    yield "last", "y" * 20, SamplingParams(n=5, max_tokens=9, stop="q", **RANDOM)


def started():
    first = engine()
    for request in requests():
        first.add_request(*request)
    return first


def facts(outputs):
    return {
        request_id: (whole.outputs, whole.finished, whole.num_cached_tokens, whole.error)
        for request_id, whole in outputs.items()
    }


@pytest.fixture(scope="module")
def uninterrupted():
    one, outputs = started(), {}
    collect(drain(one), outputs)
    assert one.stats().swaps_out > 0
    return facts(outputs)


def seen(path):
    """What a file holds of the things that are hard to save."""
    header, arrays = state_file.read(path)
    found = set()
    queued = {tuple(place) for place in header["queue"]}
    for i, request in enumerate(header["requests"]):
        samples = request["samples"]
        if request["search"] is not None:
            beams = request["search"]["beams"]
            found.add("search queued" if not beams else "search" if len(beams) > 1 else "prompt")
            if request["search"]["completed"]:
                found.add("complete output")
        elif len(samples) > 1:
            if any(sample["finish_reason"] for sample in samples):
                found.add("ended sample")
            if 0 < sum((i, k) in queued for k in range(len(samples))) < len(samples):
                found.add("group in part")
    if header["held"]:
        found.add("held")
    if len(arrays["host_blocks"]):
        found.add("swapped")
    return found


@pytest.mark.parametrize("every", [7, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_again_and_again(every, tmp_path, uninterrupted):
    """Each engine takes a few steps and hands over to the next one."""
    path, one, outputs, found = tmp_path / "state", started(), {}, set()
    while one.has_work():
        for _ in range(every):
            collect(one.step(), outputs)
        collect(one.save(path), outputs)
        found |= seen(path)
        one = engine()
        resumed = [request.request_id for request in one.load(path)]
        ended = {r for r in outputs if outputs[r].finished}
        assert resumed == [r for r, *_ in requests() if r not in ended]
    assert facts(outputs) == uninterrupted
    assert one.stats().num_free_host_blocks == 40
    assert found >= {
        *("search", "search queued", "complete output", "ended sample", "group in part"),
        *("held", "swapped"),
    }


def test_a_new_group_is_no_old_one(tmp_path):
    first = started()
    first.step()
    first.save(tmp_path / "state")
    second = engine()
    groups = {request.group for request in second.load(tmp_path / "state")}
    new = second.add_request("new", "seventeen tokens!", SamplingParams(n=2))
    assert new.group not in groups
    with pytest.raises(ValueError, match="already in use"):
        second.add_request("several", "x", SamplingParams())
    request_ids = [r for r, *_ in requests()]
    for request_id in [*request_ids, "new"]:
        second.abort(request_id)
    outputs = {}
    collect(drain(second), outputs)
    for _, _, sampling in requests():
        reasons = [c.finish_reason for c in outputs[request_ids.pop(0)].outputs]
        assert reasons == ["abort"] * sampling.n


def test_saving_compiles_nothing(tmp_path):
    one = started()
    one.warm_up_snapshots()
    device = one.device
    before = device._gather._cache_size(), device._gather_host._cache_size()
    for _ in range(60):
        one.step()
        if one.stats().num_free_host_blocks < 40:
            break
    one.save(tmp_path / "state")
    assert "swapped" in seen(tmp_path / "state")
    assert (device._gather._cache_size(), device._gather_host._cache_size()) == before


def test_files_of_before_are_refused(tmp_path):
    path = tmp_path / "state"
    engine().save(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 15, 4)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="format version 4; this program reads version 5"):
        engine().load(path)


def assert_equal(one, other):
    """The schedulers, bit for bit, and the hosts' books of them."""
    ours, theirs = (jax.device_get(e.device.state.scheduler) for e in (one, other))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    for name, array in vars(one._rows).items():
        # Of its own steps; of prompts, for rows that have a request only.
        if isinstance(array, np.ndarray) and name not in ("_first_step", "_num_prompt_blocks"):
            np.testing.assert_array_equal(array, getattr(other._rows, name), err_msg=name)
    for name in ("_num_arrived", "_num_available", "_num_preemptions", "_blocked"):
        assert getattr(one._rows, name) == getattr(other._rows, name), name


def a_request(rng):
    """Anything: one output, several, the best of some, a search."""
    prompt = rng.choice(["", "a shared beginning, "]) + "xyz"[: rng.randint(1, 3)] * rng.randint(
        1, 4
    )
    kind, length = rng.randrange(5), rng.randint(1, 22)
    if kind == 0:
        width = rng.randint(1, 4)
        return prompt, BeamSearchParams(beam_width=width, max_tokens=min(length, 10))
    if kind == 1:
        n = rng.randint(1, 3)
        several = {"n": n, "best_of": n + rng.randint(1, 2)}
    else:
        several = {"n": rng.choice([1, 1, 2, 4])}
    stop = rng.choice([(), ("e",), ("a", "s")])
    logprobs = rng.choice([None, 0, 2])
    return prompt, SamplingParams(
        temperature=rng.choice([0, 1.0]), ignore_eos=rng.random() < 0.8, max_tokens=length,
        stop=stop, logprobs=logprobs, **several,
    )  # fmt: skip


@pytest.mark.parametrize("num_steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_whatever_happens(num_steps, tmp_path):
    """Two engines get the same requests and aborts. One of them is saved now and then, and another
    takes its place: in every step both give the same outputs."""
    rng, path = random.Random(num_steps), tmp_path / "state"
    steady, other = engine(), engine()
    live, count, found = set(), 0, set()

    def both(call):
        mine, theirs = call(steady), call(other)
        assert mine == theirs
        live.difference_update(delta.request_id for delta in mine if delta.finished)

    swapped_aborts = 0
    for _ in range(num_steps):
        if len(live) < 8 and rng.random() < 0.3:
            request_id, count = str(count), count + 1
            prompt, sampling = a_request(rng)
            for one in (steady, other):
                one.add_request(request_id, prompt, sampling)
            live.add(request_id)
        book = steady._rows
        out = {request.request_id for row, request in book.requests() if book._swapped[row]}
        if live and rng.random() < (0.15 if out else 0.02):
            swapped_aborts += bool(out)
            request_id = rng.choice(sorted(out or live))
            for one in (steady, other):
                one.abort(request_id)
        both(lambda one: one.step())
        if rng.random() < 0.05:
            both(lambda one: one.settle() if one is steady else one.save(path))
            found |= seen(path)
            other = engine()
            other.load(path)
            assert_equal(steady, other)
    while live:
        both(lambda one: one.step())
    assert {"search", "ended sample", "held", "swapped"} <= found
    assert swapped_aborts > 0
