"""The memory planner: arithmetic a person can follow, counting by hand against closed forms."""

import itertools
import json
import random
import re
import shlex
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import plan_article
import plan_memory
import pytest
from plan_report import both_units

from pagedjax import memory, planning
from pagedjax.config import EngineConfig
from pagedjax.models.presets import preset_config
from pagedjax.planning import Lengths

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
LLAMA13B = preset_config("llama-2-13b")


@dataclass(frozen=True)
class Shape:
    """2 layers, 3 KV heads of 4: 2 * 2 * 3 * 4 = 48 numbers a token."""

    num_hidden_layers: int = 2
    num_key_value_heads: int = 3
    head_dim: int = 4
    max_position_embeddings: int = 1000
    num_parameters: int = 500


def test_bytes_of_a_token_a_block_a_sequence_and_the_weights():
    assert planning.kv_bytes_per_token(Shape(), dtype="bfloat16") == 96
    assert planning.kv_bytes_per_token(Shape(), dtype="float32") == 192
    assert planning.kv_bytes_per_block(Shape(), block_size=16, dtype="bfloat16") == 1536
    assert planning.kv_bytes(Shape(), 10, dtype="bfloat16") == 960
    assert planning.kv_bytes(Shape(), 0, dtype="bfloat16") == 0
    assert planning.weight_bytes(Shape(), dtype="bfloat16") == 1000
    assert [planning.blocks_for(n, block_size=16) for n in (0, 1, 16, 17, 50)] == [0, 1, 1, 2, 4]


def test_a_block_takes_what_the_arrays_of_the_pool_take():
    import jax

    from pallas_kernels import init_pool

    def pool():
        return init_pool(2, 5, 16, 3, 4, "bfloat16")

    arrays = jax.eval_shape(pool)
    size_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    assert size_bytes == 5 * planning.kv_bytes_per_block(Shape(), block_size=16, dtype="bfloat16")


def test_a_row_of_the_table_takes_what_the_scheduler_gives_it():
    import jax

    from pagedjax.core.config import SchedulerConfig
    from pagedjax.core.state import init_scheduler

    config = SchedulerConfig(
        num_rows=4, max_num_seqs=4, num_blocks=64, max_model_len=1000, max_num_batched_tokens=32
    )
    table = jax.eval_shape(lambda: init_scheduler(config)).blocks.block_tables
    study = planning.block_size_study(
        Shape(), Lengths.fixed(9), max_model_len=1000, dtype="float32", block_sizes=(16,)
    )
    assert study[0].table_bytes * 4 == table.size * table.dtype.itemsize


# Lengths


def test_lengths_of_a_list():
    lengths = Lengths.of([200, 50, 50])
    assert lengths.counts == ((50, 2), (200, 1))
    assert (lengths.total, lengths.tokens, lengths.mean) == (3, 300, 100)
    assert (lengths.shortest, lengths.longest) == (50, 200)
    assert lengths.blocks(16) == 4 + 4 + 13


def test_uniform_and_fixed_lengths():
    assert Lengths.uniform(3, 5) == Lengths.of([3, 4, 5])
    assert Lengths.fixed(7) == Lengths.uniform(7, 7)


def test_in_service_counts_one_request_step_by_step():
    # 10 prompt tokens, 3 output tokens: holds 10, 11, then 12; the third is never fed back.
    assert Lengths.in_service(Lengths.fixed(10), Lengths.fixed(3)) == Lengths.uniform(10, 12)


@pytest.mark.parametrize("seed", range(4))
def test_in_service_equals_playing_every_request(seed):
    source = random.Random(seed)
    prompts = [source.randint(1, 40) for _ in range(source.randint(1, 12))]
    outputs = [source.randint(1, 60) for _ in range(source.randint(1, 12))]
    seen = [
        prompt + step
        for prompt, output in itertools.product(prompts, outputs)
        for step in range(output)
    ]
    assert Lengths.in_service(Lengths.of(prompts), Lengths.of(outputs)) == Lengths.of(seen)


