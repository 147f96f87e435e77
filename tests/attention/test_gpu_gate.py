"""The gate of the GPU kernels (scripts/check_gpu_kernels.py): what it reads, what it refuses."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import check_gpu_kernels
import pytest
from gpu_gate import aot, budgets, measure, ptx, report
from gpu_gate.chips import CHIPS, blocks_per_sm, target_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SERIALIZED = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the function 'fusion_3'\n"
)
PTXAS_OUTPUT = f"""
{SERIALIZED.rstrip()}
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for attend_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 2 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'fusion_3' for 'sm_90a'
ptxas info    : Function properties for fusion_3
    48 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""

PTX = """
.version 8.8
.target sm_90a
.entry attend_mosaic_gpu_kernel(.param .u64 p0)
.reqntid 128, 1, 1
{
  ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
  ld.global.nc.v2.b64 {%rd3, %rd4}, [%rd1];
  ld.global.b32 %r5, [%rd2];
  st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
  st.global.v2.b32 [%rd1], {%r1, %r2};
  cp.async.cg.shared.global [%r1], [%rd1], 16;
  cp.async.ca.shared.global [%r1], [%rd1], 4;
  cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], [%r2];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
}
.visible .entry fusion_3(.param .u64 p0)
.maxntid 64, 2, 1
{
  st.local.b32 [%rd1], %r1;
}
"""


def test_what_ptxas_says_is_read():
    found = ptx.parse_ptxas(PTXAS_OUTPUT)
    assert found["attend_mosaic_gpu_kernel"] == dict(
        registers=128, stack_bytes=0, spill_bytes=0, shared_bytes=1024, serialized=False
    )
    assert found["fusion_3"] == dict(
        registers=255, stack_bytes=48, spill_bytes=32, shared_bytes=0, serialized=True
    )


def test_kernels_of_a_module_are_read_apart(monkeypatch):
    monkeypatch.setattr(ptx, "assemble", lambda *_: ptx.parse_ptxas(PTXAS_OUTPUT))
    attend, fusion = ptx.read_module(PTX + "\0", Path("ptxas"), dynamic_shared=2048)
    assert (attend.name, attend.mosaic, attend.threads, attend.shared_bytes) == (
        *("attend", True, 128),
        3072,
    )
    counts = {name: count for name, count in attend.instructions.items() if count}
    assert counts == dict(
        mma_sync=1, tma=1, cp_async16=1, ld_global_16=2, st_global_16=1, ld_global_scalar=1
    )
    assert (fusion.name, fusion.mosaic, fusion.threads) == ("fusion_3", False, 128)
    assert fusion.instructions["local"] == 1


def test_shared_memory_is_found_though_the_files_are_numbered_apart(monkeypatch, tmp_path):
    (tmp_path / "attend_3.ptx").write_text(PTX)
    (tmp_path / "attend_3.ptxas").write_text(PTXAS_OUTPUT)
    with pytest.raises(ptx.AssemblerError, match="shared memory is not known"):
        ptx.read_dumps([tmp_path / "attend_3.ptx"], Path("ptxas"))
    for name, count in (("attend_5", 2048), ("attend_6", 1024), ("attend_more_1", 9999)):
        (tmp_path / f"{name}.resources.txt").write_text(f"Resources(smem_scratch_bytes={count},")
    kernels = ptx.read_dumps([tmp_path / "attend_3.ptx"], Path("ptxas"))
    assert kernels[0].shared_bytes == 1024 + 2048


def test_a_module_without_kernels_has_none():
    assert ptx.read_module(".version 8.8\n.target sm_90a\n", Path("ptxas")) == []


# Figures of kernels that CUDA's own occupancy calculator gave.
@pytest.mark.parametrize(
    ("chip", "registers", "shared_bytes", "threads", "expected"),
    [
        ("h100", 96, 38912, 128, 5),
        ("a100", 96, 38912, 128, 4),
        ("h100", 128, 69632, 128, 3),
        ("a100", 127, 69632, 128, 2),
        ("h100", 162, 126976, 128, 1),
        ("b200", 26, 2048, 128, 16),
        ("h100", 255, 0, 256, 1),
        ("h100", 16, 0, 32, 32),
    ],
)
def test_blocks_per_sm(chip, registers, shared_bytes, threads, expected):
    found = blocks_per_sm(
        CHIPS[chip], registers=registers, shared_bytes=shared_bytes, threads=threads
    )
    assert found == expected


