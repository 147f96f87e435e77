"""scripts/compare_traces.py: its parts on cases worked by hand, the whole in the interpreter."""

import gzip
import json
import math

import compare_traces
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trace_compare import counting, lockstep, metrics, plot, report, workload

from pallas_kernels.paged_attention import api

OLD_JAX = jax.__version_info__ < (0, 11)


# Differences


def test_a_difference_is_the_largest_and_its_scale_is_the_first_arrays():
    found = metrics.difference(np.array([1.0, -4.0, 2.0]), np.array([1.5, -4.0, 1.75]))
    assert (found.max_abs, found.scale, found.relative) == (0.5, 4.0, 0.125)
    assert found.not_finite == 0


def test_nan_on_one_side_is_infinitely_far_and_on_both_is_counted():
    nan, inf = float("nan"), float("inf")
    one = metrics.difference(np.array([1.0, nan]), np.array([1.0, 2.0]))
    assert (one.max_abs, one.relative, one.not_finite) == (inf, inf, 1)
    both = metrics.difference(np.array([nan, inf, 1.0]), np.array([nan, inf, 1.0]))
    assert (both.max_abs, both.scale, both.not_finite) == (0.0, 1.0, 2)
    assert metrics.difference(np.array([inf]), np.array([-inf])).max_abs == inf
    assert metrics.difference(np.zeros(2), np.array([0.0, 1.0])).relative == inf
    assert metrics.difference(np.zeros(0), np.zeros(0)).relative == 0
    with pytest.raises(ValueError, match="differ"):
        metrics.difference(np.zeros(2), np.zeros(3))


