"""The engine's settings: what files and flags may say, and who wins."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagedjax.config import EngineConfig, default_token_buckets, load_config, parse_args

CONFIGS = Path(__file__).parents[2] / "configs" / "engines"


@dataclass(frozen=True, kw_only=True)
class Args:
    model: str = "some-model"
    config: Path | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_in_configs_loads(path):
    assert isinstance(load_config(path), EngineConfig)


def test_the_cpu_file_is_the_defaults_as_it_says():
    assert load_config(CONFIGS / "cpu.toml") == EngineConfig()


def test_settings_are_frozen_and_hashable():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8
    assert hash(config) == hash(EngineConfig())


@pytest.mark.parametrize(
    ("field_name", "value", "accepted"),
    [
        ("block_size", 0, "from 1 to 1024"),
        ("block_size", 2048, "from 1 to 1024"),
        ("block_size", 16.0, "an integer"),
        ("block_size", True, "an integer"),
        ("num_blocks", 0, "from 1 to"),
        ("num_blocks", 2**31 // 16, "from 1 to"),
        ("memory_fraction", 0.0, "above 0 and at most 1"),
        ("memory_fraction", 1.5, "above 0 and at most 1"),
        ("memory_fraction", float("nan"), "a number"),
        ("max_num_seqs", 0, "from 1 to"),
        ("num_rows", 31, "from 32 to"),
        ("max_num_batched_tokens", 0, "from 1 to"),
        ("max_model_len", 1, "from 2 to"),
        ("max_queue_size", -1, "from 0 to"),
        ("max_logprobs", -1, "from 0 to"),
        ("max_stop_token_ids", 0, "from 1 to"),
        ("seed", -1, "from 0 to"),
        ("dtype", "float16", "one of auto, float32, bfloat16"),
        ("kv_cache_dtype", "fp8", "one of auto, float32, bfloat16, float16"),
        ("attention", "triton", "one of auto, xla, pallas, reference"),
        ("enable_prefix_caching", 1, "true or false"),
        ("token_buckets", (), "strictly ascending"),
        ("token_buckets", (64, 32, 512), "strictly ascending"),
        ("token_buckets", (32, 64), "end with max_num_batched_tokens, which is 512"),
        ("token_buckets", (32.0, 512), "a list of integers"),
        ("watermark", -0.1, "at least 0 and below 1"),
        ("watermark", 1.0, "at least 0 and below 1"),
        ("watermark", "1%", "a number"),
        ("compile_threads", 0, "from 1 to"),
        ("compilation_cache_dir", "", "a folder, or off"),
        ("compilation_cache_dir", 3, "text"),
        ("event_log", "", "a file, or left out"),
        ("event_log_text", True, "false without event_log"),
        ("event_log_kv", True, "false without event_log_text"),
        ("event_log_checksum_every", 0, "from 1 to"),
    ],
)
def test_a_bad_value_names_field_range_and_value(field_name, value, accepted):
    with pytest.raises(ValueError, match=re.escape(accepted)) as caught:
        EngineConfig(**{field_name: value})
    assert str(caught.value).startswith(f"{field_name} must ")
    assert "(got " in str(caught.value)


def write(tmp_path, text):
    path = tmp_path / "engine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_overrides_defaults_and_overrides_win_over_the_file(tmp_path):
    path = write(tmp_path, "max_num_seqs = 8\nblock_size = 4\ntoken_buckets = [8, 512]\n")
    config = load_config(path, {"block_size": 32, "memory_fraction": 1})
    assert (config.max_num_seqs, config.block_size, config.memory_fraction) == (8, 32, 1.0)
    assert config.token_buckets == (8, 512)
    assert load_config(None, {"watermark": 0}).watermark == 0.0
    assert load_config(None, {"compilation_cache_dir": Path("a/b")}).compilation_cache_dir == "a/b"


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path):
    path = write(tmp_path, "max_num_sequences = 8\n")
    with pytest.raises(ValueError, match=r"'max_num_sequences' in .*did you mean 'max_num_seqs'"):
        load_config(path)
    with pytest.raises(ValueError, match=r"'zzz' among the overrides; known keys: dtype, "):
        load_config(None, {"zzz": 1})


def test_a_section_is_an_unknown_key(tmp_path):
    with pytest.raises(ValueError, match="unknown key 'engine'"):
        load_config(write(tmp_path, "[engine]\nblock_size = 4\n"))


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = write(tmp_path, "block_size: 4\n")
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a TOML file")):
        load_config(path)
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / "missing.toml")


def test_flags_override_the_file_and_unset_flags_leave_it_alone(tmp_path):
    path = write(tmp_path, "max_num_seqs = 8\nenable_prefix_caching = false\nnum_blocks = 9\n")
    args = parse_args(Args, ["--config", str(path), "--max-num-seqs", "5", "--model", "other"])
    assert args.model == "other"
    assert args.config == path
    assert args.engine == EngineConfig(max_num_seqs=5, enable_prefix_caching=False, num_blocks=9)
    # A flag may also put back what the file changed.
    back = parse_args(Args, [f"--config={path}", "--enable-prefix-caching", "--num-blocks", "None"])
    assert back.engine == EngineConfig(max_num_seqs=8)


def test_no_flags_are_the_defaults():
    assert parse_args(Args, []) == Args()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be from 1 to"),
        (["--max-sums", "3"], "--max-sums"),
        (["--dtype", "float16"], "float16"),
        (["--config", "not-there.toml"], "not-there.toml"),
    ],
)
def test_a_bad_command_line_exits_with_2_and_says_why(argv, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(Args, argv)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_help_says_what_fields_mean_and_nothing_of_the_code(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(Args, ["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Everything an engine is built from" in text
    assert "--compilation-cache-dir" in text
    for word in ("Raises", "ValueError", "`"):
        assert word not in text


@pytest.mark.parametrize("budget", [1, 2, 7, 64, 100, 512])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 32, 256])
def test_default_buckets_are_few_and_end_with_the_budget(budget, max_num_seqs):
    buckets = default_token_buckets(budget, max_num_seqs)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == budget
    assert min(max_num_seqs, budget) in buckets
    assert len(buckets) <= 10
    for tokens in range(1, min(128, budget) + 1):
        assert next(size for size in buckets if size >= tokens) <= 2 * tokens
