"""`BeamSearchParams`, and what a beam search gives: under vLLM's names and defaults."""

import math
from dataclasses import dataclass, field
from typing import Any

from pagedjax.sampling_params import check_cache_salt, check_integer, check_real


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """One beam search's parameters; checked when built.

    In every step, twice as many continuations of each beam as there are beams are looked at. Those
    by an end-of-sequence token are complete; of the others, the `beam_width` most likely outputs
    are the next beams. It ends with `max_tokens`, or when no beam is left. Then everything that is
    complete and the beams that are left are ordered by *score*, and the best `beam_width` are
    returned, the best first.

    The score of an output is cum_logprob / length ** length_penalty. The length counts output
    tokens only (vLLM counts the prompt's, too), without the end-of-sequence token, as in vLLM; it
    is at least 1. Log-probabilities are of the model's own distribution.

    Raises:
      ValueError: a value out of range; the message names the field, the value and the accepted
        range.
    """

    beam_width: int
    """At least 1; the engine sets a limit, see `EngineConfig.max_beam_width`."""
    max_tokens: int | None
    """Most tokens of an output, at least 1; None is up to the model's length."""
    ignore_eos: bool = False
    """End-of-sequence tokens are continuations like others."""
    temperature: float = 0.0
    """0 or 1, which mean the same: scores are of the model's own distribution. No other value is
    defined."""
    length_penalty: float = 1.0
    """Exponent of the length in the score. Above 0 it favours long outputs, below 0 short ones."""
    include_stop_str_in_output: bool = False
    """The text includes the end-of-sequence token."""
    cache_salt: str | None = None
    """See `SamplingParams.cache_salt`."""

    def __post_init__(self) -> None:
        self._set("beam_width", check_integer("beam_width", self.beam_width, 1, 2**31 - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        check_cache_salt(self.cache_salt)
        self._set("temperature", check_real("temperature", self.temperature, 0, 1, "{0, 1}"))
        if self.temperature not in (0, 1):
            raise ValueError(
                f"temperature must be 0 or 1 in a beam search, got {self.temperature!r}: scores "
                "are of the model's own distribution"
            )
        limits = (-math.inf, math.inf, "(-inf, inf)")
        self._set("length_penalty", check_real("length_penalty", self.length_penalty, *limits))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def n(self) -> int:
        """Outputs, at most."""
        return self.beam_width

    @property
    def num_samples(self) -> int:
        """Rows of the request table that it takes."""
        return self.beam_width

    def score(self, cum_logprob: float, length: int) -> float:
        """Score of an output of so many tokens, the end-of-sequence token not counted."""
        return cum_logprob / max(length, 1) ** self.length_penalty


@dataclass(kw_only=True)
class BeamSearchSequence:
    """One output of a beam search.

    Attributes:
      tokens: prompt and output, the end-of-sequence token included.
      cum_logprob: sum of the log-probabilities of the output's tokens.
      text: of `tokens`.
      finish_reason: "stop" for an end-of-sequence token, "length" otherwise.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class BeamSearchOutput:
    """What comes of one prompt: at most `beam_width` sequences, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
