"""What the next step will find to do, from what the last outputs said.

Steps are launched before the output of the one before has been read. To choose a bucket the host
therefore plays the scheduler's rule forward: the same order, the same budget, the same growth by
one token; rows that wait for another's prompt start when that is computed. Three things it cannot
know: stop tokens, what admission finds in the prefix cache
(`pagedjax.engine.prefix_forecast` estimates it), and preemption. A wrong guess costs padding or a
delay of a step, never a wrong token, and the next output sets it right.
"""

from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Limits of the scheduler that the forecast follows."""

    max_num_seqs: int
    max_admissions: int
    block_size: int
    watermark_blocks: int = 0
    max_blocks_per_seq: int = 0
    batching: str = "continuous"
    kv_cache: str = "paged"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Live rows in the scheduler's order: running before waiting, older before newer. All [n].

    Attributes:
      running: bool.
      total: int, tokens known, prompt and output.
      computed: int, of them computed; for waiting rows, expected in the prefix cache.
      most: int, the row ends when `total` gets there.
      unseen: int, steps in flight that were launched before the row was there.
      swapped: bool, waiting rows that have computed all of `computed`, but need blocks for it.
      num_available_blocks: free or evictable.
      admitting: False when the head of the queue is known not to fit into memory (only the device
        knows exactly what is cached, and who holds it), or a static batch is closed.
      num_ended: rows of a static batch that have ended and keep their places while others run.
      preempted: bool, waiting rows of a static batch, which come back though it is closed.
    """

    running: np.ndarray
    total: np.ndarray
    computed: np.ndarray
    most: np.ndarray
    unseen: np.ndarray
    num_available_blocks: int
    admitting: bool
    num_ended: int = 0
    swapped: np.ndarray | bool = False
    preempted: np.ndarray | bool = False
    prompt: np.ndarray | None = None
    group: np.ndarray | None = None
    """int, [n] like prompt: tokens of the prompt, which rows of one group share; -1 is alone. None:
    no row shares."""
    followers: np.ndarray | None = None
    """int, [n]: rows that will carry on a beam search beside this one once it has its first output.
    """

    def select(self, keep: np.ndarray) -> "Rows":
        """Some of the rows, by mask or by index."""
        arrays = {
            field.name: value[keep]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray)
        }
        return replace(self, **arrays)


def share_prompts(rows: Rows) -> tuple[Rows, np.ndarray]:
    """Rows whose prompt another one has computed start behind it, those whose prompt another one is
    to compute wait; -> (rows, held [n] bool: the ones that wait)."""
    held = np.zeros(len(rows.running), bool)
    if rows.group is None or not (rows.group >= 0).any():
        return rows, held
    grouped = rows.group >= 0
    has_prompt = rows.running & (rows.computed >= rows.prompt - 1) & grouped
    ready = grouped & ~rows.running & np.isin(rows.group, rows.group[has_prompt])
    common = np.minimum(rows.prompt, rows.total - 1)
    first = np.zeros(len(held), bool)
    first[np.unique(rows.group, return_index=True)[1]] = True
    held = grouped & ~rows.running & ~ready & ~first
    computed = np.where(ready, np.maximum(rows.computed, common), rows.computed)
    return replace(rows, computed=computed), held


def grants(rows: Rows, num_tokens: int, sizes: Sizes) -> np.ndarray:
    """[n] int: tokens that a step of this budget computes of each row."""
    taking_part = rows.running | _candidates(rows, num_tokens, sizes)
    want = np.where(taking_part, rows.total - rows.computed, 0)
    return np.clip(num_tokens - (np.cumsum(want) - want), 0, want)


def advance(rows: Rows, num_tokens: int, sizes: Sizes) -> Rows:
    """The rows after a step of this budget; those that reach their length are gone."""
    rows, _ = share_prompts(rows)
    grant = grants(rows, num_tokens, sizes)
    computed = rows.computed + grant
    sampled = (grant > 0) & (computed == rows.total)
    total = rows.total + sampled
    stay = total < rows.most
    running = rows.running | (grant > 0)
    # A row that starts inside a block gets a copy of it.
    start = rows.computed // sizes.block_size * sizes.block_size
    before = np.where(rows.running | (grant == 0), rows.computed, start)
    used = _new_blocks(rows.running, before, computed, rows.total, sizes)[running].sum()
    if sizes.kv_cache == "none":
        computed = np.where(sampled, 0, computed)
    return replace(
        rows,
        running=running,
        total=total,
        computed=computed,
        unseen=np.maximum(rows.unseen - 1, 0),
        num_available_blocks=rows.num_available_blocks - int(used),
        **_batch_after(rows, grant, running & stay, num_tokens, sizes),
    ).select(stay)