def test_in_service_stays_exact_where_counts_are_huge():
    many = Lengths(((1, 10**30), (300, 10**30)))
    grown = Lengths.in_service(many, many)
    assert grown.total == 2 * 10**30 * 301 * 10**30
    assert grown.counts[0] == (1, 2 * 10**60)
    assert grown.counts[-1] == (599, 10**60)


# What fits


def count_by_hand(num_blocks, lengths, block_size, prefix_length):
    """Sequences of the given lengths, in order, that a pool holds: block by block, token by
    token."""
    free = num_blocks - prefix_length // block_size
    for admitted, length in enumerate(lengths):
        shared_tokens = prefix_length // block_size * block_size
        held = shared_tokens
        for token in range(shared_tokens, length):
            if token == held:
                free -= 1
                held += block_size
        if free < 0:
            return admitted
    return len(lengths)


@pytest.mark.parametrize(
    ("block_size", "prefix_length"), [(1, 0), (4, 0), (16, 0), (4, 7), (4, 8), (16, 40), (7, 14)]
)
def test_capacity_of_one_length_equals_filling_a_pool(block_size, prefix_length):
    for length in range(prefix_length + 1, prefix_length + 40):
        for num_blocks in (1, 5, 37, 64):
            fits = planning.capacity(
                num_blocks,
                Lengths.fixed(length),
                block_size=block_size,
                prefix_length=prefix_length,
            )
            by_hand = count_by_hand(num_blocks, [length] * 100, block_size, prefix_length)
            assert fits.mean == fits.worst, (length, num_blocks)
            assert min(fits.worst, 100) == by_hand, (length, num_blocks)


@pytest.mark.parametrize("prefix_length", [0, 20])
def test_capacity_of_a_mixture_lies_between_whole_rounds_of_it(prefix_length):
    mixture = [50, 200, 1000, 21, 21]
    fits = planning.capacity(1000, Lengths.of(mixture), block_size=16, prefix_length=prefix_length)
    by_hand = count_by_hand(1000, mixture * 100, 16, prefix_length)
    assert by_hand // 5 == fits.mean // 5
    worst = count_by_hand(1000, [1000] * 100, 16, prefix_length)
    assert fits.worst == worst < fits.mean


def test_capacity_by_arithmetic():
    # 10 blocks of 4; 6 tokens take 2 blocks, so 5 sequences; with 4 of them shared 9 sequences.
    assert planning.capacity(10, Lengths.fixed(6), block_size=4).mean == 5
    shared = planning.capacity(10, Lengths.fixed(6), block_size=4, prefix_length=5)
    assert (shared.prefix_blocks, shared.mean) == (1, 9)
    assert planning.capacity(1, Lengths.fixed(6), block_size=4, prefix_length=5).mean == 0
    assert planning.capacity(1, Lengths.fixed(6), block_size=4).worst == 0


def plan(model=LLAMA13B, **options):
    options = dict(device_bytes=80 * GIB, dtype="bfloat16") | options
    return planning.plan_pool(model, **options)


def test_the_pool_beside_the_weights_of_a_gpu():
    pool = plan()
    left = 60 * GIB - 26_031_728_640  # JAX takes three quarters of 80 GiB
    assert pool.jax_bytes == 60 * GIB
    assert pool.weight_bytes == 26_031_728_640
    assert pool.num_blocks == int(left * 0.9) // 13_107_200
    assert pool.pool_bytes == pool.num_blocks * 13_107_200
    assert pool.num_tokens == pool.num_blocks * 16
    assert pool.weight_bytes + pool.pool_bytes + pool.rest_bytes == 60 * GIB
    assert plan(xla_memory_fraction=1.0).jax_bytes == 80 * GIB


def test_weights_of_another_type_or_of_a_given_size():
    assert plan(weights_dtype="float32").weight_bytes == 2 * 26_031_728_640
    assert plan(weights_bytes=7 * 10**9).weight_bytes == 7 * 10**9
    assert plan(dtype="float32", weights_dtype="bfloat16").block_bytes == 2 * 13_107_200


