"""Static sizes and switches of the scheduler: hashable, a static argument of `jax.jit`."""

import dataclasses
from collections.abc import Callable

SCHEDULING_POLICIES = ("fcfs", "priority", "round_robin", "longest_prefix")
"""Names of the built-in orders of admission, see `pagedjax.core.policies`."""
PREEMPTION_POLICIES = ("newest", "most_tokens", "lowest_priority")
"""Names of the built-in choices of victims."""
PREEMPTION_MODES = ("auto", "recompute", "swap")
"""What becomes of a victim's blocks."""

BATCHING = ("continuous", "static")
KV_CACHE = ("paged", "contiguous", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Everything about the scheduler that fixes a shape or picks a branch at trace time.

    Nothing in here varies from request to request: those values are arrays in the state, so a new
    temperature never means a new compilation.

    Attributes:
      num_rows: S, rows of the request table; waiting and running requests both live in rows.
      max_num_seqs: most rows that run at once; at most `num_rows`.
      num_blocks: N, physical blocks of the KV pool.
      block_size: B, tokens of one block.
      max_model_len: most tokens of one sequence, prompt and output together.
      max_num_batched_tokens: the largest `num_tokens` bucket a step may be asked for.
      max_logprobs: P, most alternatives a request can ask log-probabilities of.
      max_stop_token_ids: Q, most stop token ids of one request.
      enable_prefix_caching: find and share equal prefixes of blocks.
      enable_forks: rows of one group share their prompt's blocks, see `core/fork.py`.
      max_beam_width: most beams of one group, see `core/beam.py`; 0: there are none. Needs
        `enable_forks`.
      max_admissions: A, most rows admitted in one step (the rest wait for the next).
      max_retirements: K, most rows whose blocks are released in one step; `num_rows` releases all.
      max_preemptions: most rows preempted in one step (more follow in the next).
      index_ways: slots of one bucket of the prefix index.
      hash_mask: bits of the block hash that are kept; tests use a few bits to force collisions.
      use_cond: skip rare work with `lax.cond`. True is 10 times faster on a CPU; False gives one
        straight line of kernels, which suits a GPU's command buffer.
      evict_batch: cached blocks to evict at least when evicting at all. Evicting one at a time
        would pay the search on every step under pressure.
      watermark_blocks: blocks that admitting a row must leave free while others run, so that the
        next decode step does not preempt the row just admitted.
      batching: "continuous", rows come and go at every step; or "static", a baseline to compare
        with: a batch is filled as far as places and memory go, then nobody is admitted until all
        of it have ended, and those that end earlier keep their blocks till then.
      kv_cache: "paged"; or a baseline: "contiguous", a row takes blocks for `max_model_len` tokens
        when it is admitted, as an engine without paging must; "none", keys and values serve for one
        token, and all are computed anew for the next. The baselines need prefix caching off.
      scheduling_policy: in which order waiting rows are admitted: one of `SCHEDULING_POLICIES`, or
        a pure function (state, config) -> [S] int32 keys, lower first.
      preemption_policy: which running rows step back first: one of `PREEMPTION_POLICIES`, or such a
        function; the row of the greatest key is the first victim.
      max_passed_over: steps in which rows that came later may be admitted before a waiting row;
        after that it is admitted before all others. 0: no bound.
      time_slice_tokens: tokens that a row of the round robin produces before it yields.
      num_host_blocks: blocks of the second pool in host memory; 0: there is none.
      preemption_mode: what becomes of a victim's blocks. "recompute": they are dropped. "swap":
        they move to the host pool, or are dropped if it has no room. "auto": whichever costs less;
        without a host pool, "recompute".
      max_swap_in_blocks: most blocks that come back from the host pool in one step; a row comes
        back whole or not. 0: as many as the longest row may have.
      swap_cost_per_block: of moving one block one way, for "auto", in any unit.
      recompute_cost_per_token: of computing one token again, in the same unit.
      recompute_cost_per_context: the same, for each token before it.
    """

    num_rows: int
    max_num_seqs: int
    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_num_batched_tokens: int
    max_logprobs: int = 20
    max_stop_token_ids: int = 16
    enable_prefix_caching: bool = True
    enable_forks: bool = False
    max_beam_width: int = 0
    max_admissions: int = 16
    max_retirements: int = 16
    max_preemptions: int = 16
    index_ways: int = 16
    hash_mask: int = 0xFFFFFFFF
    use_cond: bool = True
    evict_batch: int = 1
    watermark_blocks: int = 0
    batching: str = "continuous"
    kv_cache: str = "paged"
    scheduling_policy: str | Callable = "fcfs"
    preemption_policy: str | Callable = "newest"
    max_passed_over: int = 64
    time_slice_tokens: int = 64
    num_host_blocks: int = 0
    preemption_mode: str = "auto"
    max_swap_in_blocks: int = 0
    swap_cost_per_block: float = 1.0
    recompute_cost_per_token: float = 1.0
    recompute_cost_per_context: float = 0.0

    def __post_init__(self):
        positive = (
            "num_rows max_num_seqs num_blocks block_size max_model_len max_num_batched_tokens "
            "max_stop_token_ids max_admissions max_retirements max_preemptions index_ways "
            "evict_batch time_slice_tokens"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_logprobs", "watermark_blocks", "max_passed_over", "max_beam_width"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.max_num_seqs > self.num_rows:
            raise ValueError(
                f"max_num_seqs must be at most num_rows ({self.num_rows}), got {self.max_num_seqs}"
            )
        for name, options in (("batching", BATCHING), ("kv_cache", KV_CACHE)):
            if getattr(self, name) not in options:
                raise ValueError(
                    f"{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}"
                )
        if self.kv_cache != "paged" and self.enable_prefix_caching:
            raise ValueError(
                f"kv_cache {self.kv_cache!r} needs enable_prefix_caching=False: it has no blocks "
                "that could be shared"
            )
        if self.enable_forks and (self.kv_cache, self.batching) != ("paged", "continuous"):
            raise ValueError(
                f"enable_forks needs kv_cache 'paged' and batching 'continuous', got "
                f"{self.kv_cache!r} and {self.batching!r}"
            )
        if self.kv_cache == "contiguous" and self.num_blocks < self.max_blocks_per_seq:
            raise ValueError(
                f"kv_cache 'contiguous' needs num_blocks of at least {self.max_blocks_per_seq}, "
                f"for one sequence of max_model_len ({self.max_model_len}), got {self.num_blocks}"
            )
        for name, known in (
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("preemption_policy", PREEMPTION_POLICIES),
        ):
            policy = getattr(self, name)
            if not callable(policy) and policy not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)} or a function, got {policy!r}"
                )
        if self.batching == "static" and self.scheduling_policy == "round_robin":
            raise ValueError(
                "scheduling_policy must be another than 'round_robin' with batching 'static', got "
                "'round_robin': nobody yields the place in a static batch"
            )
        self._check_swap()
        if self.max_beam_width > min(self.max_num_seqs, self.max_preemptions):
            raise ValueError(
                f"max_beam_width must be at most max_num_seqs ({self.max_num_seqs}) and "
                f"max_preemptions ({self.max_preemptions}), got {self.max_beam_width}"
            )
        if self.max_beam_width and not (self.enable_forks and self.max_logprobs):
            raise ValueError(
                f"max_beam_width needs enable_forks and max_logprobs, got {self.max_beam_width}"
            )
        if not 1 <= self.hash_mask <= 0xFFFFFFFF:
            raise ValueError(f"hash_mask must be in [1, 2**32 - 1], got {self.hash_mask}")
        if self.num_blocks * self.block_size >= 2**31:
            raise ValueError(
                f"num_blocks * block_size must be below 2**31, got {self.num_blocks} * "
                f"{self.block_size}"
            )

    def _check_swap(self):
        mode = self.preemption_mode
        if mode not in PREEMPTION_MODES:
            raise ValueError(
                f"preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, got {mode!r}"
            )
        for name in (
            "num_host_blocks",
            "swap_cost_per_block",
            "recompute_cost_per_token",
            "recompute_cost_per_context",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if mode == "swap" and not self.num_host_blocks:
            raise ValueError("preemption_mode 'swap' needs num_host_blocks above 0")
        if mode == "recompute" and self.num_host_blocks:
            raise ValueError("num_host_blocks must be 0 with preemption_mode 'recompute'")
        longest = self.max_blocks_per_seq
        if self.max_swap_in_blocks and self.max_swap_in_blocks < longest:
            raise ValueError(
                f"max_swap_in_blocks must be 0 or at least {longest}, the blocks of the longest "
                f"sequence, got {self.max_swap_in_blocks}"
            )

    @property
    def swap_in_capacity(self) -> int:
        """C: most blocks that come back from the host pool in one step."""
        most = self.max_swap_in_blocks or self.max_blocks_per_seq
        return min(most, self.num_host_blocks)

    @property
    def max_blocks_per_seq(self) -> int:
        """M: entries of one block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_padded_len(self) -> int:
        """Width of the token table: `max_model_len` rounded up to whole blocks."""
        return self.max_blocks_per_seq * self.block_size

    @property
    def num_index_buckets(self) -> int:
        """Buckets of the prefix index: a power of two with at least 4 slots a block, so that
        about 4 of 16 ways are taken and a full bucket is a one-in-a-million event."""
        need = max(1, -(-4 * self.num_blocks // self.index_ways))
        return 1 << (need - 1).bit_length()

    def max_step_rows(self, num_tokens: int) -> int:
        """R: most rows that a step of `num_tokens` tokens can schedule (each takes at least 1)."""
        return min(self.max_num_seqs, num_tokens)

    def max_new_blocks(self, num_tokens: int) -> int:
        """Most blocks that a step of `num_tokens` tokens can allocate.

        A row's chunk may begin and end inside a block. Where it begins inside one, the row holds
        that block already, unless the block is a copy: a row's that is being admitted, or any
        row's that shares its blocks.
        """
        rows = self.max_step_rows(num_tokens)
        admissions = min(self.max_admissions, rows)
        if self.kv_cache == "contiguous":
            return admissions * self.max_blocks_per_seq
        if self.enable_forks:
            return num_tokens // self.block_size + 2 * rows
        return num_tokens // self.block_size + rows + admissions

    def max_registrations(self, num_tokens: int) -> int:
        """Most blocks that one commit enters into the prefix index; the rest wait a step."""
        return num_tokens // self.block_size + max(16, self.num_rows // 4)