def test_chips_are_described_with_their_features():
    assert "major: 9 minor: 0 feature_extension: ACCELERATED" in target_config(CHIPS["h100"])
    assert "major: 8 minor: 0 feature_extension: NONE" in target_config(CHIPS["a100"])
    # 18 KB on H100, 25 on H200, 36 on B200: bandwidth times 700 ns over the SMs.
    needs = {chip: round(CHIPS[chip].bytes_in_flight_needed / 1000) for chip in CHIPS}
    assert needs == {"a100": 13, "h100": 18, "h200": 25, "b200": 36}


HLO = """
  %param = bf16[4,1024,16,8,128]{4,3,2,1,0} parameter(0)
  %copy.1 = bf16[4,1024,16,8,128]{4,3,2,1,0} copy(%param)
  %dus = bf16[4,1024,16,8,128]{4,3,2,1,0} dynamic-update-slice(%param, %x, %i)
  %loop_fusion = bf16[4,1024,16,8,128]{4,3,2,1,0} fusion(%param), kind=kLoop, calls=%fused
  ROOT %copy_fusion = bf16[4,16384,1024]{2,1,0} fusion(%param), kind=kLoop, calls=%fused
  %small = bf16[4,16]{1,0} copy(%y)
  %both = (bf16[4,1024,16,8,128]{4,3,2,1,0}, u32[]) copy-start(%param)
"""


def test_copies_of_the_pool_are_found_in_hlo():
    found = measure.find_copies(HLO, 4 * 1024 * 16 * 8 * 128)
    assert [x.split(" = ")[0] for x in found] == ["%copy.1", "%copy_fusion", "%both"]


CALL = (
    '  %mpmd_map.{0} = bf16[4] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{'
    'op_name="jit(step)/while/body/{1}/mpmd_map" id=8}}, backend_config={{kernel_hash = "{2}", '
    'module = "ML"}}\n'
)


def test_a_kernel_that_was_compiled_for_an_earlier_program_is_known_by_its_hash(monkeypatch):
    monkeypatch.setattr(ptx, "assemble", lambda *_: ptx.parse_ptxas(PTXAS_OUTPUT))
    attend, _ = ptx.read_module(PTX, Path("ptxas"))
    other = dataclasses.replace(attend, name="combine")
    first = CALL.format(1, "attend", r"\8F\"A") + CALL.format(2, "combine", "B")
    seen = {}
    assert measure.kernels_of(first, [other, attend], seen) == [attend, other]
    again = CALL.format(7, "attend", r"\8F\"A") * 2
    assert measure.kernels_of(again, [], seen) == [attend]
    # One of another hash whose code was not written is not taken for it.
    assert measure.kernels_of(CALL.format(1, "attend", "C"), [], seen) == []
    # Where the program names no kernel, what was written counts.
    assert measure.kernels_of("", [attend], {}) == [attend]


KERNEL = measure.KernelFigures(
    name="attend",
    registers=120,
    threads=128,
    stack_bytes=0,
    spill_bytes=0,
    shared_bytes=60_000,
    blocks_per_sm=3,
    instructions={"mma_sync": 4, "tma": 2},
)
PROGRAM = measure.Figures(
    name="attend.decode",
    kernels=[KERNEL],
    donated_bytes=1000,
    argument_bytes=2000,
    output_bytes=1000,
    alias_bytes=1000,
    temp_bytes=500,
    require=("mma_sync|wgmma", "cp_async16|tma"),
    kernels_wanted=("attend",),
    bytes_in_flight=32_768,
)
BUDGETS = {
    "kernels": {
        "attend.decode/attend": {"registers": 128, "shared_bytes": 60_000, "blocks_per_sm": 3}
    },
    "programs": {"attend.decode": {"temp_bytes": 512}},
}


def judge(program=PROGRAM, pinned=BUDGETS, **kernel):
    kernels = [dataclasses.replace(k, **kernel) for k in program.kernels]
    return budgets.judge(CHIPS["h100"], dataclasses.replace(program, kernels=kernels), pinned)