@pytest.mark.parametrize(
    ("platform", "fraction", "block_size"), [("gpu", None, 16), ("gpu", 0.5, 8), ("cpu", None, 32)]
)
def test_the_pool_is_the_one_that_the_engine_makes(platform, fraction, block_size):
    small = preset_config("smollm2-135m")
    pool = plan(
        small,
        device_bytes=20 * GIB,
        platform=platform,
        memory_fraction=fraction,
        block_size=block_size,
        xla_memory_fraction=None if platform == "cpu" else 1.0,
    )
    config = EngineConfig(
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        memory_fraction=fraction,
        block_size=block_size,
        num_rows=1 << 20,
    )
    filled = memory.fill_sizes(
        config, small, platform=platform, available_bytes=20 * GIB - small.num_parameters * 2
    )
    assert pool.num_blocks == filled.num_blocks


@pytest.mark.slow
def test_the_scheduler_runs_as_many_sequences_as_planned():
    """Requests of 7 + 9 tokens hold 15 at most. As many as planned are never preempted; one more,
    and somebody is."""
    num_blocks, block_size = 41, 4
    fits = planning.capacity(num_blocks, Lengths.fixed(15), block_size=block_size).worst
    assert fits == 10
    peak, preemptions = play_scheduler(num_blocks, block_size, fits)
    assert (peak, preemptions) == (fits, 0)
    _, preemptions = play_scheduler(num_blocks, block_size, fits + 1)
    assert preemptions > 0


def play_scheduler(num_blocks, block_size, num_requests):
    """(most rows at once, preemptions) of requests that arrive together, of 7 + 9 tokens each."""
    import functools

    import bench_scheduler
    import jax
    import numpy as np

    from pagedjax.core.config import SchedulerConfig
    from pagedjax.core.requests import add_request
    from pagedjax.core.state import init_scheduler

    config = SchedulerConfig(
        num_rows=num_requests,
        max_num_seqs=num_requests,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=32,
        max_num_batched_tokens=128,
    )
    state = init_scheduler(config)
    for row in range(num_requests):
        prompt = np.zeros(config.max_padded_len, np.int32)
        prompt[:7] = 100 * row + np.arange(7)
        state = add_request(
            state,
            np.int32(row),
            prompt,
            np.int32(7),
            bench_scheduler.params_for(config, 16),
            config=config,
        )
    step = jax.jit(
        functools.partial(bench_scheduler.one_step, _=None, config=config, num_tokens=128)
    )
    peak = 0
    for _ in range(60):
        state, (scheduled, num_running) = step(state)
        peak = max(peak, int(num_running))
    assert int(scheduled) == 0
    return peak, int(state.counters.num_preemptions)


# Waste and savings


def test_preallocation_by_arithmetic():
    reserved = planning.preallocation(
        Shape(), Lengths.of([10, 30]), max_model_len=100, dtype="bfloat16"
    )
    assert (reserved.reserved_bytes, reserved.used_bytes) == (9600, 1920)
    assert reserved.utilisation == Fraction(1, 5)


def test_prefix_saving_by_arithmetic():
    # 3 sequences, 10 equal tokens, blocks of 4: two whole blocks are held once instead of 3 times,
    # so 2 * 2 * 4 = 16 of 30 tokens are saved; the other two tokens each sequence copies.
    saving = planning.prefix_saving(
        Shape(), prefix_length=10, num_sequences=3, block_size=4, dtype="bfloat16"
    )
    assert (saving.separate_bytes, saving.saved_bytes) == (30 * 96, 16 * 96)
    assert (saving.shared_bytes, saving.copied_tokens) == (14 * 96, 2)
    assert saving.saving == Fraction(16, 30)
    alone = planning.prefix_saving(Shape(), prefix_length=10, num_sequences=1, dtype="float32")
    assert alone.saved_bytes == 0


