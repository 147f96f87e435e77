"""What a step's output means for the requests: new tokens, ends, errors."""

from collections.abc import Sequence

import numpy as np

from pagedjax.core.state import ErrorCode, FinishReason, Status, StepOutput
from pagedjax.engine.beams import Beam
from pagedjax.engine.intake import Intake
from pagedjax.engine.request import Request
from pagedjax.engine.rows import RowBook
from pagedjax.engine.stats import StatsKeeper
from pagedjax.outputs import RequestOutput
from pagedjax.tokenizers import Tokenizer

ERRORS = {
    ErrorCode.IMPOSSIBLE: "the request can never fit the KV pool or the request table",
    ErrorCode.NAN_LOGITS: "the model gave NaN or infinite logits for this request",
}
_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class Reader:
    """Carries outputs over to the requests, and tells intake and statistics what has ended."""

    def __init__(self, intake: Intake, stats: StatsKeeper, tokenizer: Tokenizer) -> None:
        self._intake = intake
        self._stats = stats
        self._tokenizer = tokenizer

    def read(
        self,
        rows: RowBook,
        concerned: Sequence[tuple[int, Request]],
        output: StepOutput,
        now: float,
    ) -> list[tuple[Request, RequestOutput]]:
        """What is new, request by request.

        Args:
          rows: the book, in which requests that end give up their rows.
          concerned: the rows of which the output speaks, with their requests (`RowBook.update`).
          now: the engine's clock.
        """
        deltas = []
        for row, request in concerned:
            if request.search is None:
                delta = self._advance(rows, request, row, output, now)
            else:
                delta = self._advance_search(rows, request, output, now)
            if delta is not None:
                deltas.append((request, delta))
        return deltas

    def _advance(
        self, rows: RowBook, request: Request, row: int, output, now: float
    ) -> RequestOutput | None:
        """What one row's part of an output means for its request (one sample of it)."""
        if request.num_cached_tokens is None and output.status[row] != Status.WAITING:
            request.num_cached_tokens = int(output.num_hit_tokens[row])
        finished = output.status[row] == Status.FINISHED
        reason = output.finish_reason[row]
        try:
            if finished and reason == FinishReason.ERROR:
                code = int(output.error[row])
                delta = request.end("error", ERRORS.get(code, f"error {code}"))
            elif output.token_ids[row] >= 0:
                delta = self._push(request, row, output, finished)
                self._stats.token(request, now)
            else:
                return None
        except Exception as error:  # the host's part of one request must not harm the others
            delta = request.fail(f"{type(error).__name__}: {error}")
        if request.finish_reason is not None:
            rows.let_go(request, ended_on_device=bool(finished))
            if request.finished:
                self._intake.forget(request)
            self._stats.finished(request.finish_reason, request, now)
        return delta

    def _advance_search(
        self, rows: RowBook, leader: Beam, output, now: float
    ) -> RequestOutput | None:
        """What an output means for a beam search; asked for each of its rows, told for the first.

        The rows end together, so whatever ends one of them ends the search."""
        if leader.index > 0:
            return None
        search, row = leader.search, leader.search.rows[0]
        if leader.num_cached_tokens is None and output.status[row] != Status.WAITING:
            leader.num_cached_tokens = int(output.num_hit_tokens[row])
        finished = output.status[row] == Status.FINISHED
        delta = None
        try:
            if finished and output.finish_reason[row] == FinishReason.ERROR:
                code = int(output.error[row])
                delta = search.end("error", ERRORS.get(code, f"error {code}"))
            else:
                for place in search.advance(output):
                    self._stats.token(leader.samples[place], now)
                delta = search.result(self._tokenizer) if finished else None
        except Exception as error:  # the host's part of one request must not harm the others
            delta = search.end("error", f"{type(error).__name__}: {error}")
        if delta is not None:
            for beam in leader.samples:
                rows.let_go(beam, ended_on_device=bool(finished))
            self._intake.forget(leader)
            for completion in delta.outputs:
                self._stats.finished(completion.finish_reason, leader, now)
        return delta

    def _push(self, request: Request, row: int, output, finished: bool) -> RequestOutput:
        rank = output.rank[row]
        wants_top = bool(request.params.logprobs)
        return request.push(
            int(output.token_ids[row]),
            stopped=bool(finished and output.finish_reason[row] == FinishReason.STOP),
            last=bool(finished),
            logprob=float(output.logprob[row]),
            top_token_ids=output.top_token_ids[rank] if wants_top else _NO_IDS,
            top_logprobs=output.top_logprobs[rank] if wants_top else _NO_LOGPROBS,
        )
