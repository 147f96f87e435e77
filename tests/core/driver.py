"""A scheduler under test beside a shadow KV pool.

Every slot of the shadow holds a hash of the token prefix that should have produced it. After each
plan, every context slot of every scheduled row must hold exactly the hash of its own prefix: any
wrong sharing, early reuse, lost copy or misplaced write shows at once, without a model.

Compiling a configuration costs more than thousands of its steps, so most tests share a few. How
large the pool is needs none of its own: a driver with `pool` blocks is told of so many of its
`num_blocks`, as the simulator is (which tests/core/test_simulate.py compares with an engine that
really has so many, step by step).
"""

import dataclasses
from functools import lru_cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.commit import commit
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.invariants import assert_invariants, check_invariants
from pagedjax.core.requests import RequestParams, abort, add_request
from pagedjax.core.schedule import schedule
from pagedjax.core.state import NULL, FinishReason, Status, init_scheduler
from pagedjax.sampling import Sampled
from pagedjax.simulate.loop import give_back, withhold

MASK = (1 << 61) - 1
ALPHABET = 7
STOP_TOKEN = 6
# Blocks all of which collide with others, evicted two at a time; every ended row leaves at once.
COLLIDING = {"hash_mask": 3, "evict_batch": 2, "max_retirements": 8}


def prefix_hashes(tokens, salt=0):
    """Hash of every prefix of `tokens`."""
    h, out = salt + 1, []
    for token in tokens:
        h = (h * 1000003 + int(token) + 12345) & MASK
        out.append(h)
    return out


def next_token(prefix_hash, alphabet=ALPHABET, seed=0):
    """The "model": the next token depends on the prefix, and on the request's seed, alone."""
    return int(((prefix_hash + seed * 7919) * 0x9E3779B97F4A7C15 >> 17) % alphabet)


def expected_output(prompt, salt, max_total, stop=True, alphabet=ALPHABET, seed=0):
    """All tokens of a request computed alone."""
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(prefix_hashes(tokens, salt)[-1], alphabet, seed))
        if stop and tokens[-1] == STOP_TOKEN:
            break
    return tokens


def make_params(config, max_total, *, salt=0, stop=True, **changes):
    """RequestParams with greedy defaults."""
    stops = np.full(config.max_stop_token_ids, NULL, np.int32)
    if stop:
        stops[0] = STOP_TOKEN
    values = {
        "max_total_tokens": np.int32(max_total),
        "min_output_tokens": np.int32(0),
        "stop_token_ids": stops,
        "temperature": np.float32(0),
        "top_k": np.int32(0),
        "top_p": np.float32(1),
        "min_p": np.float32(0),
        "seed": np.uint32(0),
        "num_logprobs": np.int32(-1),
        "salt": np.uint32(salt),
        "priority": np.int32(0),
        "group": NULL,
        "beam_leader": NULL,
        "beam_index": np.int32(0),
    }
    return RequestParams(**{**values, **changes})


def null_samples(config, num_tokens, token_ids):
    """Sampled with these tokens [R] and nothing else."""
    r, p = config.max_step_rows(num_tokens), config.max_logprobs
    return Sampled(
        token_ids=jnp.asarray(token_ids, jnp.int32),
        logprob=jnp.zeros(r),
        top_token_ids=jnp.zeros((r, p), jnp.int32),
        top_logprobs=jnp.zeros((r, p)),
        nan=jnp.zeros(r, bool),
    )


def check_whole(state, usable, plan=None, *, config):
    """`check_invariants` of a state of which blocks of both pools are withheld."""
    whole = dataclasses.replace(
        state, blocks=give_back(state.blocks, usable[0]), swap=give_back(state.swap, usable[1])
    )
    return check_invariants(whole, plan=plan, config=config)


@lru_cache(maxsize=32)
def compiled(config, num_tokens):
    """The jitted functions of one configuration, shared by all drivers of it.

    They run on small arrays for a few thousand steps, so compiling is most of the cost: without
    LLVM's optimisations it takes two thirds of the time.
    """
    quick = {"compiler_options": {"xla_backend_optimization_level": 0}}
    return SimpleNamespace(
        schedule=jax.jit(
            partial(schedule, config=config, num_tokens=num_tokens), donate_argnums=0, **quick
        ),
        commit=jax.jit(partial(commit, config=config), donate_argnums=0, **quick),
        add=jax.jit(partial(add_request, config=config), donate_argnums=0, **quick),
        abort=jax.jit(partial(abort), donate_argnums=0),
        check=jax.jit(partial(check_whole, config=config), **quick),
    )


@dataclasses.dataclass
class Request:
    prompt: list
    max_total: int
    salt: int
    stop: bool
    seed: int = 0