def test_tokens_that_differ_are_near_ties_only_within_what_the_logits_moved():
    first = np.array([[1.0, 1.001, 0.0], [3.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    second = first + np.array([[0.001, 0, 0], [0.25, 0, 0], [0, 0, 0]])
    tokens = np.array([1, 0, 2]), np.array([0, 1, 2])
    rows, sampled = np.array([7, 3, 0]), np.zeros(3, bool)
    tie, wrong = metrics.token_differences(rows, tokens, (first, second), sampled)
    assert (tie.row, tie.first, tie.second) == (7, 1, 0)
    assert tie.margin == pytest.approx(0.001)
    assert tie.near_tie
    assert (wrong.row, wrong.margin, wrong.near_tie) == (3, 2.0, False)
    drawn, _ = metrics.token_differences(rows, tokens, (first, second), ~sampled)
    assert drawn.sampled
    assert not drawn.near_tie


def test_attention_work_of_a_step_by_hand():
    """A decode row of 5 tokens, and two of three tokens of a prompt; 2 layers, 4 heads over 2."""
    sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    work = metrics.attention_work([1, 2], [5, 3], **sizes)
    pairs = 5 + (2 + 3)
    assert work["flops"] == 2 * pairs * 2 * 2 * 4 * 8
    kv_bytes, q_bytes = 2 * 2 * 8 * 2, 4 * 8 * 2
    # Context read, queries in and outputs out, new keys and values read and written.
    assert work["bytes"] == 2 * ((5 + 3) * kv_bytes + 2 * 3 * q_bytes + 2 * 3 * kv_bytes)


# Operations


def test_primitives_are_counted_through_loops_branches_and_calls():
    def function(x, y):
        x = jax.lax.fori_loop(0, 3, lambda _, z: jnp.sin(z) * 2, x)
        x = jax.lax.cond(x[0, 0] > 0, jnp.tanh, lambda z: jnp.cos(jnp.cos(z)), x)
        return jax.jit(lambda a, b: a @ b)(x, y)

    outside, kernels, inside = counting.count_jaxpr(
        jax.make_jaxpr(function)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    )
    counts = {name: outside[name] for name in ("sin", "mul", "tanh", "cos", "dot_general", "cond")}
    assert counts == {"sin": 1, "mul": 1, "tanh": 1, "cos": 2, "dot_general": 1, "cond": 1}
    assert not kernels
    assert not inside


@pytest.mark.skipif(OLD_JAX, reason="jax before 0.11 has not these kernels")
def test_what_is_inside_a_kernel_is_counted_apart():
    from pallas_kernels import init_pool, write_kv
    from pallas_kernels.interpret import interpret_mode

    pools = init_pool(1, 4, 8, 2, 64)
    new = jnp.ones((4, 2, 64)), jnp.ones((4, 2, 64)), jnp.arange(4)
    with interpret_mode():
        jaxpr = jax.make_jaxpr(
            lambda *a: jnp.sin(write_kv(*a, layer=0, implementation="pallas")[0])
        )(*pools, *new)
    outside, kernels, inside = counting.count_jaxpr(jaxpr)
    assert kernels == {"write_kv": 1}
    assert outside["sin"] == 1
    assert sum(inside.values()) > 5
    assert "sin" not in inside


def test_hlo_opcodes_are_counted_past_tuples_and_layouts():
    text = """
HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %sine.1 = f32[4]{0} sine(f32[4]{0} %p), metadata={op_name="jit(f)/sin" source_line=3}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0:T(256)} parameter(0)
  %f = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
  %call = (f32[4]{0}, /*index=1*/s32[]) custom-call(%f), custom_call_target="mosaic_gpu_v2"
  %one = f32[4]{0} get-tuple-element(%call), index=0
  %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%b
  ROOT copy-start.7 = f32[4]{0} copy-start(%one)
}
"""
    opcodes, targets = counting.count_hlo(text)
    assert opcodes == {"sine": 1, "fusion": 1, "custom-call": 1, "while": 1, "copy-start": 1}
    assert targets == {"mosaic_gpu_v2": 1}


def test_cost_and_memory_of_a_product():
    args = jnp.ones((8, 16)), jnp.ones((16, 4))
    traced = jax.jit(lambda a, b: jnp.tanh(a @ b)).trace(*args)
    found = counting.count_program(traced.jaxpr, traced.lower().compile())
    assert found.jaxpr["dot_general"] == found.jaxpr["tanh"] == 1
    assert found.cost["flops"] >= 2 * 8 * 16 * 4
    assert found.memory["argument"] == 4 * (8 * 16 + 16 * 4)
    assert found.memory["output"] == 4 * 8 * 4
    assert sum(found.hlo.values()) >= 1


# Workload


def test_requests_share_a_beginning_that_ends_inside_a_block():
    text = np.arange(1000)
    requests = workload.make_requests(text, 6, block_size=8, seed=1)
    assert requests == workload.make_requests(text, 6, block_size=8, seed=1)
    prompts = [r.token_ids for r in requests]
    shared = prompts[0][:20]
    assert [p[:20] == shared for p in prompts] == [True, True, True, False, True, True]
    assert all(p[20] != prompts[0][20] for p in prompts[1:] if p[:20] == shared)
    assert [r.arrival for r in requests] == [0, 0, 2, 3, 4, 5]
    sizes = workload.Sizes(block_size=8, buckets=(4, 16), num_blocks=None, dtype="float32")
    config = workload.scheduler_config(requests, sizes)
    longest = max(len(r.token_ids) + r.max_tokens for r in requests)
    assert config.max_model_len >= longest
    assert config.num_blocks >= config.max_blocks_per_seq
    assert config.max_num_batched_tokens == 16


# Report


def small(relative, *, not_finite=0):
    return dict(max_abs=relative * 2, scale=2.0, not_finite=not_finite, relative=relative)


def made_step(step, layers, *, tokens=(), logits=1e-6, **changes):
    values = dict(
        *(),
        step=step,
        bucket=16,
        num_rows=2,
        decode_tokens=1,
        prefill_tokens=7,
        num_copies=0,
        num_preemptions=0,
        num_hit_tokens=0,
        attention=[small(x) for x in layers],
        logits=small(logits),
        pool=small(0.0),
        padding=0.0,
        num_samples=2,
        tokens=list(tokens),
        work={"flops": 2000, "bytes": 4000},
    )
    return values | changes


def made_report(steps, tolerance=1e-4):
    operations = dict(
        jaxpr={"add": 30, "dot_general": 4},
        kernels={},
        in_kernels={},
        hlo={"fusion": 12},
        custom_calls={},
        cost={"flops": 1234.0, "bytes": 99.0},
        memory={"argument": 10, "output": 5, "alias": 4, "temp": 1},
    )
    kernels = operations | {
        "kernels": {"paged_attention_decode": 1},
        "in_kernels": {"wgmma": 3},
        "custom_calls": {"mosaic_gpu_v2": 1},
        "cost": {"flops": -1.0},
    }
    return {
        "run": {
            "command": "python scripts/compare_traces.py",
            "implementations": ["xla", "pallas"],
            "model": "tiny",
            "dtype": "float32",
            "requests": 2,
            "seed": 0,
            "tolerance": tolerance,
            "interpreted": True,
            "device": "cpu",
            "versions": {"jax": "0.12"},
            "sizes": {"block_size": 8},
            "profiled": "2 steps",
        },
        "features": report.features(steps),
        "findings": report.findings(steps, tolerance),
        "steps": steps,
        "free_run": dict(steps=(2, 2), num_equal=1, num_requests=2, first_step=1, first_row=0),
        "operations": {"16": {"xla": operations, "pallas": kernels}},
        "aot": {"h100": {"16": {"xla": operations, "pallas": kernels}}},
        "profiles": {
            "xla": {"path": "trace_xla/t.json.gz", "events": 3, "longest": [("a|b", 2, 1.5)]}
        },
    }


TIE = dict(row=1, first=5, second=6, margin=1e-7, logits_apart=1e-6, sampled=False, near_tie=True)


def test_agreement_is_reported_with_its_near_ties():
    found = made_report([made_step(0, [1e-6, 2e-6], tokens=[TIE]), made_step(1, [0.0, 1e-7])])
    assert found["findings"] == []
    text = report.render(found)
    assert "**They agree**: in 2 steps" in text
    assert "3 of 4 tokens are equal (1 of the others near ties, 0 sampled)" in text
    assert "| 0 | 16 | 2 | 7 | 1 |  |  | 4.0e-06 (1) | 2.0e-06 |" in text
    assert "row 1 got 5 and 6, 1e-07 apart where the logits moved by 1e-06 (near tie)" in text
    assert "| 1 | 4.0e-06 | 2.0e-06 | 0 |" in text  # by layer
    assert "**not in the workload**: " in text
    assert "blocks copied on write" in text.split("**not in the workload**")[1].splitlines()[0]
    assert "first differ in step 1, row 0; 1 of 2 requests" in text
    assert "| FLOPs, by XLA | 1,234 | -1 |" in text
    assert "| bytes accessed, by XLA | 99 | - |" in text
    assert "| attention work, FLOPs | 2,000 | 2,000 |" in text
    assert "| kernel paged_attention_decode | 0 | 1 |" in text
    assert "## Compiled for h100, not run" in text
    assert "| `a/b` | 2 | 1.50 |" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(layers=[1e-6, 2e-3]), "step 3: attention of layer 1 is apart by 0.002"),
        (dict(layers=[float("inf"), 0.0]), "step 3: attention of layer 0 is apart by inf"),
        (dict(layers=[float("nan"), 0.0]), "step 3: attention of layer 0 is apart by nan"),
        (dict(logits=1e-3), "step 3: the logits are apart by 0.001"),
        (dict(pool=small(1e-3)), "step 3: keys and values in the pool are apart by 0.001"),
        (dict(pool=small(0.0, not_finite=2)), "step 3: keys and values in the pool hold 2 NaN"),
        (dict(padding=0.5), "step 3: attention of padding tokens is 0.5, not 0"),
        (
            dict(tokens=[TIE | {"near_tie": False, "margin": 2.0}]),
            "step 3: row 1 got 5 and 6, 2 apart where the logits moved by 1e-06 (no near tie)",
        ),
    ],
)
def test_a_disagreement_names_its_step_and_place(changes, words):
    layers = changes.pop("layers", [0.0, 1e-6])
    found = made_report([made_step(2, [0.0, 0.0]), made_step(3, layers, **changes)])
    assert found["findings"][0].startswith(words)
    text = report.render(found)
    assert f"**They do not agree**: 1 findings. The first: {words}" in text


