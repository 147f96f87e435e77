"""What the host keeps of one request: its text, its stop strings, its log-probabilities."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.requests import RequestParams
from pagedjax.core.state import NULL
from pagedjax.engine.errors import InvalidRequestError
from pagedjax.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from pagedjax.sampling_params import SamplingParams, derived_seed
from pagedjax.tokenizers import IncrementalDetokenizer, StopChecker, Tokenizer

MAX_STOP_STRINGS = 64
"""Of one request. Each is looked for in each character, in the thread that serves everybody."""


class Request:
    """One request from its arrival to its end. Not thread-safe: the engine's thread drives it.

    Of a request for several outputs there is one of these for each, a *sample*, in a row of its
    own. The first one leads the others: it is the one that is aborted and has an entry in the
    engine's book, and the others' deltas say `finished` when all samples have ended.

    Attributes:
      index: which of the outputs it is.
      samples: all of them, itself included; shared by all of them.
      group: number that the rows of its samples have in common, NULL for a single one.
      salt: only requests of equal salt share cached blocks; 0 without `cache_salt`.
      search: the beam search that the row belongs to, or None (`pagedjax.engine.beams`).
      max_total_tokens: prompt and output tokens together at most.
      num_output_tokens: tokens so far.
      num_cached_tokens: prompt tokens found in the prefix cache; None before the first step.
      finish_reason: None while it runs.
    """

    search: Any = None
    salt: int = 0

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_total_tokens: int,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.samples: list[Request] = [self]
        self.group = int(NULL)
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.arrival_time_s = 0.0
        self.first_token_time_s: float | None = None
        self.last_token_time_s: float | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._output_token_ids: list[int] = []
        self._cumulative_logprob = 0.0
        self._detokenizer = None
        self._stop = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            self._stop = StopChecker(
                params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def fan_out(self, group: int) -> None:
        """Make its other samples, if it is a request for several.

        Args:
          group: a number that no other live request has.
        """
        count = self.params.num_samples
        if count == 1:
            return
        self.group = group
        for index in range(1, count):
            sample = Request(
                self.request_id,
                self.prompt,
                self.prompt_token_ids,
                self.params,
                seed=derived_seed(self.seed, index),
                max_total_tokens=self.max_total_tokens,
                tokenizer=self._tokenizer,
                eos_token_ids=tuple(self._eos_token_ids),
                index=index,
            )
            sample.group = group
            sample.samples = self.samples
            self.samples.append(sample)

    @property
    def leader(self) -> "Request":
        """The first sample."""
        return self.samples[0]

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def needs_logprob(self) -> bool:
        """Whether its tokens' log-probabilities are looked at: asked for, or to pick the best."""
        return self.params.logprobs is not None or len(self.samples) > self.params.n

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_token_ids + self._output_token_ids

    @property
    def cumulative_logprob(self) -> float:
        """Sum of its tokens' log-probabilities, as far as it asked for them."""
        return self._cumulative_logprob

    def resume(self, token_ids: Sequence[int], logprob: float, reason: str | None) -> None:
        """Make a new request what it is after these tokens, which have ended it if there is a
        reason. `logprob` is their cumulative one."""
        self.finish_reason = reason
        if reason is None:
            for token_id in token_ids:
                self._advance_text(token_id, stopped=False, last=False)
        self._output_token_ids += token_ids
        self.num_output_tokens += len(token_ids)
        self._cumulative_logprob = logprob

    def push(
        self,
        token_id: int,
        *,
        stopped: bool,
        last: bool,
        logprob: float,
        top_token_ids: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> RequestOutput:
        """Take the next token; -> what is new.

        Args:
          stopped: it is one of the request's stop token ids.
          last: the request ends with it because of its length.
          logprob: its log-probability; read only if the request asked for it.
          top_token_ids, top_logprobs: [P], the most likely tokens, if it asked for them.
        """
        self.num_output_tokens += 1
        self._output_token_ids.append(token_id)
        text, stop_reason = self._advance_text(token_id, stopped, last)
        if stop_reason is not None:
            self.finish_reason = "stop"
        elif stopped:
            self.finish_reason = "stop"
            stop_reason = None if token_id in self._eos_token_ids else token_id
        elif last:
            self.finish_reason = "length"
        logprobs = None
        if self.needs_logprob:
            self._cumulative_logprob += logprob
        if self.params.logprobs is not None:
            logprobs = [self._logprobs(token_id, logprob, top_token_ids, top_logprobs)]
        return self._output(text, [token_id], logprobs, stop_reason)

    def end(self, reason: str, error: str | None = None) -> RequestOutput:
        """End it from outside ("abort" or "error"); -> the text that was still held back."""
        text = ""
        if self._detokenizer is not None:
            text = self._stop.push(self._detokenizer.finish(), 0).text + self._stop.flush()
        self.finish_reason = reason
        return self._output(text, [], None, None, error)

    def fail(self, error: str) -> RequestOutput:
        """End it because the host's own part of it went wrong; whatever text was held is lost."""
        self.finish_reason = "error"
        return self._output("", [], None, None, error)

    def _advance_text(self, token_id: int, stopped: bool, last: bool) -> tuple[str, str | None]:
        """-> (new text, stop string that ended the request or None)."""
        if self._detokenizer is None:
            return "", None
        text = ""
        # As in vLLM, a stop token gives text only if stop strings do.
        if not stopped or self.params.include_stop_str_in_output:
            text = self._detokenizer.push([token_id])
        text = self._stop.push(text).text
        if self._stop.stop_string is None and (stopped or last):
            text += self._stop.push(self._detokenizer.finish(), 0).text
            text += self._stop.flush()
        return text, self._stop.stop_string

    def _logprobs(self, token_id, logprob, top_token_ids, top_logprobs) -> TokenLogprobs:
        top = list(zip(top_token_ids.tolist(), top_logprobs.tolist(), strict=True))
        rank = next((i for i, (other, _) in enumerate(top, 1) if other == token_id), None)
        entries = {token_id: Logprob(logprob, rank, self._text(token_id))}
        for i, (other, value) in enumerate(top[: self.params.logprobs], 1):
            entries.setdefault(other, Logprob(value, i, self._text(other)))
        return entries

    def _text(self, token_id: int) -> str:
        return self._tokenizer.vocabulary.token_bytes[token_id].decode("utf-8", "replace")

    def _output(self, text, token_ids, logprobs, stop_reason, error=None) -> RequestOutput:
        completion = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=(None if self.params.logprobs is None else self._cumulative_logprob),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            num_cached_tokens=self.leader.num_cached_tokens,
            error=error,
        )

    def device_params(self, max_stop_token_ids: int) -> RequestParams:
        """What the core needs to know of it, as numpy scalars of fixed types."""
        params = self.params
        stop_ids = np.full(max_stop_token_ids, NULL, np.int32)
        wanted = stop_token_ids(params, self._eos_token_ids)
        num_logprobs = (
            (0 if self.needs_logprob else -1) if params.logprobs is None else (params.logprobs)
        )
        stop_ids[: len(wanted)] = wanted
        return RequestParams(
            max_total_tokens=np.int32(self.max_total_tokens),
            min_output_tokens=np.int32(params.min_tokens),
            stop_token_ids=stop_ids,
            temperature=np.float32(params.temperature),
            top_k=np.int32(params.top_k),
            top_p=np.float32(params.top_p),
            min_p=np.float32(params.min_p),
            seed=np.uint32(self.seed),
            num_logprobs=np.int32(num_logprobs),
            salt=np.uint32(self.salt),
            priority=np.int32(params.priority),
            group=np.int32(self.group),
            beam_leader=NULL,
            beam_index=np.int32(0),
        )


