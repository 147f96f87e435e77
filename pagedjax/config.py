"""The engine's settings: one frozen dataclass, TOML files, command-line flags over them.

Precedence, weakest first: the defaults of `EngineConfig`, a file (`--config FILE`), flags. A flag
that is not given never overrides the file. What is left open (`None` or "auto") is decided from the
machine and the model by `pagedjax.memory`.
"""

import dataclasses
import difflib
import itertools
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pagedjax.config_checks import check_policy, check_range, check_type

Dtype = Literal["auto", "float32", "bfloat16"]
CacheDtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "xla", "pallas", "reference"]
PreemptionMode = Literal["auto", "recompute", "swap"]
SCHEDULING_POLICIES = ("fcfs", "priority", "round_robin", "longest_prefix")
PREEMPTION_POLICIES = ("newest", "most_tokens", "lowest_priority")

# Slots are int32 and the largest int32 is the null sentinel, so the last usable slot lies below it.
MAX_SLOTS = 2**31 - 2
MAX_SEED = 2**32 - 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from besides the model itself."""

    dtype: Dtype = "auto"
    """Type of weights and activations. auto: bfloat16 on a GPU and on CPUs with bfloat16 matrix
    instructions (AMX, AVX-512), float32 on others. Products accumulate in float32 either way.
    There is no float16 here: GPUs multiply bfloat16 as fast, CPUs would convert it every time."""

    kv_cache_dtype: CacheDtype = "auto"
    """Type of the KV pool. auto: the same as dtype. float16 has 3 bits more than bfloat16 in the
    same memory, but numbers above 65,504 become infinite, and such a request ends with an error."""

    attention: Attention = "auto"
    """Implementation of paged attention. auto: the best one that the platform has."""

    block_size: int = 16
    """Tokens in one block of the KV pool."""

    num_blocks: int | None = None
    """Blocks in the KV pool. None: sized from memory, see memory_fraction."""

    memory_fraction: float | None = None
    """Share of the memory still available after the weights are loaded that the KV pool may take
    when num_blocks is not given. None: 0.9 of a GPU's; on CPU 0.5 of the machine's (or the
    container's), at most 4 GiB. In any case no more than the whole request table filled to
    max_model_len could use."""

    max_num_seqs: int = 32
    """Most sequences in one step."""

    num_rows: int | None = None
    """Rows of the request table: running and waiting sequences the device knows of. None: twice
    max_num_seqs, so that a place that falls free is filled by the same step that sees it."""

    max_num_batched_tokens: int = 512
    """Most tokens in one step, over prompts and decoding rows together."""

    token_buckets: tuple[int, ...] | None = None
    """Sizes that a step is compiled for, ascending; the largest is max_num_batched_tokens. None:
    a few powers of two, see default_token_buckets."""

    max_model_len: int | None = None
    """Most tokens in one sequence, prompt and output. None: what the model was trained for, or what
    fits into the pool if that is less."""

    enable_prefix_caching: bool = True
    """Whether blocks of earlier requests are kept and reused for the same leading tokens."""

    max_queue_size: int = 1024
    """Most requests waiting outside the request table; further ones are refused (HTTP 429)."""

    watermark: float = 0.01
    """Share of the KV pool that admitting a request must leave free while others run. Without it
    the next tokens of those that run would soon push the new one out again."""

    batching: Literal["continuous", "static"] = "continuous"
    """continuous: requests come and go at every step. static, to compare with: a batch is filled,
    and nobody joins or leaves its memory until all of it have ended."""

    kv_cache: Literal["paged", "contiguous", "none"] = "paged"
    """paged: blocks are taken as tokens come. To compare with: contiguous, each request takes the
    blocks of max_model_len tokens at once, as without paging; none, nothing is kept and every token
    is computed anew for the next. These two need --no-enable-prefix-caching."""

    scheduling_policy: str = "fcfs"
    """Which waiting request starts next. fcfs: first come, first served. priority: the lowest
    priority value first (a request says its own). round_robin: time slices, see
    time_slice_tokens. longest_prefix: the one with most of its prompt in the prefix cache.
    module:function: a function of yours, see pagedjax.core.policies."""

    preemption_policy: str | None = None
    """Which running request steps back when blocks run out. newest: the latest arrival.
    most_tokens: the one that has generated most. lowest_priority: the greatest priority value.
    module:function: yours. None: lowest_priority if scheduling_policy is priority, else newest.
    The oldest running request never steps back."""

    preemption_mode: PreemptionMode = "auto"
    """What becomes of the blocks of a request that steps back. recompute: they are dropped, and
    computed again when it resumes. swap: they move to host memory (swap_space_gib) and back; what
    has no room there is recomputed. auto: whichever takes less time, by swap_gib_per_s and
    recompute_tokens_per_s; without swap space, recompute."""

    swap_space_gib: float = 0.0
    """Host memory for the blocks of requests that have stepped back, in GiB. 0: none."""

    num_host_blocks: int | None = None
    """The same in blocks. None: as many as fit into swap_space_gib."""

    swap_gib_per_s: float | None = None
    """How fast blocks move between the device and host memory, one way. None: 8 on a CPU, 20 on a
    GPU (PCIe 4.0)."""

    recompute_tokens_per_s: float | None = None
    """How fast a prompt is computed again, while its context is short. None: 1,000 on a CPU, 20,000
    on a GPU."""

    max_passed_over: int = 64
    """Steps in which later requests may start before a waiting one; then it goes before all others.
    0: no bound, and a request that the policy never chooses waits forever."""

    time_slice_tokens: int = 64
    """Tokens that a request produces before it yields its place to those that wait, under the
    scheduling policy round_robin."""

    deterministic: bool = False
    """Bit-exact mode: tokens and logprobs of a request are the same to the last bit alone or among
    others, cold or from the cache, however its prompt is cut and whether it was preempted. Slower:
    see docs/determinism.md."""

    max_logprobs: int = 20
    """Most top logprobs that one request may ask for."""

    max_stop_token_ids: int = 16
    """Most stop token ids of one request, the model's end-of-sequence tokens among them."""

    max_beam_width: int = 8
    """Most beams of one beam search; at most max_num_seqs, and twice as many are to be at most
    max_logprobs. 0 leaves beam search out of the compiled steps."""

    seed: int = 0
    """Where the seeds of requests that bring none are drawn from."""

    compilation_cache_dir: str | None = None
    """Folder that keeps compiled programs, so that the next start need not compile. None: the one
    that JAX has been given already, if any, else "compiled" in ~/.cache/pagedjax (or in what the
    environment variable PAGEDJAX_CACHE says). off: none of ours. JAX has one such folder for the
    whole process."""

    compile_threads: int | None = None
    """Step sizes that are compiled at the same time at start. Each takes memory of its own while it
    compiles, so fewer need less. None: one for each core, at most 4."""

    check_invariants: bool = False
    """Check the whole state after every step, stop at the first violation. Slow; for debugging."""

    event_log: str | None = None
    """File to which every event is written from which the scheduler's states can be made again
    (scripts/replay.py). A log that is there already is kept under another name. None: no log."""

    event_log_text: bool = False
    """Write the tokens of prompts and outputs into the event log as they are, which is to write the
    text. Needed to replay with the model. Otherwise tokens get other names that say only which
    requests begin alike, and lengths."""

    event_log_kv: bool = False
    """Write a checksum of the KV blocks in use, too, whenever one of the scheduler is written. The
    whole pool is read for it. Needs event_log_text."""

    event_log_checksum_every: int = 1
    """Write a checksum of the scheduler's state into the event log after every so many steps."""

    def __post_init__(self) -> None:
        """Raises `ValueError` naming the field, the value given and the values accepted."""
        for field in dataclasses.fields(self):
            check_type(field.name, getattr(self, field.name), _hints()[field.name])
        check_range("block_size", self.block_size, 1, 1024)
        check_range("num_blocks", self.num_blocks, 1, MAX_SLOTS // self.block_size)
        check_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        check_range("num_rows", self.num_rows, self.max_num_seqs, 1 << 20, "max_num_seqs")
        check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        check_range("max_model_len", self.max_model_len, 2, 1 << 24)
        check_range("max_queue_size", self.max_queue_size, 0, 1 << 24)
        check_range("max_passed_over", self.max_passed_over, 0, 1 << 24)
        check_range("time_slice_tokens", self.time_slice_tokens, 1, 1 << 24)
        check_policy("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_policy("preemption_policy", self.preemption_policy, PREEMPTION_POLICIES)
        self._check_swap()
        check_range("max_logprobs", self.max_logprobs, 0, 1024)
        check_range("max_stop_token_ids", self.max_stop_token_ids, 1, 1024)
        check_range("max_beam_width", self.max_beam_width, 0, 1024)
        check_range("seed", self.seed, 0, MAX_SEED)
        check_range("compile_threads", self.compile_threads, 1, 1024)
        check_range("event_log_checksum_every", self.event_log_checksum_every, 1, 1 << 30)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction must be above 0 and at most 1, or left out "
                f"(got {self.memory_fraction})"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1 (got {self.watermark})")
        if self.kv_cache != "paged" and self.enable_prefix_caching:
            raise ValueError(
                f"enable_prefix_caching must be false with kv_cache {self.kv_cache!r} (got true): "
                "there are no blocks that could be shared"
            )
        if self.batching == "static" and self.scheduling_policy == "round_robin":
            raise ValueError(
                "scheduling_policy must be another than round_robin with batching static (got "
                "round_robin): nobody yields the place in a static batch"
            )
        if self.compilation_cache_dir == "":
            raise ValueError("compilation_cache_dir must be a folder, or off (got '')")
        if self.event_log == "":
            raise ValueError("event_log must be a file, or left out (got '')")
        for name, needs in (("event_log_text", "event_log"), ("event_log_kv", "event_log_text")):
            if getattr(self, name) and not getattr(self, needs):
                raise ValueError(f"{name} must be false without {needs} (got True)")
        self._check_buckets()

    def _check_swap(self) -> None:
        check_range("num_host_blocks", self.num_host_blocks, 0, MAX_SLOTS // self.block_size)
        if self.swap_space_gib < 0:
            raise ValueError(f"swap_space_gib must be at least 0 (got {self.swap_space_gib})")
        for name in ("swap_gib_per_s", "recompute_tokens_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0 (got {value})")
        if self.swap_space_gib and self.num_host_blocks is not None:
            raise ValueError(
                f"swap_space_gib is {self.swap_space_gib} and num_host_blocks "
                f"{self.num_host_blocks}; give one"
            )
        has_space = bool(self.swap_space_gib or self.num_host_blocks)
        if self.preemption_mode == "swap" and not has_space:
            raise ValueError("preemption_mode swap needs swap_space_gib or num_host_blocks above 0")
        if self.preemption_mode == "recompute" and has_space:
            raise ValueError("preemption_mode recompute never uses swap_space_gib; leave it 0")

    def _check_buckets(self) -> None:
        buckets = self.token_buckets
        if buckets is None:
            return
        ascending = all(a < b for a, b in itertools.pairwise(buckets))
        if not buckets or buckets[0] < 1 or not ascending:
            raise ValueError(
                f"token_buckets must be positive and strictly ascending (got {list(buckets)})"
            )
        if buckets[-1] != self.max_num_batched_tokens:
            raise ValueError(
                f"token_buckets must end with max_num_batched_tokens, which is "
                f"{self.max_num_batched_tokens} (got {list(buckets)})"
            )

    @property
    def buckets(self) -> tuple[int, ...]:
        """The static step sizes (`num_tokens`), ascending."""
        if self.token_buckets is not None:
            return self.token_buckets
        return default_token_buckets(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def table_rows(self) -> int:
        """Rows S of the request table."""
        return 2 * self.max_num_seqs if self.num_rows is None else self.num_rows


def default_token_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """Step sizes: 1, powers of two from 4 on, max_num_seqs (all rows decode) and the budget.

    Each size is one compilation at start, of about ten seconds on two cores, so sizes are left out
    where little is lost: 2 (a step of 4 costs nearly the same), and those between 256 and the
    budget (a prompt fills a smaller bucket in two steps).
    """
    powers = {1 << i for i in range(2, 9) if 1 << i < max_num_batched_tokens}
    decode_only = min(max_num_seqs, max_num_batched_tokens)
    return tuple(sorted({1} | powers | {decode_only, max_num_batched_tokens}))


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Settings from a TOML file (or the defaults), with `overrides` (field name -> value) on top.

    Raises `ValueError` for a key that is no field (with the nearest one that is), a value out of
    range or a file that is not TOML, and `FileNotFoundError` for a file that is not there.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not a TOML file: {error}") from error
        _refuse_unknown(values, f"in {path}")
    _refuse_unknown(overrides or {}, "among the overrides")
    values |= overrides or {}
    return EngineConfig(**{key: _from_plain(key, value) for key, value in values.items()})


def parse_args(
    args_type: type[T], argv: Sequence[str] | None = None, *, description: str = ""
) -> T:
    """Parses a command line into a dataclass with fields `config: Path | None` and
    `engine: EngineConfig`, and any others; every field has a default.

    The file named by `--config` is read first and its values become the defaults of the flags, so a
    flag that is not given leaves the file's value standing. Every field of `EngineConfig` is a flag
    (`--max-num-seqs 8`, `--no-enable-prefix-caching`). A mistake is reported on stderr and the
    program exits with status 2.
    """
    import argparse
    import sys

    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    argv = list(sys.argv[1:] if argv is None else argv)
    path = first.parse_known_args(argv)[0].config

    try:
        given = {} if path is None else {"engine": load_config(path), "config": Path(path)}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return tyro.cli(
        args_type,
        args=argv,
        default=args_type(**given),
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _hints() -> dict[str, Any]:
    return typing.get_type_hints(EngineConfig)


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ValueError(f"unknown key {key!r} {where}; {hint}")


_FLOATS = (
    "memory_fraction",
    "watermark",
    "swap_space_gib",
    "swap_gib_per_s",
    "recompute_tokens_per_s",
)


def _from_plain(key: str, value: Any) -> Any:
    """TOML and JSON have arrays, the dataclass tuples; a whole number stands for a float, and
    callers in Python may have a path for a folder's name."""
    if key == "token_buckets" and isinstance(value, list):
        return tuple(value)
    if key in _FLOATS and type(value) is int:
        return float(value)
    if key in ("compilation_cache_dir", "event_log") and isinstance(value, Path):
        return str(value)
    return value