class Driver:
    """Runs one scheduler, checks everything after every half step.

    `pool`, `host_pool`: so many blocks of `num_blocks` and `num_host_blocks` may be used.
    """

    def __init__(self, *, alphabet=ALPHABET, num_tokens=24, pool=None, host_pool=None, **sizes):
        defaults = {
            "num_rows": 8,
            "max_num_seqs": 6,
            "num_blocks": 40,
            "block_size": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 24,
            "max_logprobs": 2,
            "max_stop_token_ids": 2,
            "max_admissions": 4,
            "max_retirements": 3,
            "index_ways": 8,
        }
        self.config = c = SchedulerConfig(**{**defaults, **sizes})
        self.alphabet, self.num_tokens = alphabet, num_tokens
        self.jit = compiled(c, num_tokens)
        self.pool = c.num_blocks if pool is None else pool
        self.host_pool = c.num_host_blocks if host_pool is None else host_pool
        assert self.pool <= c.num_blocks
        assert self.host_pool <= c.num_host_blocks
        state = init_scheduler(c)
        self.state = dataclasses.replace(
            state,
            blocks=withhold(state.blocks, self.pool),
            swap=withhold(state.swap, self.host_pool),
        )
        self.kv = np.zeros(c.num_blocks * c.block_size, object)
        self.host_kv = np.zeros(c.num_host_blocks * c.block_size, object)
        self.requests: dict[int, Request] = {}
        self.idle = 0
        self.counts = {"finished": 0, "errors": 0, "aborted": 0, "hit_tokens": 0, "copies": 0}
        self.plan = self.output = None

    # ---- what a test may do -------------------------------------------------------------------
    def empty_rows(self):
        free = np.flatnonzero(np.asarray(self.state.rows.status) == Status.EMPTY)
        return [int(r) for r in free]

    def add_request(
        self,
        prompt,
        max_total,
        *,
        salt=0,
        stop=True,
        row=None,
        seed=0,
        group=NULL,
        priority=0,
        **changes,
    ):
        """Put a request into an empty row; returns the row."""
        row = self.empty_rows()[0] if row is None else row
        c = self.config
        if -(-(max_total - 1) // c.block_size) > self.pool:
            max_total = c.max_model_len + 1  # refused, as an engine with such a pool would
        padded = np.full(c.max_padded_len, 3, np.int32)
        padded[: len(prompt)] = prompt
        own = {
            "seed": np.uint32(seed),
            "group": np.int32(group),
            "priority": np.int32(priority),
        }
        params = make_params(c, max_total, salt=salt, stop=stop, **own, **changes)
        self.state = self.jit.add(self.state, np.int32(row), padded, np.int32(len(prompt)), params)
        self.requests[row] = Request(list(map(int, prompt)), max_total, salt, stop, seed)
        return row

    def add_group(self, prompt, max_total, num, *, group, **options):
        """`num` requests of one prompt and different seeds in empty rows; returns the rows."""
        return [
            self.add_request(prompt, max_total, seed=seed, group=group, **options)
            for seed in range(num)
        ]

    def abort_row(self, row):
        mask = np.zeros(self.config.num_rows, bool)
        mask[row] = True
        self.state = self.jit.abort(self.state, mask)
        self.requests.pop(row)
        self.counts["aborted"] += 1

    def check(self, state=None, plan=None):
        """The violated invariants of a state, of the driver's own by default."""
        usable = np.int32([self.pool, self.host_pool])
        return self.jit.check(self.state if state is None else state, usable, plan)

    def step(self):
        status_before = np.asarray(self.state.rows.status).copy()
        self.state, plan = self.jit.schedule(self.state)
        assert_invariants(self.check(plan=plan))
        samples = self._model(plan, status_before)
        self.state, output = self.jit.commit(self.state, plan, self._sampled(plan, samples))
        assert_invariants(self.check())
        self.plan, self.output = plan, output
        self._nobody_starves(output)
        self._collect(output)

    def drain(self, limit=3000):
        """Step until every request has ended and every block has come back."""
        for _ in range(limit):
            if not self.requests:
                break
            self.step()
        assert not self.requests, "requests starve"
        # A row is EMPTY again one schedule after it ended; few rows retire in one step.
        for _ in range(2 + self.config.num_rows):
            self.step()
        assert (np.asarray(self.state.blocks.ref_counts) == 0).all()
        assert int(self.state.swap.num_free) == self.host_pool

    def _sampled(self, plan, token_ids):
        return null_samples(self.config, self.num_tokens, token_ids)

    # ---- the shadow ---------------------------------------------------------------------------
    def _model(self, plan, status_before):
        c, b = self.config, self.config.block_size
        self._swap_out(plan.swaps)
        src, dst = np.asarray(plan.copy_src), np.asarray(plan.copy_dst)
        real = src != NULL
        self.counts["copies"] += int(real.sum())
        old = self.kv.copy()
        for s, d in zip(src[real], dst[real], strict=True):
            self.kv[d * b : (d + 1) * b] = old[s * b : (s + 1) * b]
        self._swap_in(plan.swaps)
        num = int(plan.num_seqs)
        rows, lens = np.asarray(plan.row_ids)[:num], np.asarray(plan.seq_lens)[:num]
        start_loc, slots = np.asarray(plan.query_start_loc), np.asarray(plan.slot_mapping)
        token_ids, positions = np.asarray(plan.token_ids), np.asarray(plan.positions)
        tables = np.asarray(plan.block_tables)
        table_tokens = np.asarray(self.state.rows.token_ids)
        salts, seeds = np.asarray(self.state.rows.salt), np.asarray(self.state.rows.seed)
        assert (slots[start_loc[num] :] == NULL).all(), "padding writes"
        out = np.full(c.max_step_rows(self.num_tokens), -7, np.int32)
        for r, row in enumerate(rows):
            hashes = prefix_hashes(table_tokens[row, : lens[r]], int(salts[row]))
            for t in range(start_loc[r], start_loc[r + 1]):
                p = positions[t]
                assert token_ids[t] == table_tokens[row, p]
                assert slots[t] == tables[r, p // b] * b + p % b
                self.kv[slots[t]] = hashes[p]
            first = lens[r] - (start_loc[r + 1] - start_loc[r])
            if status_before[row] == Status.WAITING:
                self.counts["hit_tokens"] += int(first)
            at = np.arange(lens[r])
            context = self.kv[tables[r, at // b] * b + at % b]
            assert list(context) == hashes, f"row {row} reads memory that is not its own"
            out[r] = next_token(hashes[-1], self.alphabet, int(seeds[row]))
        return out

    def _swap_out(self, swaps):
        if swaps is not None:
            self._move(self.kv, self.host_kv, swaps.out_src, swaps.out_dst, swaps.num_out)

    def _swap_in(self, swaps):
        """What has been read is spoilt: nobody else may need it."""
        if swaps is not None:
            src = self._move(self.host_kv, self.kv, swaps.in_src, swaps.in_dst, swaps.num_in)
            self.host_kv.reshape(-1, self.config.block_size)[src] = -1

    def _move(self, source, target, src, dst, count):
        b = self.config.block_size
        src, dst = np.asarray(src)[: int(count)], np.asarray(dst)[: int(count)]
        assert len(set(dst.tolist())) == len(dst)
        target.reshape(-1, b)[dst] = source.reshape(-1, b)[src]
        return src

    def _nobody_starves(self, output):
        """Whoever waits while nobody runs is started, as soon as ended rows have left."""
        idle = int(output.num_waiting) > 0 and int(output.num_scheduled_tokens) == 0
        self.idle = self.idle + 1 if idle else 0
        assert self.idle <= 2 + self.config.num_rows, "requests starve"

    def _collect(self, output):
        status, reason = np.asarray(output.status), np.asarray(output.finish_reason)
        tokens, lengths = np.asarray(self.state.rows.token_ids), np.asarray(output.num_tokens)
        for row in list(self.requests):
            if status[row] != Status.FINISHED:
                continue
            request = self.requests.pop(row)
            if reason[row] == FinishReason.ERROR:
                self.counts["errors"] += 1
                continue
            want = expected_output(
                request.prompt,
                request.salt,
                request.max_total,
                request.stop,
                self.alphabet,
                request.seed,
            )
            got = tokens[row, : lengths[row]].tolist()
            assert got == want, f"row {row} produced other tokens than alone"
            stopped = request.stop and want[-1] == STOP_TOKEN and len(want) > len(request.prompt)
            assert reason[row] == (FinishReason.STOP if stopped else FinishReason.LENGTH)
            self.counts["finished"] += 1


def random_traffic(driver: Driver, steps: int, seed: int, *, shared_prefixes=4, longest=None):
    """Adds, aborts and steps at random, prompts drawn from a few common prefixes."""
    rng, c = np.random.default_rng(seed), driver.config
    longest = longest or c.max_model_len
    bases = [rng.integers(0, driver.alphabet, longest) for _ in range(shared_prefixes)]
    for _ in range(steps):
        for row in driver.empty_rows():
            if rng.random() > 0.4:
                continue
            n = int(rng.integers(1, longest * 3 // 5))
            prompt = rng.integers(0, driver.alphabet, longest)
            k = int(rng.integers(0, n + 1))
            prompt[:k] = bases[rng.integers(len(bases))][:k]
            max_total = n + int(rng.integers(1, longest * 2 // 5))
            if rng.random() < 0.03:
                max_total = c.max_model_len + 5
            salt = int(rng.integers(2)) if rng.random() < 0.2 else 0
            driver.add_request(prompt[:n], max_total, salt=salt, stop=rng.random() < 0.3, row=row)
        if driver.requests and rng.random() < 0.05:
            driver.abort_row(int(rng.choice(list(driver.requests))))
        driver.step()
    driver.drain()
