"""Saving a running engine and resuming it: nothing of what follows may differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pagedjax.engine import SnapshotError, state_file
from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import drain, make_engine, params

ROOT = Path(__file__).resolve().parents[2]
SHARED = "a shared beginning of prompts, "


def requests():
    """More than there are rows, of all kinds: greedy and drawn, own seeds and the engine's, stop
    strings held back, logprobs, bytes that are no characters."""
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.3},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "stop": ["zz", "never found"], "min_tokens": 4},
        {"temperature": 1.0, "top_k": 30, "skip_special_tokens": False},
    ]
    for i in range(14):
        prompt = SHARED + str(i) if i % 3 else "x" * (5 + 2 * i)
        options = {"ignore_eos": True, "max_tokens": 8 + 3 * i} | kinds[i % len(kinds)]
        yield str(i), prompt, SamplingParams(**options)


def step_for(engine, count, outputs):
    for _ in range(count):
        collect(engine.step(), outputs)


def collect(deltas, outputs):
    for delta in deltas:
        if delta.request_id in outputs:
            outputs[delta.request_id].add(delta)
        else:
            outputs[delta.request_id] = delta


def facts(outputs):
    return {
        request_id: (
            output.outputs[0].token_ids,
            output.outputs[0].text,
            output.outputs[0].finish_reason,
            output.outputs[0].stop_reason,
            output.outputs[0].logprobs,
            output.outputs[0].cumulative_logprob,
            output.num_cached_tokens,
        )
        for request_id, output in outputs.items()
    }


def started():
    engine = make_engine()
    for request in requests():
        engine.add_request(*request)
    return engine


@pytest.fixture(scope="module")
def uninterrupted():
    outputs = {}
    collect(drain(started()), outputs)
    return facts(outputs)


@pytest.mark.parametrize("num_steps", [0, 1, 5, 17, 40])
def test_resumed_in_another_engine(num_steps, tmp_path, uninterrupted):
    first, outputs = started(), {}
    step_for(first, num_steps, outputs)
    collect(first.save(tmp_path / "state"), outputs)
    second = make_engine()
    resumed = second.load(tmp_path / "state")
    unfinished = [r for r, *_ in requests() if r not in outputs or not outputs[r].finished]
    assert [request.request_id for request in resumed] == unfinished
    collect(drain(second), outputs)
    assert facts(outputs) == uninterrupted


def test_the_one_that_saved_goes_on(tmp_path, uninterrupted):
    engine, outputs = started(), {}
    for _ in range(6):
        step_for(engine, 4, outputs)
        collect(engine.save(tmp_path / "state"), outputs)
    collect(drain(engine), outputs)
    assert facts(outputs) == uninterrupted


def test_every_step_is_the_same_step(tmp_path):
    """Not only the tokens: the whole scheduler, bit for bit, after each step that follows."""
    first, outputs = started(), {}
    step_for(first, 20, outputs)
    first.save(tmp_path / "state")
    second = make_engine()
    second.load(tmp_path / "state")
    for _ in range(25):
        first.step()
        second.step()
        ours, theirs = (jax.device_get(e._device.state.scheduler) for e in (first, second))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_prefix_cache_comes_along(tmp_path):
    first = make_engine()
    first.add_request("a", SHARED, SamplingParams(temperature=0, max_tokens=2))
    drain(first)
    first.save(tmp_path / "state")
    second = make_engine()
    assert second.load(tmp_path / "state") == []
    second.add_request("b", SHARED, SamplingParams(temperature=0, max_tokens=2))
    assert drain(second)[-1].num_cached_tokens >= len(SHARED) - 4


def test_aborted_before_and_after(tmp_path):
    first = started()
    outputs = {}
    step_for(first, 6, outputs)
    first.abort("2")
    first.abort("13")
    collect(first.save(tmp_path / "state"), outputs)
    assert outputs["2"].outputs[0].finish_reason == "abort"
    second = make_engine()
    alive = [r.request_id for r in second.load(tmp_path / "state")]
    assert "2" not in alive
    assert "13" not in alive
    second.abort(alive[0])
    second.abort(alive[-1])
    collect(drain(second), outputs)
    assert {r: outputs[r].outputs[0].finish_reason for r in ("2", "13", alive[0], alive[-1])} == (
        dict.fromkeys(("2", "13", alive[0], alive[-1]), "abort")
    )
    assert second.stats().num_free_blocks + second.stats().num_evictable_blocks == 28


def test_in_another_process(tmp_path, uninterrupted):
    engine, outputs = started(), {}
    step_for(engine, 12, outputs)
    collect(engine.save(tmp_path / "state"), outputs)
    program = (
        "import sys, json\n"
        "from tests.shell.tiny import drain, make_engine\n"
        "engine = make_engine()\n"
        "engine.load(sys.argv[1])\n"
        "tokens = {}\n"
        "for delta in drain(engine):\n"
        "    tokens.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)\n"
        "print(json.dumps(tokens))\n"
    )
    # Its weights must be the same to the last bit, so compiled alike (tests/conftest.py).
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    for request_id, rest in json.loads(result.stdout.splitlines()[-1]).items():
        before = outputs[request_id].outputs[0].token_ids if request_id in outputs else []
        assert before + rest == uninterrupted[request_id][0]


def test_a_busy_engine_does_not_load(tmp_path):
    engine = started()
    engine.save(tmp_path / "state")
    with pytest.raises(RuntimeError, match="idle engine"):
        engine.load(tmp_path / "state")


def saved(tmp_path):
    engine = started()
    step_for(engine, 6, {})
    engine.save(tmp_path / "state")
    return tmp_path / "state"


def test_damaged_files_are_refused(tmp_path):
    path = saved(tmp_path)
    data = path.read_bytes()
    engine = make_engine()

    def refused(content, message):
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=message):
            engine.load(path)

    refused(b"", "not a PagedJAX snapshot")
    refused(b"GGUF" + data, "not a PagedJAX snapshot")
    refused(data[:20], "truncated")
    refused(data[: len(data) // 2], "truncated")
    refused(data[:-1], "truncated or damaged")
    refused(data + b"x", "truncated or damaged")
    for place in (40, len(data) // 2, len(data) - 5):
        changed = bytearray(data)
        changed[place] ^= 1
        refused(bytes(changed), "truncated or damaged")
    newer = bytearray(data)
    newer[15] += 1
    refused(bytes(newer), "format version 6; this program reads version 5")
    # Refusing has done nothing to it.
    engine.add_request("a", "x", SamplingParams(temperature=0, max_tokens=2))
    assert drain(engine)[-1].finished
    path.write_bytes(data)
    assert engine.load(path)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (lambda: make_engine(num_blocks=30), "num_blocks=28; this engine has num_blocks=30"),
        (lambda: make_engine(max_model_len=80), "max_model_len"),
        (lambda: make_engine(enable_prefix_caching=False), "enable_prefix_caching"),
        (lambda: make_engine(jax.tree.map(lambda x: x * 2, params())), "another weights"),
    ],
)
def test_another_engine_is_refused(engine, message, tmp_path):
    path = saved(tmp_path)
    with pytest.raises(SnapshotError, match=message):
        engine().load(path)


def test_failing_to_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = saved(tmp_path)
    before = path.read_bytes()
    engine = make_engine()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        engine.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_arrays_are_views_of_the_file(tmp_path):
    arrays = {"odd": np.arange(3, dtype=np.uint8), "none": np.zeros((0, 4), np.float32)}
    arrays["even"] = np.arange(6, dtype=np.int64).reshape(2, 3)
    state_file.write(tmp_path / "file", {"x": [1]}, arrays)
    header, read = state_file.read(tmp_path / "file")
    assert header == {"x": [1]}
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
        assert read[name].flags.aligned
        assert not read[name].flags.owndata


def test_failing_to_write_loses_nothing(tmp_path, monkeypatch, uninterrupted):
    """What the save has read of the steps in flight comes from the next step."""
    engine, outputs = started(), {}
    step_for(engine, 7, outputs)

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            engine.save(tmp_path / "state")
    assert engine.has_work()
    collect(drain(engine), outputs)
    assert facts(outputs) == uninterrupted


def test_extra_comes_back(tmp_path):
    engine = make_engine()
    engine.save(tmp_path / "state", extra={"a": [1, "b"]})
    assert make_engine().resume(tmp_path / "state") == ([], {"a": [1, "b"]})


def test_only_blocks_in_use_are_written(tmp_path):
    engine = make_engine()
    engine.save(tmp_path / "empty")
    engine.add_request("a", "abcdefgh", SamplingParams(temperature=0, max_tokens=2))
    drain(engine)
    engine.save(tmp_path / "used")
    pool = engine._device.state.k_pool
    block_bytes = 2 * pool.nbytes // pool.shape[1]
    grown = (tmp_path / "used").stat().st_size - (tmp_path / "empty").stat().st_size
    # 9 tokens are computed: 2 full blocks of 4 are cached, the partly filled one is free again.
    assert abs(grown - 2 * block_bytes) < block_bytes
