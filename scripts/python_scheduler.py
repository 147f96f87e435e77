"""A lean paged scheduler in plain Python: the baseline of bench_scheduler.py, nothing else.

Lists, dicts and an OrderedDict as the least-recently-used queue of free blocks.
"""

from collections import OrderedDict

import numpy as np

NULL = 2**31 - 1


class Sequence:
    """One request."""

    __slots__ = ("blocks", "computed", "hashes", "max_total", "num_cached", "scheduled", "tokens")

    def __init__(self, tokens, max_total, block_size):
        self.tokens, self.max_total = tokens, max_total
        self.computed = self.num_cached = self.scheduled = 0
        self.blocks, self.hashes = [], []
        chain = 0
        for i in range(0, len(tokens) - block_size + 1, block_size):
            chain = hash((chain, tuple(tokens[i : i + block_size])))
            self.hashes.append(chain)


class PythonScheduler:
    """First come first served, chunked prefill, prefix cache, newest-first preemption."""

    def __init__(self, *, num_rows, num_blocks, max_blocks, block_size, token_budget):
        self.num_rows, self.max_blocks = num_rows, max_blocks
        self.block_size, self.token_budget = block_size, token_budget
        self.ref_counts = [0] * num_blocks
        self.free = OrderedDict((i, None) for i in range(num_blocks))
        self.index, self.hash_of, self.tokens_of = {}, [None] * num_blocks, [None] * num_blocks
        self.running, self.waiting = [], []

    def _take(self):
        block, _ = self.free.popitem(last=False)
        if self.hash_of[block] is not None:
            del self.index[self.hash_of[block]]
            self.hash_of[block] = None
        self.ref_counts[block] = 1
        return block

    def _release(self, sequence):
        for block in reversed(sequence.blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                if self.hash_of[block] is None:
                    self.free.move_to_end(block, last=False)
        sequence.blocks, sequence.num_cached = [], 0

    def _match(self, sequence):
        found, b = [], self.block_size
        for j, chain in enumerate(sequence.hashes[: (len(sequence.tokens) - 1) // b]):
            block = self.index.get(chain)
            if block is None or self.tokens_of[block] != tuple(sequence.tokens[j * b : j * b + b]):
                break
            found.append(block)
        return found

    def schedule(self):
        """Sequences of this step, each with `.scheduled` tokens."""
        out, preempted = [], False
        budget = self._schedule_running(out)
        if budget < 0:
            budget, preempted = -budget, True
        while self.waiting and budget > 0 and len(self.running) < self.num_rows and not preempted:
            sequence = self.waiting[0]
            found = self._match(sequence)
            base = len(found) * self.block_size
            n = min(len(sequence.tokens) - base, budget)
            need = -(-(base + n) // self.block_size) - len(found)
            if need + sum(self.ref_counts[x] == 0 for x in found) > len(self.free):
                break
            for block in found:
                if self.ref_counts[block] == 0:
                    del self.free[block]
                self.ref_counts[block] += 1
            sequence.blocks = found + [self._take() for _ in range(need)]
            sequence.computed, sequence.num_cached, sequence.scheduled = base, len(found), n
            budget -= n
            self.waiting.pop(0)
            self.running.append(sequence)
            out.append(sequence)
        return out

    def _schedule_running(self, out):
        """Grant the budget to running sequences; what is left, negated if one was preempted."""
        budget, i, preempted = self.token_budget, 0, False
        while i < len(self.running) and budget > 0:
            sequence = self.running[i]
            n = min(len(sequence.tokens) - sequence.computed, budget)
            need = -(-(sequence.computed + n) // self.block_size) - len(sequence.blocks)
            while need > len(self.free):
                victim = self.running.pop()
                self._release(victim)
                victim.computed, preempted = 0, True
                self.waiting.insert(0, victim)
                if victim is sequence:
                    return -budget
            sequence.blocks += [self._take() for _ in range(need)]
            sequence.scheduled = n
            budget -= n
            out.append(sequence)
            i += 1
        return -budget if preempted else budget

    def plan(self, out):
        """Flat arrays for the model."""
        b, t = self.block_size, self.token_budget
        token_ids, positions = np.zeros(t, np.int32), np.zeros(t, np.int32)
        slots, row_of = np.full(t, NULL, np.int32), np.full(t, self.num_rows, np.int32)
        start_loc = np.zeros(self.num_rows + 1, np.int32)
        lens = np.zeros(self.num_rows, np.int32)
        tables = np.full((self.num_rows, self.max_blocks), NULL, np.int32)
        i = 0
        for r, sequence in enumerate(out):
            n, a = sequence.scheduled, sequence.computed
            tables[r, : len(sequence.blocks)] = sequence.blocks
            if n == 1:
                token_ids[i], positions[i], row_of[i] = sequence.tokens[a], a, r
                slots[i] = sequence.blocks[a // b] * b + a % b
            else:
                where = np.arange(a, a + n)
                token_ids[i : i + n], positions[i : i + n] = sequence.tokens[a : a + n], where
                row_of[i : i + n] = r
                slots[i : i + n] = tables[r, where // b] * b + where % b
            i += n
            start_loc[r + 1], lens[r] = i, a + n
        start_loc[len(out) + 1 :] = i
        return token_ids, positions, slots, row_of, start_loc, lens, tables

    def commit(self, out, sampled):
        """Append samples, cache full blocks, end what is long enough."""
        b = self.block_size
        for r, sequence in enumerate(out):
            sequence.computed += sequence.scheduled
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(sampled[r])
                if len(sequence.tokens) % b == 0:
                    last = sequence.hashes[-1] if sequence.hashes else 0
                    sequence.hashes.append(hash((last, tuple(sequence.tokens[-b:]))))
            for j in range(sequence.num_cached, sequence.computed // b):
                chain, block = sequence.hashes[j], sequence.blocks[j]
                if chain not in self.index:
                    self.index[chain], self.hash_of[block] = block, chain
                    self.tokens_of[block] = tuple(sequence.tokens[j * b : j * b + b])
                sequence.num_cached = j + 1
        for sequence in out:
            if len(sequence.tokens) >= sequence.max_total:
                self._release(sequence)
                self.running.remove(sequence)
