"""What the engine decides by itself: above all the pool's size, from free memory."""

from dataclasses import dataclass

import pytest

from pagedjax import memory
from pagedjax.config import EngineConfig

GIB = 1 << 30
PLENTY = 64 * GIB


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = 30
    num_key_value_heads: int = 3
    head_dim: int = 64
    max_position_embeddings: int = 8192


FLOAT32 = EngineConfig(dtype="float32", kv_cache_dtype="float32")


def test_bytes_per_block_of_smollm2():
    # K and V, 30 layers, 3 heads of 64, 4 bytes: 46,080 bytes a token.
    assert memory.bytes_per_block(Shape(), block_size=16, dtype="float32") == 46_080 * 16
    assert memory.bytes_per_block(Shape(), block_size=16, dtype="bfloat16") == 23_040 * 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_dtype_is_the_default_of_the_machine(dtype):
    config = memory.fill_dtypes(EngineConfig(), default_dtype=dtype)
    assert (config.dtype, config.kv_cache_dtype) == (dtype, dtype)


def test_given_dtypes_stay():
    given = EngineConfig(dtype="float32", kv_cache_dtype="bfloat16")
    assert memory.fill_dtypes(given, default_dtype="bfloat16") == given
    half = memory.fill_dtypes(EngineConfig(dtype="float32"), default_dtype="bfloat16")
    assert half.kv_cache_dtype == "float32"


def num_blocks(config=FLOAT32, shape=None, *, platform="cpu", available=PLENTY):
    return memory.auto_num_blocks(
        config, shape or Shape(), platform=platform, available_bytes=available
    )


def with_values(**values):
    return EngineConfig(dtype="float32", kv_cache_dtype="float32", **values)


def test_cpu_takes_half_of_what_is_free_up_to_4_gib():
    one = 46_080 * 16
    assert num_blocks(available=2 * GIB) == GIB // one
    assert num_blocks(available=PLENTY) == 4 * GIB // one


def test_a_fraction_that_is_asked_for_lifts_the_cap():
    config = with_values(memory_fraction=0.25)
    assert num_blocks(config, available=PLENTY) == 16 * GIB // (46_080 * 16)


def test_gpu_takes_nine_tenths():
    large = Shape(num_hidden_layers=32, num_key_value_heads=8, head_dim=128)
    assert num_blocks(shape=large, platform="gpu", available=10 * GIB) == int(9 * GIB) // (
        2 * 32 * 8 * 128 * 4 * 16
    )


def test_no_more_blocks_than_the_request_table_could_use():
    tiny = Shape(num_hidden_layers=1, head_dim=8, max_position_embeddings=100)
    assert num_blocks(shape=tiny) == 64 * 7
    assert num_blocks(with_values(num_rows=40, max_model_len=20), tiny) == 40 * 2


def test_slots_stay_within_int32():
    sliver = Shape(num_hidden_layers=1, num_key_value_heads=1, head_dim=1)
    config = with_values(memory_fraction=1.0, num_rows=1 << 20)
    blocks = num_blocks(config, sliver, available=1 << 50)
    assert blocks * config.block_size < 2**31 - 1


def test_no_room_for_one_block_is_an_error_that_says_how_much_was_there():
    with pytest.raises(
        ValueError, match=r"one takes 737280 bytes, and of the 1000 bytes available"
    ):
        num_blocks(available=1000)


def test_fill_sizes_leaves_nothing_open_and_respects_what_is_given():
    filled = memory.fill_sizes(FLOAT32, Shape(), platform="cpu", available_bytes=PLENTY)
    assert (filled.num_blocks, filled.num_rows, filled.max_model_len) == (5825, 64, 8192)
    assert filled.token_buckets == FLOAT32.buckets
    given = with_values(num_blocks=7, num_rows=33, max_model_len=50, token_buckets=(32, 512))
    assert memory.fill_sizes(given, Shape(), platform="cpu", available_bytes=0) == given


def test_a_small_pool_limits_the_length_that_was_left_open():
    config = with_values(num_blocks=10)
    filled = memory.fill_sizes(config, Shape(), platform="cpu", available_bytes=0)
    assert filled.max_model_len == 160


def test_longer_than_the_model_was_trained_for_is_refused():
    with pytest.raises(ValueError, match=r"max_model_len must be at most 8192.*got 8193"):
        memory.fill_sizes(
            with_values(max_model_len=8193), Shape(), platform="cpu", available_bytes=PLENTY
        )


def machine(tmp_path, files):
    """A /proc and a /sys/fs/cgroup made of the given files."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory.host_available_bytes(tmp_path / "proc", tmp_path / "cgroup")


def test_host_memory_without_control_groups(tmp_path):
    assert machine(tmp_path, {}) == 8000 * 1024


def test_control_group_version_2_limits_through_a_parent(tmp_path):
    files = {
        "proc/self/cgroup": "0::/app/worker\n",
        "cgroup/app/memory.max": "3000000\n",
        "cgroup/app/memory.current": "1500000\n",
        "cgroup/app/memory.stat": "anon 1000000\ninactive_file 500000\n",
        "cgroup/app/worker/memory.max": "max\n",
        "cgroup/app/worker/memory.current": "1000000\n",
    }
    assert machine(tmp_path, files) == 2_000_000


def test_control_group_version_1_and_container_root(tmp_path):
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
        "cgroup/memory/memory.limit_in_bytes": "1000000\n",
        "cgroup/memory/memory.usage_in_bytes": "400000\n",
    }
    assert machine(tmp_path, files) == 600_000


class Device:
    def __init__(self, platform, stats=None):
        self.platform, self._stats = platform, stats

    def memory_stats(self):
        return self._stats


def test_an_accelerator_reports_its_own_memory():
    stats = {"bytes_limit": 1000, "bytes_in_use": 300, "peak_bytes_in_use": 900}
    assert memory.available_bytes(Device("gpu", stats)) == 700


def test_this_machine_has_memory():
    assert memory.available_bytes(Device("cpu")) > 0