def _batch_after(rows: Rows, grant, goes_on, num_tokens: int, sizes: Sizes) -> dict:
    """Of the rows after a step, as `pagedjax.core.static_batch` has it: `admitting`, `num_ended`.

    Args: grant, goes_on: [n], tokens of the step; bool, running and not ended after it.
    """
    if sizes.batching != "static":
        return {"admitting": rows.admitting, "num_ended": 0}
    if not goes_on.any():
        return {"admitting": True, "num_ended": 0}
    admitted = int((~rows.running & (grant > 0)).sum())
    too_short = grant.sum() >= num_tokens or admitted == sizes.max_admissions
    waits = bool((~rows.running & (grant == 0)).any())
    is_open = rows.admitting or not rows.running.any()
    ended = int(((rows.running | (grant > 0)) & ~goes_on).sum())
    return {"admitting": is_open and waits and too_short, "num_ended": rows.num_ended + ended}


def demand(rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """(rows that need one token, tokens that all other rows need) at the next step.

    Waiting rows count as far as they can be admitted: places, admissions a step, free blocks.
    """
    rows, _ = share_prompts(rows)
    left = rows.total - rows.computed
    decoding = rows.running & (left == 1)
    running_prefill = int(left[rows.running & ~decoding].sum())
    waiting = int(left[_candidates(rows, sizes.max_num_seqs, sizes)].sum())
    num_decoding = int(decoding.sum())
    if rows.followers is not None:
        num_decoding += int(rows.followers[decoding & (rows.total > rows.prompt)].sum())
    return num_decoding, running_prefill + waiting


def num_spare_blocks(rows: Rows, sizes: Sizes) -> int:
    """Available blocks less those that running rows need for the tokens they have."""
    needs = _new_blocks(rows.running, rows.computed, rows.total, rows.total, sizes)[rows.running]
    return rows.num_available_blocks - int(needs.sum())


def _candidates(rows: Rows, num_tokens: int, sizes: Sizes) -> np.ndarray:
    """[n] bool: waiting rows that a step may admit."""
    num_running = int(rows.running.sum())
    ready = ~rows.running & ~share_prompts(rows)[1]
    if not rows.admitting and num_running:
        ready &= rows.preempted
    rank = np.where(ready, num_running + np.cumsum(ready) - 1, len(rows.running) + num_running)
    places = sizes.max_num_seqs - (rows.num_ended if num_running else 0)
    end = min(num_running + sizes.max_admissions, places, max(num_tokens, 1))
    candidates = ready & (rank < end) & (rows.unseen == 0)
    # As in the core: all that is known of a row must fit, or it waits and those behind it too.
    # Cached blocks are taken to be held by somebody; those that are not cost one each.
    cached = np.where(rows.swapped, 0, rows.computed) // sizes.block_size
    whole = -(-rows.total // sizes.block_size) - cached
    if sizes.kv_cache == "contiguous":
        whole = np.full_like(whole, sizes.max_blocks_per_seq)
    needs = np.where(candidates, whole, 0)
    room = num_spare_blocks(rows, sizes) - np.where(rank > 0, sizes.watermark_blocks, 0)
    return candidates & (np.cumsum(needs) <= room)


def _new_blocks(
    running: np.ndarray, before: np.ndarray, after: np.ndarray, total: np.ndarray, sizes: Sizes
) -> np.ndarray:
    """[n] int: blocks that rows take when their computed tokens go from `before` to `after`."""
    if sizes.kv_cache == "contiguous":
        return np.where(running, 0, sizes.max_blocks_per_seq)
    if sizes.kv_cache == "none":  # a row that has run holds the blocks of all its tokens but one
        before = np.maximum(before, np.where(running, total - 1, 0))
        after = np.maximum(before, after)
    return -(-after // sizes.block_size) + (-before // sizes.block_size)
