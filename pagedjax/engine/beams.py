"""The host's side of a beam search: which tokens its beams have, what is complete, what is best."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pagedjax.beam_search import BeamSearchParams
from pagedjax.core.ragged import cdiv
from pagedjax.core.requests import RequestParams
from pagedjax.core.state import NULL, FinishReason, Status
from pagedjax.engine.errors import InvalidRequestError
from pagedjax.engine.request import Request, check_request
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizers import IncrementalDetokenizer, Tokenizer

Hypothesis = tuple[list[int], np.float32]
"""Output tokens and their cumulative log-probability."""


class Beam(Request):
    """One row of a beam search; the first one, the leader, stands for the whole search.

    Attributes:
      search: what the rows have in common.
    """

    search: "BeamSearch"

    def device_params(self, max_stop_token_ids: int) -> RequestParams:
        """What the core needs to know of it. The rows of the search must be known."""
        return dataclasses.replace(
            super().device_params(max_stop_token_ids),
            beam_leader=np.int32(self.search.rows[0]),
            beam_index=np.int32(self.index),
        )


class BeamSearch:
    """One search, followed from the outputs of the steps.

    Attributes:
      params: as they were asked for.
      rows: of the request table, the leader's first; set when it has been given them.
      beams: row -> the beam it carries.
      completed: outputs that ended with an end-of-sequence token.
      final: the end-of-sequence tokens, none if they are ignored.
    """

    def __init__(self, leader: Beam, params: BeamSearchParams, final: Sequence[int]) -> None:
        self.params = params
        self.rows: list[int] = []
        self.beams: dict[int, Hypothesis] = {}
        self.completed: list[Hypothesis] = []
        self._leader = leader
        self.final = frozenset(final)
        self._count = leader.params.logprobs

    def place(self, rows: Sequence[int]) -> None:
        """Its beams get these rows; the first one has the prompt."""
        self.rows = list(rows)
        self.beams = {self.rows[0]: ([], np.float32(0))}

    def advance(self, output) -> list[int]:
        """Take in a step's output; -> places of the beams that got a token."""
        parents = output.beam_parent[self.rows]
        carried = [i for i, parent in enumerate(parents) if parent != NULL]
        stopped = output.finish_reason[self.rows[0]] == FinishReason.STOP
        if not carried and not (stopped and self._is_over(output)):
            return []
        for row, (tokens, total) in self.beams.items():
            rank = output.rank[row]
            ids, logprobs = output.top_token_ids[rank], output.top_logprobs[rank]
            for token_id, logprob in zip(ids[: self._count].tolist(), logprobs, strict=False):
                if token_id in self.final:
                    self.completed.append(([*tokens, token_id], np.float32(total + logprob)))
        old, new = self.beams, {}
        for i in carried:
            row = self.rows[i]
            tokens, _ = old[int(parents[i])]
            new[row] = ([*tokens, int(output.token_ids[row])], output.cum_logprob[row])
        self.beams = new
        return carried

    def _is_over(self, output) -> bool:
        return output.status[self.rows[0]] == Status.FINISHED

    def best(self) -> list[tuple[Hypothesis, bool]]:
        """The best outputs so far, the best first, and whether each is complete."""
        ended = [(hypothesis, True) for hypothesis in self.completed]
        going = [(hypothesis, False) for hypothesis in self.beams.values()]

        def score(entry: tuple[Hypothesis, bool]) -> float:
            (tokens, total), complete = entry
            return self.params.score(float(total), len(tokens) - complete)

        return sorted(ended + going, key=score, reverse=True)[: self.params.beam_width]

    def result(self, tokenizer: Tokenizer) -> RequestOutput:
        """The whole answer, when the search is over."""
        leader = self._leader
        outputs = []
        for index, ((tokens, total), complete) in enumerate(self.best()):
            keep = self.params.include_stop_str_in_output or not complete
            text = _text(tokenizer, leader.prompt_token_ids, tokens, complete, keep)
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=tokens,
                    cumulative_logprob=float(total),
                    finish_reason="stop" if complete else "length",
                )
            )
        for beam in leader.samples:
            beam.finish_reason = "stop"
        return RequestOutput(
            request_id=leader.request_id,
            prompt=leader.prompt,
            prompt_token_ids=leader.prompt_token_ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=leader.num_cached_tokens,
        )

    def end(self, reason: str, error: str | None = None) -> RequestOutput:
        """End it from outside ("abort" or "error")."""
        deltas = [beam.end(reason, error) for beam in self._leader.samples]
        for delta in deltas[1:]:
            deltas[0].add(delta)
        return deltas[0]