def test_prefix_saving_agrees_with_capacity():
    one_by_one = planning.capacity(100, Lengths.fixed(11), block_size=4).mean
    with_prefix = planning.capacity(100, Lengths.fixed(11), block_size=4, prefix_length=10).mean
    assert (one_by_one, with_prefix) == (33, 98)
    saving = planning.prefix_saving(
        Shape(), prefix_length=10, num_sequences=98, block_size=4, dtype="float32"
    )
    block_bytes = planning.kv_bytes_per_block(Shape(), block_size=4, dtype="float32")
    assert 98 * 3 * block_bytes - saving.saved_bytes == 100 * block_bytes


def test_block_size_study_counts_the_places_of_the_last_block():
    lengths = Lengths.of([1, 16, 17, 40])
    study = planning.block_size_study(Shape(), lengths, max_model_len=100, dtype="bfloat16")
    assert [row.block_size for row in study] == list(range(1, 129))
    for row in study:
        held = [range(0, n, row.block_size) for n in (1, 16, 17, 40)]
        empty = sum(len(b) * row.block_size for b in held) - (1 + 16 + 17 + 40)
        assert row.blocks == Fraction(sum(map(len, held)), 4)
        assert row.wasted_tokens == Fraction(empty, 4)
        assert row.wasted_bytes == row.wasted_tokens * 96
        assert row.waste == Fraction(empty, empty + 74)
        assert row.block_bytes == 96 * row.block_size
        assert row.table_entries == len(range(0, 100, row.block_size))
        assert row.table_bytes == 4 * row.table_entries


def test_equally_likely_remainders_waste_half_a_block_less_half_a_token():
    for block_size in (1, 2, 16, 128):
        (row,) = planning.block_size_study(
            Shape(),
            Lengths.uniform(1, 512),
            max_model_len=512,
            dtype="float32",
            block_sizes=(block_size,),
        )
        assert row.wasted_tokens == Fraction(block_size - 1, 2)


def test_waste_of_the_benchmarks_mixed_workload_is_below_4_percent():
    """W2 of scripts/bench_workloads.py: its requests, played to their ends."""
    from bench_workloads import w2

    seen = [len(ids) + step for ids, output in w2(0) for step in range(output)]
    (row,) = planning.block_size_study(
        Shape(), Lengths.of(seen), max_model_len=512, dtype="float32", block_sizes=(16,)
    )
    assert 0.02 < row.waste < 0.04


# Invalid input

