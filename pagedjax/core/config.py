"""Static sizes and switches of the scheduler: hashable, a static argument of `jax.jit`."""

import dataclasses


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

    def __post_init__(self):
        positive = (
            "num_rows max_num_seqs num_blocks block_size max_model_len max_num_batched_tokens "
            "max_stop_token_ids max_admissions max_retirements max_preemptions index_ways "
            "evict_batch"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_logprobs", "watermark_blocks", "max_beam_width"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.max_num_seqs > self.num_rows:
            raise ValueError(
                f"max_num_seqs must be at most num_rows ({self.num_rows}), got {self.max_num_seqs}"
            )
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
        if self.enable_forks:
            return num_tokens // self.block_size + 2 * rows
        return num_tokens // self.block_size + rows + min(self.max_admissions, rows)

    def max_registrations(self, num_tokens: int) -> int:
        """Most blocks that one commit enters into the prefix index; the rest wait a step."""
        return num_tokens // self.block_size + max(16, self.num_rows // 4)