def stop_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Every token id that ends a request: its own and, unless ignored, end-of-sequence."""
    wanted = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        wanted |= set(eos_token_ids)
    return sorted(wanted)


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    max_model_len: int,
    max_pool_tokens: int,
    max_logprobs: int,
    max_stop_token_ids: int,
    num_rows: int,
) -> int:
    """Refuse what can never be served; -> prompt and output tokens at most.

    Raises `InvalidRequestError` naming the field, the value given and the limit.
    """
    num_prompt = len(prompt_token_ids)
    _check_prompt(prompt_token_ids, vocab_size)
    limit, limit_name = _limit(max_model_len, max_pool_tokens)
    if num_prompt >= limit:
        raise _too_long(num_prompt, max_model_len, max_pool_tokens)
    if params.max_tokens is not None and num_prompt + params.max_tokens > limit:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}; after a prompt of {num_prompt} tokens it must be "
            f"at most {limit - num_prompt}, since prompt and output together may have {limit} "
            f"({limit_name})",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if params.num_samples > num_rows:
        name = "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{name} must be at most {num_rows} (num_rows), got {params.num_samples}", param=name
        )
    if params.logprobs is not None and params.logprobs > max_logprobs:
        raise InvalidRequestError(
            f"logprobs must be at most {max_logprobs} (max_logprobs), got {params.logprobs}",
            param="logprobs",
        )
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(params.stop)} strings; at most {MAX_STOP_STRINGS} are accepted",
            param="stop",
        )
    wanted = stop_token_ids(params, eos_token_ids)
    if len(wanted) > max_stop_token_ids:
        raise InvalidRequestError(
            f"stop_token_ids and the model's end-of-sequence tokens are {len(wanted)} ids; at "
            f"most {max_stop_token_ids} (max_stop_token_ids) are accepted",
            param="stop_token_ids",
        )
    outside = [i for i in wanted if not 0 <= i < vocab_size]
    if outside:
        raise InvalidRequestError(
            f"stop_token_ids must be from 0 to {vocab_size - 1}, got {outside[0]}",
            param="stop_token_ids",
        )
    output = limit - num_prompt if params.max_tokens is None else params.max_tokens
    return num_prompt + output


def check_priority(params: SamplingParams, sizes: SchedulerConfig) -> None:
    """Refuse a priority where nothing would go by it. Raises `InvalidRequestError`."""
    policies = sizes.scheduling_policy, sizes.preemption_policy
    heeded = any(callable(p) or p in ("priority", "lowest_priority") for p in policies)
    if params.priority and not heeded:
        raise InvalidRequestError(
            f"priority must be 0 under scheduling_policy {policies[0]} and preemption_policy "
            f"{policies[1]}, which do not go by it; got {params.priority}",
            param="priority",
        )


def check_length(
    prompt: str | Sequence[int],
    max_model_len: int,
    max_pool_tokens: int,
    *,
    longest_token_bytes: int,
) -> None:
    """Refuse a prompt that is far too long without looking at what is in it.

    Raises `InvalidRequestError` as `check_request` does. For text, it is as many of the longest
    tokens as fit; a tokenizer that drops text (repeated spaces, say) might make it shorter still.
    """
    limit, limit_name = _limit(max_model_len, max_pool_tokens)
    if not isinstance(prompt, str):
        if len(prompt) >= limit:
            raise _too_long(len(prompt), max_model_len, max_pool_tokens)
        return
    most = (limit - 1) * longest_token_bytes
    if len(prompt) > most:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} characters; it must have at most {most}, since prompt and "
            f"output together may have {limit} tokens ({limit_name}) and the longest token has "
            f"{longest_token_bytes} bytes",
            param="prompt",
            code="context_length_exceeded",
        )


def _too_long(num_prompt: int, max_model_len: int, max_pool_tokens: int) -> InvalidRequestError:
    limit, limit_name = _limit(max_model_len, max_pool_tokens)
    return InvalidRequestError(
        f"prompt has {num_prompt} tokens; it must have at most {limit - 1}, since prompt and "
        f"output together may have {limit} ({limit_name})",
        param="prompt",
        code="context_length_exceeded",
    )


def _limit(max_model_len: int, max_pool_tokens: int) -> tuple[int, str]:
    """Most tokens of prompt and output together, and what sets that limit."""
    if max_model_len <= max_pool_tokens:
        return max_model_len, "max_model_len"
    return max_pool_tokens, "the size of the KV pool in tokens"


def _check_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_token_ids:
        raise InvalidRequestError("prompt must have at least one token, got none", param="prompt")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequestError(
            f"prompt token ids must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}",
            param="prompt",
        )