def test_a_program_within_its_budgets_passes():
    assert judge() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(spill_bytes=8), "spills registers"),
        (dict(stack_bytes=16), "local memory"),
        (dict(serialized=True), "wgmma products wait for one another"),
        (dict(instructions={**KERNEL.instructions, "local": 1}), "local memory"),
        (dict(registers=129), "registers 129, the budget is 128"),
        (dict(shared_bytes=60_001), "shared_bytes 60,001, the budget is 60,000"),
        (dict(shared_bytes=240_000), "a thread block can have 232,448"),
        (dict(blocks_per_sm=2), "2 thread blocks fit on an SM, the floor is 3"),
        (dict(instructions={"tma": 2}), "no mma_sync or wgmma"),
        (dict(instructions={"mma_sync": 4}), "no cp_async16 or tma"),
        (dict(blocks_per_sm=1), "32,768 bytes in flight"),
    ],
)
def test_a_kernel_out_of_its_budgets_fails(change, message):
    assert any(message in problem for problem in judge(**change)), judge(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(error="ValueError: no"), "does not compile: ValueError: no"),
        (dict(kernels=[]), "no PTX seen of kernel attend"),
        (dict(kernels_wanted=("attend", "combine")), "no PTX seen of kernel combine"),
        (dict(alias_bytes=999), "1,000 bytes should be updated in place, 999 are"),
        (dict(pool_copies=["%copy.1"]), "copies something as large as the pool: %copy.1"),
        (dict(temp_bytes=513), "513 bytes of temporary memory; the budget is 512"),
        (dict(argument_bytes=90_000_000_000), "of a card that has 84,942,979,072"),
        (dict(name="attend.other"), "no budget"),
    ],
)
def test_a_program_out_of_its_budgets_fails(change, message):
    problems = judge(dataclasses.replace(PROGRAM, **change))
    assert any(message in problem for problem in problems), problems


def test_budgets_are_pinned_with_room_and_read_back(tmp_path):
    pinned = budgets.pin(CHIPS["h100"], [PROGRAM])
    assert pinned["kernels"]["attend.decode/attend"]["registers"] == 120
    assert judge(pinned=pinned) == []
    path = tmp_path / "budgets.json"
    budgets.dump({"h100": pinned, "b200": pinned}, path)
    assert budgets.load(path) == {"h100": pinned, "b200": pinned}
    assert budgets.load(tmp_path / "none.json") == {}
    spilling = dataclasses.replace(PROGRAM, kernels=[dataclasses.replace(KERNEL, spill_bytes=4)])
    assert budgets.pin(CHIPS["h100"], [spilling])["kernels"] == {}
    broken = measure.Figures(name="attend.decode", error="no")
    assert budgets.pin(CHIPS["h100"], [broken]) == {"kernels": {}, "programs": {}}
    more = budgets.merge(pinned, {"programs": {"attend.other": {"temp_bytes": 1}}})
    assert set(more["programs"]) == {"attend.decode", "attend.other"}
    assert more["kernels"] == pinned["kernels"]


def test_the_pinned_budgets_name_the_kernels_that_there_are():
    if sys.version_info < (3, 12):
        pytest.skip("kernel specs are made with jax 0.11 or later")
    from gpu_gate import programs

    pinned = budgets.load()
    assert set(pinned) == set(CHIPS)
    for chip, groups in pinned.items():
        names = {spec.name for spec in programs.kernel_specs(chip)}
        assert {x for x in groups["programs"] if not x.startswith("step.")} == names


def finished(monkeypatch, returncode, stdout="", stderr=""):
    def run(command, **_):
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(check_gpu_kernels.subprocess, "run", run)


def test_a_compiler_that_aborts_is_a_failure_and_what_came_before_is_kept(
    monkeypatch, tmp_path, capsys
):
    line = json.dumps({"chip": "h100", "program": dataclasses.asdict(PROGRAM)})
    finished(monkeypatch, -6, stdout=f"{line}\nnoise\n", stderr="LLVM ERROR: Cannot select")
    results, why = check_gpu_kernels.compile_chips(["h100", "h200"], tmp_path, [])
    assert results == {"h100": [PROGRAM], "h200": []}
    assert "status -6" in why
    assert "Cannot select" in why
    count = check_gpu_kernels.print_failures(
        results, {"h100 and h200": why}, {"h100": BUDGETS}, everything=False
    )
    assert count == 1
    assert "FAIL h100 and h200: the compiler ended" in capsys.readouterr().out