FIXED = Lengths.fixed(10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planning.kv_bytes_per_token(Shape(), dtype="int8"), r"dtype must be one of float"),
        (lambda: planning.kv_bytes(Shape(), -1, dtype="float32"), r"length .*at least 0 \(got -1"),
        (
            lambda: planning.kv_bytes_per_block(Shape(), block_size=0, dtype="float32"),
            r"block_size must be an integer of at least 1 \(got 0\)",
        ),
        (lambda: planning.blocks_for(True, block_size=1), r"length must be an integer .*got True"),
        (lambda: planning.blocks_for(1, block_size=1.5), r"block_size must be .*got 1.5"),
        (lambda: planning.weight_bytes(Shape(), dtype=""), r"dtype must be one of .*got ''"),
        (lambda: Lengths(()), r"counts must hold at least one length"),
        (lambda: Lengths(((0, 1),)), r"length must be an integer of at least 1 \(got 0\)"),
        (lambda: Lengths(((5, 0),)), r"count must be an integer of at least 1 \(got 0\)"),
        (lambda: Lengths(((5, 1), (5, 1))), r"counts must ascend strictly"),
        (lambda: Lengths.uniform(5, 4), r"high must be an integer of at least 5 \(got 4\)"),
        (lambda: planning.capacity(0, FIXED, block_size=16), r"num_blocks .*at least 1 \(got 0\)"),
        (
            lambda: planning.capacity(9, FIXED, block_size=16, prefix_length=10),
            r"prefix_length must be from 0 to 9.*got 10",
        ),
        (lambda: plan(device_bytes=0), r"device_bytes must be an integer of at least 1 \(got 0\)"),
        (lambda: plan(platform="tpu"), r"platform must be one of gpu, cpu \(got 'tpu'\)"),
        (lambda: plan(xla_memory_fraction=0.0), r"xla_memory_fraction must be above 0.*got 0.0"),
        (
            lambda: plan(platform="cpu", xla_memory_fraction=0.5),
            r"xla_memory_fraction is for platform 'gpu' only \(got 0.5\)",
        ),
        (lambda: plan(memory_fraction=1.5), r"memory_fraction must be above 0.*got 1.5"),
        (lambda: plan(block_size=4096), r"block_size must be from 1 to 1024 \(got 4096\)"),
        (lambda: plan(device_bytes=GIB), r"weights_bytes must be from 0 to 805306367.*got 260317"),
        (lambda: plan(weights_bytes=-1), r"weights_bytes must be from 0.*got -1"),
        (
            lambda: plan(weights_bytes=5, weights_dtype="float32"),
            r"weights_bytes and weights_dtype exclude each other",
        ),
        (lambda: plan(weights_bytes=60 * GIB - 5), r"no block of the KV pool fits"),
        (
            lambda: planning.preallocation(Shape(), FIXED, max_model_len=9, dtype="float32"),
            r"max_model_len must be an integer of at least 10 \(got 9\)",
        ),
        (
            lambda: planning.block_size_study(Shape(), FIXED, max_model_len=9, dtype="float32"),
            r"max_model_len must be an integer of at least 10 \(got 9\)",
        ),
        (
            lambda: planning.prefix_saving(
                Shape(), prefix_length=0, num_sequences=2, dtype="float32"
            ),
            r"prefix_length must be an integer of at least 1 \(got 0\)",
        ),
        (
            lambda: planning.prefix_saving(
                Shape(), prefix_length=5, num_sequences=0, dtype="float32"
            ),
            r"num_sequences must be an integer of at least 1 \(got 0\)",
        ),
    ],
)
def test_invalid_input_names_the_field_and_what_it_accepts(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The article


def test_the_article_s_figures():
    """Llama-2-13B in 16 bits, as the article has it."""
    assert planning.kv_bytes(LLAMA13B, 1000, dtype="bfloat16") == 819_200_000
    assert planning.kv_bytes(LLAMA13B, 4096, dtype="bfloat16") == 3_355_443_200
    block_bytes = planning.kv_bytes_per_block(LLAMA13B, block_size=16, dtype="bfloat16")
    assert block_bytes == 13_107_200
    used = [
        planning.preallocation(
            LLAMA13B, Lengths.fixed(length), max_model_len=4096, dtype="bfloat16"
        ).utilisation
        for length in (50, 200, 1000)
    ]
    assert used == [Fraction(50, 4096), Fraction(200, 4096), Fraction(1000, 4096)]
    assert [f"{float(share):.1%}" for share in used] == ["1.2%", "4.9%", "24.4%"]
    saving = planning.prefix_saving(
        LLAMA13B, prefix_length=2000, num_sequences=10, dtype="bfloat16"
    )
    assert saving.saving == Fraction(9, 10)
    assert saving.shared_bytes == 1_638_400_000


def test_the_article_s_slips_are_named():
    figures = plan_article.article_figures()
    assert {figure.verdict for figure in figures} == set(plan_article.VERDICTS)
    slips = {f.article: (f.computed, f.verdict) for f in figures if f.verdict in ("unit", "wrong")}
    assert slips["about 0.78 GB"] == ("0.819 GB = 0.763 GiB", "wrong")
    assert slips["about 3.13 GB"] == ("3.355 GB = 3.125 GiB", "unit")
    assert slips["57.3 GB"] == ("59.586 GB = 55.494 GiB", "wrong")
    assert slips["2 blocks, 15 places wasted"] == ("1 block, 47 places wasted", "wrong")
    assert slips["15.3 - 1.53 = 13.77 GB"][0].endswith("14.746 GB = 13.733 GiB")
    assert slips["30 %"][0].endswith("47.5%")
    assert all(figure.note for figure in figures if figure.verdict not in ("exact", "rounded"))


# The script


def run(capsys, *argv):
    status = plan_memory.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_holds_the_same_exact_bytes(capsys):
    status, text, _ = run(
        capsys, "--json", "--lengths", "2001,2100", "--prefix-length", "2000", "--memory-gib", "80"
    )
    figures = json.loads(text)
    assert status == 0
    assert figures["kv_bytes_per_token"] == 819_200
    assert figures["pool"]["num_blocks"] == plan().num_blocks
    assert figures["prefix"]["saved_bytes"] == 14_745_600_000
    assert figures["capacity"]["prefix_blocks"] == 125
    assert [row["block_size"] for row in figures["block_sizes"]] == list(range(1, 129))


def test_json_of_the_article(capsys):
    status, text, _ = run(capsys, "--article", "--json")
    assert status == 0
    assert json.loads(text)[0]["computed"] == "819,200,000 bytes"


def test_models_by_preset_file_and_directory_are_the_same(capsys, tmp_path):
    config = preset_config("smollm2-135m")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()))
    toml = ROOT / "configs" / "models" / "smollm2-135m.toml"
    outputs = []
    for model in ("smollm2-135m", toml, tmp_path):
        status, text, error = run(capsys, "--model", model, "--json")
        assert status == 0, error
        outputs.append(json.loads(text) | {"model": ""})
    assert outputs[0] == outputs[1] == outputs[2]


