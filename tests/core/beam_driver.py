"""A scheduler under test that runs beam searches, and the plain search they are compared with."""

import dataclasses

import numpy as np

from pagedjax.core.state import NO_TOKEN, NULL, FinishReason, Status
from tests.core.driver import Driver, null_samples, prefix_hashes

STOP = 0


def continuations(prefix_hash, vocab, count):
    """The "model": tokens by falling log-probability, [(token, logprob)], from the prefix alone."""
    mixed = [(prefix_hash * 0x9E3779B97F4A7C15 + t * 0xC2B2AE3D27D4EB4F) >> 9 for t in range(vocab)]
    logprobs = [np.float32(-0.1 - (x % 1000003) / 300000) for x in mixed]
    order = sorted(range(vocab), key=lambda t: (-logprobs[t], t))
    return [(t, logprobs[t]) for t in order[:count]]


def beam_search(prompt, *, width, max_total, vocab, count, stop=True, salt=0):
    """The search as a person would write it.

    Returns:
      (beams, completed): [(tokens, cum_logprob)], prompt included, the best first.
    """
    beams, completed = [(tuple(prompt), np.float32(0))], []
    while beams and len(beams[0][0]) < max_total:
        candidates = []
        for tokens, total in beams:
            for token, logprob in continuations(prefix_hashes(tokens, salt)[-1], vocab, count):
                longer = ((*tokens, token), np.float32(total + logprob))
                (completed if stop and token == STOP else candidates).append(longer)
        beams = sorted(candidates, key=lambda c: -c[1])[:width]
    return beams, completed


# Of a scheduler that searches; tests of rows that share blocks use it, too.
SEARCHES = {
    "enable_forks": True,
    "max_beam_width": 4,
    "max_logprobs": 6,
    "enable_prefix_caching": False,
    "num_blocks": 18,
    "num_rows": 10,
    "max_num_seqs": 8,
    "max_model_len": 44,
    "hash_mask": 0xFF,
}


@dataclasses.dataclass
class Group:
    rows: list
    prompt: list
    max_total: int
    stop: bool
    count: int
    beams: dict  # row -> (tokens, cum_logprob)
    completed: list = dataclasses.field(default_factory=list)


class BeamDriver(Driver):
    """Also follows each beam search from the outputs alone, as a host would."""

    def __init__(self, *, vocab=6, **sizes):
        super().__init__(alphabet=vocab, **{**SEARCHES, **sizes})
        self.groups: dict[int, Group] = {}
        self.num_searches = 0
        self.counts |= {"searches": 0, "moves": 0, "completed": 0}

    def add_search(self, prompt, width, max_total, *, stop=True, count=None):
        """A beam search in empty rows; returns its number."""
        number = self.num_searches
        self.num_searches += 1
        rows = self.empty_rows()[:width]
        assert len(rows) == width
        count = min(2 * width, self.alphabet) if count is None else count
        stops = np.full(self.config.max_stop_token_ids, NULL, np.int32)
        if stop:
            stops[-1] = STOP
        for index, row in enumerate(rows):
            self.add_request(
                prompt,
                max_total,
                row=row,
                stop=False,
                group=1_000_000 + number,
                beam_leader=np.int32(rows[0]),
                beam_index=np.int32(index),
                num_logprobs=np.int32(count),
                stop_token_ids=stops,
            )
            del self.requests[row]
        first = {rows[0]: (tuple(prompt), np.float32(0))}
        self.groups[number] = Group(rows, list(prompt), max_total, stop, count, first)
        return number

    def abort_search(self, number, which=0):
        """Abort one row of a search: all of it ends."""
        group = self.groups.pop(number)
        mask = np.zeros(self.config.num_rows, bool)
        mask[group.rows[which % len(group.rows)]] = True
        self.state = self.jit.abort(self.state, mask)
        status = np.asarray(self.state.rows.status)[group.rows]
        assert (status == Status.FINISHED).all()

    def drain(self, limit=3000):
        for _ in range(limit):
            if not self.requests and not self.groups:
                break
            self.step()
        assert not self.groups, "beam searches starve"
        super().drain(limit)

    def _sampled(self, plan, token_ids):
        sampled = null_samples(self.config, self.num_tokens, token_ids)
        p = self.config.max_logprobs
        ids = np.full((len(token_ids), p), NULL, np.int32)
        logprobs = np.full((len(token_ids), p), -np.inf, np.float32)
        rows = self.state.rows
        tokens, wish = np.asarray(rows.token_ids), np.asarray(rows.num_logprobs)
        for r in range(int(plan.num_seqs)):
            row = int(plan.row_ids[r])
            if plan.needs_sample[r] and wish[row] > 0:
                prefix = tokens[row, : int(plan.seq_lens[r])]
                last = prefix_hashes(prefix, int(rows.salt[row]))[-1]
                for i, pair in enumerate(continuations(last, self.alphabet, wish[row])):
                    ids[r, i], logprobs[r, i] = pair
        self.top = ids, logprobs
        return dataclasses.replace(sampled, top_token_ids=ids, top_logprobs=logprobs)

    def _collect(self, output):
        super()._collect(output)
        rank = np.asarray(output.rank)
        for number, group in list(self.groups.items()):
            self._follow(number, group, output, rank)

    def _follow(self, number, group, output, rank):
        rows = group.rows
        status = np.asarray(output.status)
        parent, cum = np.asarray(output.beam_parent), np.asarray(output.cum_logprob)
        token = np.asarray(output.token_ids)
        over = status[rows] == Status.FINISHED
        assert over.all() or not over.any(), "a group ends as a whole"
        reason = int(np.asarray(output.finish_reason)[rows[0]])
        if over.all() and reason == FinishReason.ERROR:
            self.counts["errors"] += 1
            del self.groups[number]
            return
        carried = [row for row in rows if parent[row] != NULL]
        if carried or over.all():  # the group has sampled
            for row, (tokens, total) in group.beams.items():
                assert bool(self.plan.needs_sample[rank[row]]), "beams sample together"
                for other, logprob in zip(*(x[rank[row]] for x in self.top), strict=True):
                    if group.stop and other == STOP:
                        group.completed.append(((*tokens, STOP), np.float32(total + logprob)))
            old = group.beams
            group.beams = {r: ((*old[parent[r]][0], int(token[r])), cum[r]) for r in carried}
            self.counts["moves"] += sum(int(parent[r]) != r for r in carried)
        self._compare_with_state(group, status, token)
        if over.all():
            self._check_result(group, reason)
            del self.groups[number]

    def _compare_with_state(self, group, status, token):
        state = self.state
        for row in group.rows:
            if row in group.beams:
                tokens = group.beams[row][0]
                got = np.asarray(state.rows.token_ids)[row, : int(state.rows.num_tokens[row])]
                assert got.tolist() == list(tokens)
            elif status[row] != Status.FINISHED:
                assert status[row] == Status.SPARE
                assert int(state.blocks.num_blocks_held[row]) == 0
                assert token[row] == NO_TOKEN

    def _check_result(self, group, reason):
        beams, completed = beam_search(
            group.prompt,
            width=len(group.rows),
            max_total=group.max_total,
            vocab=self.alphabet,
            count=group.count,
            stop=group.stop,
        )
        assert sorted(group.beams.values()) == sorted(beams)
        assert sorted(group.completed) == sorted(completed)
        assert reason == (FinishReason.LENGTH if beams else FinishReason.STOP)
        self.counts["searches"] += 1
        self.counts["completed"] += len(completed)