def test_a_sampled_token_is_left_to_the_judgement_of_its_logits():
    drawn = TIE | {"near_tie": False, "sampled": True, "margin": 2.0}
    assert report.findings([made_step(0, [0.0], tokens=[drawn])], 1e-4) == []
    assert report.findings([made_step(0, [0.0], tokens=[drawn], logits=1.0)], 1e-4)


def test_many_steps_are_cut_to_the_worst():
    steps = [made_step(i, [1e-6 if i != 70 else 9e-5]) for i in range(100)]
    text = report.render(made_report(steps))
    assert "The 60 of 100 steps with the largest differences:" in text
    assert "| 70 | 16 |" in text


@pytest.mark.parametrize("layers", [[0.0, 0.0], [1e-6, float("inf")], [1e-5, 1e-2]])
def test_a_plot_is_drawn_of_zeros_and_of_infinities(tmp_path, layers):
    steps = [made_step(i, layers, tokens=[TIE] * (i == 1)) for i in range(3)]
    written = plot.draw(made_report(steps), tmp_path / "differences")
    assert written[0].read_bytes().startswith(b"\x89PNG")
    first = written[1].read_text()
    assert "<svg" in first
    plot.draw(made_report(steps), tmp_path / "differences")
    assert written[1].read_text() == first


def test_json_holds_no_number_that_json_has_not():
    text = json.dumps(compare_traces.plain({"a": [math.inf, (1.5, math.nan)]}), allow_nan=False)
    assert json.loads(text) == {"a": ["inf", [1.5, "nan"]]}


