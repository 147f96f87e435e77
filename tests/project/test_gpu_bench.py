"""The scripts for a machine with a GPU, as far as a CPU can try them, and the tuning tables."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import bench_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tune_kernels
from gpu_bench import limits, numerics, rivals, timing
from gpu_bench.cases import Case, decode_case, make_arrays, with_cold_layers

from pallas_kernels import NULL, tuning

ROOT = Path(__file__).parents[2]
SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=16)
OLD_JAX = jax.__version_info__ < (0, 11)
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="jax before 0.11 has not these kernels")


def test_a_case_counts_its_bytes_and_operations():
    case = Case(query_lens=(1, 3), seq_lens=(20, 3), dtype="bfloat16", **SMALL)
    assert (case.num_tokens, case.max_blocks, case.num_blocks) == (4, 2, 5)
    assert case.token_bytes == 2 * 2 * 16 * 2
    assert case.context_bytes == 23 * case.token_bytes
    # The one query sees 20 tokens; the three see 1, 2 and 3.
    assert case.flops == 4 * (20 + 6) * 4 * 16


def test_layers_are_added_until_a_pass_is_longer_than_a_cache():
    case = decode_case(2, 16, **SMALL)
    cold = with_cold_layers(case, least_bytes=10 * case.context_bytes, most_bytes=1 << 30)
    assert cold.num_layers == 10
    tight = with_cold_layers(case, least_bytes=1 << 30, most_bytes=3 * case.pool_bytes)
    assert tight.num_layers == 3


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 1.5}])
def test_the_float64_reference_agrees_with_the_xla_path(options):
    case = Case(query_lens=(1, 7, 1), seq_lens=(20, 9, 1), dtype="float32", num_layers=2, **SMALL)
    check = numerics.check_attention("xla", case, implementation="xla", **options)
    assert check.passed
    assert check.error < 1e-5


def test_a_wrong_result_is_reported(monkeypatch):
    case = Case(query_lens=(1,), seq_lens=(20,), dtype="float32", **SMALL)
    monkeypatch.setattr(numerics, "paged_attention", lambda q, *_, **__: q)
    assert not numerics.check_attention("x", case, implementation="xla").passed
    monkeypatch.setattr(numerics, "write_kv", lambda k_pool, v_pool, *_, **__: (k_pool, v_pool))
    checks = {x.name.split()[0]: x.passed for x in _copies("xla")}
    assert checks["copy_blocks"]
    # Both sides are wrong in the same way; an implementation alone that is wrong is found:
    monkeypatch.setattr(
        numerics,
        "copy_blocks",
        lambda k, v, src, dst, *, implementation: (k, v + (implementation == "xla")),
    )
    assert not {x.name.split()[0]: x.passed for x in _copies("xla")}["copy_blocks"]


def _copies(implementation):
    return list(numerics.check_copies(implementation=implementation, tiny=True))


def test_poisoned_arrays_have_nan_wherever_nothing_may_be_read():
    case = Case(query_lens=(1, 1), seq_lens=(20, 1), dtype="float32", **SMALL)
    arrays = make_arrays(case, poison=True)
    finite = np.isfinite(np.asarray(arrays.k_pool)).all((-1, -2))[0]
    assert finite.sum() == 21
    assert not finite[0].any()
    assert not finite[-1].any()
    assert (np.asarray(arrays.block_tables)[1, 1:] == NULL).all()


def test_the_rivals_say_why_they_cannot_run():
    case = Case(query_lens=(3,), seq_lens=(20,), dtype="float32", **SMALL)
    arrays = make_arrays(case, poison=False)
    for name, why in (("cudnn", "NVIDIA GPU"), ("deprecated op", "decode only")):
        with pytest.raises(rivals.Unavailable, match=why):
            rivals.make_call(name, case, arrays)


@pytest.mark.skipif(OLD_JAX, reason="interpreting Triton kernels is another matter there")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_rivals_compute_the_same():
    case = Case(query_lens=(1, 1), seq_lens=(33, 48), num_layers=2, dtype="float32", **SMALL)
    arrays = make_arrays(case, poison=False)
    wanted = numerics.attention_float64(case, arrays, layer=1)
    for name in ("xla", "deprecated op"):
        call, q, rest = rivals.make_call(name, case, arrays)
        got = jax.jit(call)(q, jnp.int32(1), *rest)
        np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=name)


def test_the_points_begin_with_the_goals_and_cover_the_grid():
    points = bench_kernels.decode_points()
    assert points[:2] == [(32, 2048), (64, 8192)]
    assert len(points) == len(set(points))
    assert {(1, 128), (256, 32768)} <= set(points)


def test_the_share_of_the_limit():
    limit = limits.Limits(copy_bytes_per_s=1e12, product_flops_per_s=1e15)
    case = decode_case(4, 1000, **SMALL)
    seconds = 2 * case.context_bytes / 1e12
    assert bench_kernels.fraction_of_limit("decode", case, seconds, limit) == pytest.approx(0.5)
    prompt = Case(query_lens=(4096,), seq_lens=(4096,))
    seconds = 4 * prompt.flops / 1e15
    assert bench_kernels.fraction_of_limit("prefill", prompt, seconds, limit) == pytest.approx(0.25)


def test_what_there_was_no_time_for_is_listed(capsys):
    limit = limits.Limits(copy_bytes_per_s=1e12, product_flops_per_s=1e15)
    rows, skipped = bench_kernels.run_speed(limit, tiny=True, budget_s=-1.0)
    assert (rows, len(skipped)) == ([], 2)
    assert "left out" in capsys.readouterr().out


def test_a_timed_loop_goes_through_the_layers():
    run = timing.looped(lambda x, layer: x * 10 + layer, num_layers=3, trips=4)
    assert int(run(jnp.int32(0))) == 120  # layers 0, 1, 2, 0
    seconds = timing.seconds_per_call(
        lambda x, layer: x + layer, jnp.zeros(4), num_layers=1, target_s=1e-3
    )
    assert 0 < seconds < 0.1


def test_a_script_without_a_gpu_says_so(monkeypatch, capsys):
    for module in (bench_kernels, tune_kernels):
        monkeypatch.setattr(sys, "argv", ["script"])
        assert module.main() == 2
        assert capsys.readouterr().err


TABLE = {
    "h100": [
        {"shape": {"head_dim": 128, "batch": 8}, "use": {"split": 256}},
        {"shape": {"head_dim": 128, "batch": 64}, "use": {"split": 512}},
        {"shape": {"head_dim": 64, "batch": 64}, "use": {"split": 1024}},
    ]
}


@pytest.mark.parametrize(
    ("chip", "shape", "use"),
    [
        ("h100", {"head_dim": 128, "batch": 64, "more": 1}, {"split": 512}),
        ("h100", {"head_dim": 128, "batch": 48}, {"split": 512}),
        ("h100", {"head_dim": 128, "batch": 10}, {"split": 256}),
        ("h100", {"head_dim": 64, "batch": 100}, {"split": 1024}),
        ("h100", {"head_dim": 128, "batch": 200}, {}),
        ("h100", {"head_dim": 256, "batch": 64}, {}),
        ("h100", {"head_dim": 128}, {}),
        ("a100", {"head_dim": 128, "batch": 64}, {}),
        (None, {"head_dim": 128, "batch": 64}, {}),
    ],
)
def test_the_nearest_entry_of_a_tuning_table_is_used(tmp_path, chip, shape, use):
    (tmp_path / "kernel.json").write_text(json.dumps(TABLE))
    assert tuning.lookup("kernel", chip, shape, folder=tmp_path) == use
    assert tuning.lookup("other", chip, shape, folder=tmp_path) == {}


def test_chips_are_known_by_their_names():
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "cpu")
    assert [tuning.chip_of(name) for name in names] == ["a100", "h100", "h200", "b200", None]
    assert tuning.current_chip() is None  # on a CPU


def test_new_entries_replace_those_of_the_same_shape(tmp_path):
    new = {"shape": {"head_dim": 64, "batch": 64}, "use": {"split": 128}}
    table = tune_kernels.merged(TABLE, "h100", [new])
    assert table["h100"] == [*TABLE["h100"][:2], new]
    table = tune_kernels.merged(table, "b200", [new])
    path = tmp_path / "kernel.json"
    tune_kernels.write_table(path, table)
    assert json.loads(path.read_text()) == table


def test_only_what_beats_the_heuristic_is_kept(monkeypatch):
    candidates = [{"split": 1}, {"split": 2}, {"split": 3}]
    monkeypatch.setitem(tune_kernels.CANDIDATES, "kernel", candidates)

    def tuned(times):
        def timer(use):
            if use and use["split"] == 3:
                raise ValueError("does not fit")
            return times[use["split"] if use else 0]

        return tune_kernels.tune_one("kernel", {"head_dim": 64}, timer, deadline=float("inf"))

    assert tuned([1.0, 0.9, 0.5])["use"] == {"split": 2}
    assert tuned([1.0, 0.99, 1.5]) is None


@needs_mosaic
def test_a_candidate_reaches_the_kernel():
    from pallas_kernels.block_copy import mosaic_gpu

    heuristic = mosaic_gpu.stream_chunk(1 << 15, 2)
    with tune_kernels.using("gather_blocks", {"accesses_per_thread": 1}):
        assert mosaic_gpu.stream_chunk(1 << 15, 2) * 4 == heuristic
    with tune_kernels.using("other", {"accesses_per_thread": 1}):
        assert mosaic_gpu.stream_chunk(1 << 15, 2) == heuristic


def test_the_tables_that_come_with_the_package_can_be_used():
    for path in tuning.TABLES.glob("*.json"):
        candidates = tune_kernels.CANDIDATES[path.stem]
        for chip, entries in json.loads(path.read_text()).items():
            assert chip in dict(tuning.CHIP_NAMES)
            for entry in entries:
                assert entry["use"] in candidates


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("script", ["bench_kernels.py", "tune_kernels.py"])
def test_a_dry_run_on_a_cpu(tmp_path, script):
    extra = ["--json", str(tmp_path / "out.json")] if "bench" in script else ["--budget-s", "5"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), "--dry-run-cpu", *extra],
        capture_output=True,
        text=True,
        timeout=500,
        env=dict(os.environ, JAX_PLATFORMS="cpu"),
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    if "bench" in script:
        report = json.loads((tmp_path / "out.json").read_text())
        assert all(check["passed"] for check in report["numerics"])
        assert {row["kind"] for row in report["speed"]} == {"decode", "prefill"}
        assert all(row["seconds"]["pallas"] > 0 for row in report["speed"])


def test_cases_are_plain_data():
    case = decode_case(2, 16)
    assert dataclasses.replace(case, num_layers=2) != case
    assert hash(case) == hash(decode_case(2, 16))