def _text(tokenizer, prompt: list[int], tokens: list[int], complete: bool, keep_end: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=not keep_end)
    shown = tokens if keep_end or not complete else tokens[:-1]
    return detokenizer.push(shown) + detokenizer.finish()


def make_search(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    *,
    max_total_tokens: int,
    group: int,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> Beam:
    """The leader of a new search; its `samples` are the rows' beams."""
    final = [] if params.ignore_eos else sorted(set(eos_token_ids))
    inner = _inner_params(params, num_candidates(params, eos_token_ids, vocab_size))
    beams = [
        Beam(
            request_id,
            prompt,
            prompt_token_ids,
            inner,
            seed=0,
            max_total_tokens=max_total_tokens,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            index=index,
        )
        for index in range(params.beam_width)
    ]
    search = BeamSearch(beams[0], params, final)
    for beam in beams:
        beam.search, beam.samples, beam.group = search, beams, group
    return beams[0]


def num_candidates(params: BeamSearchParams, eos_token_ids: Sequence[int], vocab_size: int) -> int:
    """Continuations of each beam that are looked at: twice the width, as others do; more, if there
    are so many end-of-sequence tokens that fewer than the width might be left without them."""
    num_final = 0 if params.ignore_eos else len(set(eos_token_ids))
    return min(params.beam_width + max(params.beam_width, num_final), vocab_size)


def _inner_params(params: BeamSearchParams, count: int) -> SamplingParams:
    return SamplingParams(
        n=params.beam_width,
        temperature=0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        detokenize=False,
        logprobs=count,
        cache_salt=params.cache_salt,
    )


def check_search(
    prompt_token_ids: Sequence[int],
    params: BeamSearchParams,
    *,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    sizes,
    **limits,
) -> int:
    """Refuse a search that can never be served; -> prompt and output tokens at most.

    Args:
      sizes: the scheduler's. limits: as `check_request` takes them.

    Raises `InvalidRequestError` naming the field, the value given and the limit.
    """
    width = params.beam_width
    widest = min(sizes.max_beam_width, sizes.max_num_batched_tokens)
    if width > widest:
        raise InvalidRequestError(
            f"beam_width must be at most {widest} (max_beam_width), got {width}",
            param="beam_width",
        )
    count = num_candidates(params, eos_token_ids, vocab_size)
    if count > sizes.max_logprobs:
        raise InvalidRequestError(
            f"beam_width is {width}, so {count} continuations of each beam are looked at; at most "
            f"{sizes.max_logprobs} (max_logprobs) can be",
            param="beam_width",
        )
    total = check_request(
        prompt_token_ids,
        _inner_params(params, count),
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
        **limits,
    )
    num_blocks = blocks_of_search(len(prompt_token_ids), total, width, sizes.block_size)
    limit = sizes.num_blocks - (sizes.watermark_blocks if width > 1 else 0)
    if num_blocks > limit:
        raise InvalidRequestError(
            f"{width} beams of up to {total} tokens may need {num_blocks} blocks of the KV pool; "
            f"there are {limit}. Ask for fewer beams or for fewer max_tokens",
            param="beam_width",
        )
    return total


def blocks_of_search(num_prompt: int, max_total: int, width: int, block_size: int) -> int:
    """Blocks that a search may need at most: beams share whole blocks of the prompt for certain."""
    common = (num_prompt - 1) // block_size
    return common + width * (cdiv(max_total - 1, block_size) - common)
