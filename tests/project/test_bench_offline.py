"""scripts/bench_offline.py: the work is the agreed one, and the figures are what they claim."""

import hashlib
import json
import sys

import bench_offline
import bench_workloads as workloads
import pytest

from pagedjax.config import EngineConfig, parse_args


class FakeRunner:
    """An engine that produces every token asked for and takes no time to speak of."""

    def __init__(self, missing=0):
        self.batches, self.streams, self.missing = [], [], missing

    def stream(self, prompt_ids, num_tokens):
        self.streams.append((prompt_ids, num_tokens))
        return 0.5, 0.5 + num_tokens / 100, num_tokens - self.missing

    def batch(self, requests):
        self.batches.append(list(requests))
        return 2.0, sum(count for _, count in requests) - self.missing


def test_the_work_is_the_agreed_one():
    """Lengths, and a digest of every token id of the first timed repeat."""
    prefix, shared = workloads.w3(0)
    work = [workloads.w1(0), workloads.w2(0), prefix, shared, workloads.w3(0, warm=True)]
    work.append(workloads.w4(0))
    digest = hashlib.sha256(json.dumps(work).encode()).hexdigest()
    assert digest == "cffdf736c74dcf0de24b11baa8b43999c6a2f6ecf84b7433eecbc30af075ffd2"
    requests = workloads.w2(0)
    assert len(requests) == 64
    assert sum(len(ids) for ids, _ in requests) == 9_918
    assert sum(count for _, count in requests) == 10_016
    assert len(prefix) == 512
    assert all(ids[:512] == prefix and len(ids) == 544 and n == 32 for ids, n in shared)


def test_repeats_have_the_same_lengths_and_other_tokens():
    first, second = workloads.w2(0), workloads.w2(1)
    assert [(len(ids), n) for ids, n in first] == [(len(ids), n) for ids, n in second]
    assert all(a != b for (a, _), (b, _) in zip(first, second, strict=True))
    assert workloads.w3(0)[0] != workloads.w3(0, warm=True)[0]


def test_figures_follow_from_the_times():
    runner = FakeRunner()
    results = workloads.run_all(runner, repeats=2, log=lambda line: None)
    assert list(results) == list(workloads.WORKLOADS)
    assert results["W1"]["ttft_ms"] == 500
    assert results["W1"]["decode_tps"] == pytest.approx(127 / 1.28, abs=1e-3)
    assert results["W2"]["out_tps"] == 10_016 / 2
    assert results["W2"]["total_tps"] == (9_918 + 10_016) / 2
    assert results["W3"]["out_tps"] == 32 * 32 / 2
    assert results["W4"]["prefill_tps"] == pytest.approx(1024 / 0.51, abs=1e-3)
    assert all(len(result["rows"]) == 2 for result in results.values())
    # Warm-up and two repeats each; the warm prefix is sent alone before each W3w.
    assert len(runner.streams) == 2 * 3
    assert [len(batch) for batch in runner.batches] == [64] * 3 + [32] * 3 + [1, 32] * 3
    assert runner.batches[-2] == [(runner.batches[-1][0][0][:512], 1)]


def test_missing_output_tokens_are_an_error():
    with pytest.raises(RuntimeError, match="W2: 10015 output tokens instead of 10016"):
        workloads.run_all(FakeRunner(missing=1), ["W2"], 1, log=lambda line: None)


def test_cpu_time_counts_this_process_and_the_machine():
    own, machine = workloads.cpu_seconds()
    while workloads.cpu_seconds()[0] < own + 0.2:
        pass
    own_after, machine_after = workloads.cpu_seconds()
    assert machine_after - machine >= 0.9 * (own_after - own)


def run(peer, **figures):
    results = {
        "W1": {"decode_tps": figures["tps"], "ttft_ms": figures["ms"], "others": 0.25},
    }
    return {"peer": peer, "dtype": "float32", "results": results}


def test_the_table_gives_ratios_in_which_more_is_better():
    lines = workloads.table([run("ours", tps=30.0, ms=100.0), run("peer", tps=20.0, ms=50.0)])
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines()]
    assert rows[2][:5] == ["ours", "float32", "30.0", "100.0", "-"]
    assert rows[2][-1] == "0.25"
    assert rows[4][:5] == ["ours / peer", "float32", "1.50x", "0.50x", "-"]


def test_the_command_line_of_a_runner_is_understood():
    argv = "--dtype float32 --which W1,W4 --reps 2 --threads 1 --out x.json --no-warmup".split()
    args = parse_args(bench_offline.Args, [*argv, "--max-num-batched-tokens", "64"])
    assert (args.runner, args.reps, args.threads, args.warmup) == ("pagedjax", 2, 1, False)
    assert args.engine == EngineConfig(
        dtype="float32", max_num_batched_tokens=64, max_num_seqs=32, max_model_len=2048
    )


@pytest.mark.parametrize("argv", [["--which", "W1,W9"], ["--reps", "0"], ["--engine", "other"]])
def test_a_bad_command_line_is_refused(argv, capsys):
    with pytest.raises(SystemExit):
        parse_args(bench_offline.Args, argv)
    assert argv[1] in capsys.readouterr().err


def test_a_run_writes_one_object_and_shows_ratios_to_earlier_ones(tmp_path, monkeypatch, capsys):
    runner = FakeRunner()
    runner.version = "fake 1"
    monkeypatch.setattr(bench_offline, "build_runner", lambda *args: runner)
    monkeypatch.setattr(bench_offline, "limit_cores", lambda threads: None)
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps([run("peer", tps=9.0, ms=250.0)]))
    out = tmp_path / "out.json"
    args = bench_offline.Args(
        runner="vllm", out=out, beside=(earlier,), reps=1, engine=EngineConfig(dtype="float32")
    )
    bench_offline.main(args)
    written = json.loads(out.read_text())
    assert {k: v for k, v in written.items() if k != "results"} == {
        "peer": "vllm",
        "version": "fake 1",
        "dtype": "float32",
        "threads": 2,
    }
    assert set(written["results"]) == set(workloads.WORKLOADS)
    assert "| vllm / peer | float32 | 11.02x | 0.50x |" in capsys.readouterr().out
    bench_offline.main(bench_offline.Args(runner="vllm", out=out, reps=1, which="W1"))
    assert [entry["dtype"] for entry in json.loads(out.read_text())] == ["float32", "bfloat16"]


@pytest.mark.parametrize("peer", ["vllm", "transformers"])
def test_a_peer_that_is_not_installed_is_named(peer, monkeypatch):
    monkeypatch.setattr(bench_offline, "limit_cores", lambda threads: None)
    for name in ("vllm", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(SystemExit, match=f"{peer}.* is not installed"):
        bench_offline.main(bench_offline.Args(runner=peer, which="W1"))