def test_nothing_compiled_is_a_failure(monkeypatch, tmp_path, capsys):
    finished(monkeypatch, 0)
    results, why = check_gpu_kernels.compile_chips(["h100"], tmp_path, [])
    assert (results, why) == ({"h100": []}, None)
    assert check_gpu_kernels.print_failures({"h100": []}, {}, {}, everything=False) == 1
    # And so is each pinned program that was left out, where all were to be compiled.
    pinned = {"h100": BUDGETS}
    assert check_gpu_kernels.print_failures({"h100": []}, {}, pinned, everything=True) == 2
    assert "attend.decode: has pinned budgets, but was not compiled" in capsys.readouterr().out


def test_chips_of_one_architecture_share_a_process(monkeypatch):
    groups = []

    def compile_chips(chips, folder, options):
        groups.append(tuple(chips))
        return {chip: [PROGRAM] for chip in chips}, None

    monkeypatch.setattr(check_gpu_kernels, "compile_chips", compile_chips)
    results, broken = check_gpu_kernels.compile_all(list(CHIPS), [], jobs=1)
    assert groups == [("h100", "h200"), ("a100",), ("b200",)]
    assert list(results) == list(CHIPS)
    assert not broken


def test_missing_wheels_end_it_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr(aot, "_found", lambda module: "nvcc" not in module)
    monkeypatch.setattr(sys, "argv", ["check_gpu_kernels.py"])
    assert check_gpu_kernels.main() == 2
    assert "not installed: nvidia-cuda-nvcc-cu12" in capsys.readouterr().err


def test_tables_are_written_between_the_markers(tmp_path):
    step = dataclasses.replace(PROGRAM, name="step.tiny.decode")
    results = {chip: [PROGRAM, step] for chip in CHIPS}
    text = report.markdown(results, jax_version="0.0")
    assert "| attend.decode | a100 | 120 | 0 | 60,000 | 128 | 3 |" in text
    assert "32 x 3 = 96 (5.5x)" in text  # H100: 96 KiB where 17.4 are needed
    path = tmp_path / "kernels.md"
    path.write_text(f"# Kernels\n\nBefore.\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
    for _ in range(2):
        report.write(path, text)
        written = path.read_text()
        assert written.startswith("# Kernels\n\nBefore.\n")
        assert written.endswith(f"{report.END}\n\nAfter.\n")
        assert written.count(text) == 1
        assert "old" not in written


def wheels_missing():
    try:
        aot.check_wheels()
    except aot.MissingWheels as error:
        return str(error)
    return None


MISSING = wheels_missing()


@pytest.fixture(scope="module")
def planted_problems():
    """What the gate says of kernels with a planted fault, compiled for an H100: by fault."""
    if MISSING:
        pytest.skip(MISSING)
    done = subprocess.run(
        [sys.executable, str(HERE / "gate_faults.py")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "scripts")])),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", None),
        ("spills", "spills registers"),
        ("too much shared memory", "shared_bytes"),
        ("shared memory beyond the chip's", "does not compile"),
        ("one thread block on an SM", "1 thread blocks fit on an SM, the floor is 3"),
        ("stores of 2 bytes", "no st_global_16 in its code"),
        ("the pool is copied", "copies something as large as the pool"),
        ("another name", "no PTX seen of kernel"),
        ("few bytes in flight", "bytes in flight on an SM"),
        ("wgmma: spills", "spills registers"),
        ("wgmma: too much shared memory", "shared_bytes"),
        ("wgmma: products wait", "wgmma products wait for one another"),
        ("wgmma: mma.sync instead", "no PTX seen of kernel paged_attention_prefill_wgmma"),
    ],
)
def test_a_planted_fault_is_found(planted_problems, fault, message):
    problems = planted_problems[fault]
    if message is None:
        assert problems == []
    else:
        assert any(message in problem for problem in problems), problems