def test_an_older_jax_is_refused_with_the_version_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert compare_traces.main(["--steps", "1"]) == 1
    assert "needs jax 0.11 or later" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--buckets", "0", "16"], "--buckets must be at least 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit):
        compare_traces.parse_args(arguments)
    assert words in capsys.readouterr().err


# The whole


def plant(monkeypatch, name, layer):
    """Attention of one layer becomes a hundredth too large."""
    right = api._IMPLEMENTATIONS[name]

    def wrong(*args, layer, faulty=layer, **options):
        out = right(*args, layer=layer, **options)
        return out * jnp.where(jnp.asarray(layer) == faulty, 1.01, 1.0).astype(out.dtype)

    monkeypatch.setitem(api._IMPLEMENTATIONS, name, wrong)


def test_lockstep_finds_a_fault_of_one_layer_and_nothing_where_there_is_none(monkeypatch):
    """XLA beside the reference, which needs no interpreter."""
    model = workload.load("tiny", dtype="float32", seed=0, text=None)
    requests = workload.make_requests(model.text, 4, block_size=8, seed=0)
    sizes = workload.Sizes(block_size=8, buckets=(16,), num_blocks=None, dtype="float32")
    configs = {
        name: workload.step_config(model.config, requests, sizes, attention=name)
        for name in ("xla", "reference")
    }
    core = lockstep.Core(model.params, configs, buckets=(16,))

    def run(max_steps):
        steps = lockstep.lockstep(core, requests, kv_dtype=jnp.float32, max_steps=max_steps)
        return [report.step_data(record) for record, _ in steps]

    records = run(6)
    assert len(records) == 6
    assert report.findings(records, 1e-4) == []
    assert report.features(records)["blocks copied on write"] > 0
    assert any(s["prefill_tokens"] and s["decode_tokens"] for s in records)
    free = lockstep.free_run(core, requests, kv_dtype=jnp.float32, max_steps=6)
    assert (free.num_equal, free.first_step) == (4, None)
    # Everything was compiled once.
    assert {f._cache_size() for f in core._execute.values()} == {1}

    plant(monkeypatch, "reference", layer=1)
    core._execute["reference"] = lockstep.jit_execute(configs["reference"])
    found = report.findings(run(1), 1e-4)
    # The layer before it agrees still; what comes after inherits it.
    assert found[0].startswith("step 0: attention of layer 1 is apart by 0.0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(OLD_JAX, reason="jax before 0.11 has not these kernels")
def test_the_script_compares_the_kernels_in_the_interpreter(tmp_path, capsys):
    arguments = ["--requests", "4", "--steps", "7", "--buckets", "16", "--out", str(tmp_path)]
    assert compare_traces.main(arguments) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["findings"] == []
    assert len(found["steps"]) == 7
    for s in found["steps"]:
        assert all(d["relative"] < 1e-5 for d in [*s["attention"], s["logits"], s["pool"]])
        assert s["padding"] == 0
        assert s["tokens"] == []
    assert all(d["max_abs"] > 0 for s in found["steps"] for d in s["attention"])
    assert found["features"]["blocks copied on write"] > 0
    operations = found["operations"]["16"]
    assert operations["xla"]["kernels"] == {}
    kernels = set(operations["pallas"]["kernels"])
    assert {"write_kv", "copy_blocks", "paged_attention_decode"} <= kernels
    for name in ("xla", "pallas"):
        path = tmp_path / found["profiles"][name]["path"]
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        assert sum(event.get("ph") == "X" for event in events) > 100
        # Both pools are updated where they lie.
        memory = operations[name]["memory"]
        assert memory["alias"] > 0.9 * memory["output"]
    assert (tmp_path / "differences.png").read_bytes().startswith(b"\x89PNG")
    assert "**They agree**: in 7 steps" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(OLD_JAX, reason="jax before 0.11 has not these kernels")
def test_the_script_names_the_step_and_layer_of_a_faulty_kernel(tmp_path, monkeypatch, capsys):
    right = api._IMPLEMENTATIONS["pallas"]

    def wrong(*args, scale, **options):
        return right(*args, scale=scale * 1.01, **options)

    monkeypatch.setitem(api._IMPLEMENTATIONS, "pallas", wrong)
    arguments = ["--requests", "1", "--steps", "2", "--buckets", "16", "--no-operations"]
    assert compare_traces.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "step 0: attention of layer 0 is apart by" in capsys.readouterr().out
    assert "**They do not agree**" in (tmp_path / "report.md").read_text()
