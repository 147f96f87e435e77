"""scripts/compare_traces.py --aot, as far as it goes without the compiler for GPUs."""

import dataclasses
import json

import compare_traces
import jax
import numpy as np
import pytest
from gpu_gate import aot as gate
from trace_compare import aot, workload

SIZES = workload.Sizes(block_size=8, buckets=(4,), num_blocks=None, dtype="float32")


def requests():
    return workload.make_requests(np.arange(200) % 50, 2, block_size=8, seed=0)


def compile_here(chip, function, args, *, donate):
    """For the CPU in place of the chip."""
    assert chip.name
    return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def test_a_worker_counts_the_operations_of_each_step(tmp_path, monkeypatch):
    """All but the chip: shapes from a job that went through JSON, the program, its counts."""
    monkeypatch.setattr(gate, "prepare", lambda folder: None)
    monkeypatch.setattr(gate, "compile_for", compile_here)
    job = {
        "model": "tiny",
        "names": ["xla"],
        "sizes": dataclasses.asdict(SIZES),
        "requests": [dataclasses.asdict(request) for request in requests()],
    }
    found = json.loads(json.dumps(aot.worker(tmp_path, "h100", json.loads(json.dumps(job)))))
    assert list(found) == ["4"]
    assert list(found["4"]) == ["xla"]
    operations = found["4"]["xla"]
    assert operations["jaxpr"]["scatter"] > 0
    assert operations["hlo"]["fusion"] > 0
    assert operations["kernels"] == {}
    # The state is donated: both pools are updated where they lie.
    model = workload.model_config("tiny")
    config = workload.step_config(model, requests(), SIZES, attention="xla")
    slots = config.scheduler.num_blocks * config.scheduler.block_size
    values = model.num_hidden_layers * slots * model.num_key_value_heads * model.head_dim
    assert operations["memory"]["alias"] >= 2 * 2 * values


def test_without_the_compiler_it_is_said_before_anything_runs(monkeypatch, capsys, tmp_path):
    def missing():
        raise gate.MissingWheels("not installed: a-wheel. It needs the extra gpu-check")

    monkeypatch.setattr(gate, "check_wheels", missing)
    monkeypatch.setattr(compare_traces, "require_mosaic_gpu", lambda _: None)
    monkeypatch.setattr(workload, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    if jax.__version_info__ < (0, 11):
        monkeypatch.setattr(compare_traces, "interpret_mode", lambda: pytest.MonkeyPatch.context())
    assert compare_traces.main(["--aot", "h100", "--out", str(tmp_path)]) == 1
    assert "--aot: not installed: a-wheel. It needs the extra" in capsys.readouterr().err


def test_a_worker_that_ends_early_is_named_with_its_last_words(monkeypatch):
    monkeypatch.setattr(aot, "check", lambda: None)
    with pytest.raises(aot.CannotCompile, match=r"(?s)--aot no-such-chip: status 1: .*Error"):
        aot.compile_for_chips(["no-such-chip"], "tiny", requests(), SIZES, ("xla",))