def test_lengths_of_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("50\n200 1000\n50,\n")
    assert plan_memory.parse_lengths("lengths", str(file)) == Lengths.of([50, 50, 200, 1000])
    assert plan_memory.parse_lengths("lengths", "3:9") == Lengths.uniform(3, 9)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--lengths 5:3", "lengths must be a number of at least 1"),
        ("--lengths x", "lengths must be a number of at least 1"),
        ("--lengths 5000", "lengths must be at most 4096, max_model_len (got 5000)"),
        ("--lengths 5 --prompt-lengths 3 --output-lengths 3", "lengths must be left out"),
        ("--prompt-lengths 3", "must be given together"),
        ("--max-model-len 9999", "max_model_len must be at most 4096"),
        ("--model nothing", "model must be a TOML file"),
        ("--memory-gib 0", "memory_gib must be above 0"),
        ("--memory-gib 8 --device h100", "memory_gib must be left out with device"),
        ("--memory-gib 8", "weights_bytes must be from 0 to"),
        ("--platform cpu", "memory_gib must be given with platform cpu"),
        ("--num-sequences 3", "num_sequences must be left out without prefix_length"),
        ("--prefix-length 1024", "prefix_length must be from 0 to 0"),
        ("--block-size 0", "block_size must be from 1 to 1024"),
        ("--article --lengths 5", "article must be given alone"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_line(capsys, argv, message):
    status, text, error = run(capsys, *argv.split())
    assert (status, text) == (2, "")
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_the_plot_is_written_and_is_the_same_each_time(capsys, tmp_path):
    for name in ("a", "b"):
        status, _, error = run(capsys, "--plot", tmp_path / "new" / name, "--lengths", "16")
        assert status == 0, error
    first, second = (tmp_path / "new" / f"{name}.svg" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def documented_commands():
    """(command, output) of docs/memory.md: each sh block that a text block follows."""
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    command = r"```sh\n(python scripts/plan_memory.py[^\n]*)\n```"
    return re.findall(command + r"\n\n```text\n(.*?)```", text, re.DOTALL)


def test_the_documentation_shows_what_the_script_prints(capsys):
    commands = documented_commands()
    assert len(commands) >= 4
    for command, shown in commands:
        status, text, _ = run(capsys, *shlex.split(command)[2:])
        assert status == 0
        assert text == shown, command


def test_the_table_s_units():
    assert both_units(512) == ("512 B", "512 B")
    assert both_units(819_200_000) == ("819.200 MB", "781.250 MiB")
    assert both_units(3_355_443_200) == ("3.355 GB", "3.125 GiB")
