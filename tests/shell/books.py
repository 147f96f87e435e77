"""What an engine's counts must add up to when all that was asked of it under pressure is done."""


def check_books(stats, mode, *, num_requests, num_outputs):
    """Nothing leaked, what went out came back, and every token is accounted for.

    Args:
      stats: of an idle engine that has served `num_requests` requests, none of which was aborted,
        in a pool too small for them. mode: its `preemption_mode`.
      num_outputs: tokens of their outputs together.
    """
    assert stats.preemptions > 20
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks
    assert stats.num_free_host_blocks == stats.num_host_blocks
    assert stats.swaps_in == stats.swaps_out
    assert stats.blocks_swapped_in == stats.blocks_swapped_out
    assert stats.output_tokens == num_outputs
    # Every token but a request's last is computed once, and what was lost once more.
    once = stats.prompt_tokens - stats.cached_tokens + num_outputs - num_requests
    assert stats.computed_tokens == once + stats.recomputed_tokens
    if mode == "recompute":
        assert stats.swaps_out == 0 < stats.recomputed_tokens
    if mode == "swap":
        assert stats.swaps_out == stats.preemptions
        assert stats.recomputed_tokens == 0
    if mode == "auto":
        assert 0 < stats.swaps_out < stats.preemptions
