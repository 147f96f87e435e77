"""`SamplingParams`: how one request wants its tokens chosen, under vLLM's names and defaults."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters; checked when built.

    Filters apply in vLLM's order: temperature, min-p, top-k, top-p. See `pagedjax.sampling.sample`
    for what each keeps exactly.

    Raises:
      ValueError: a value out of range; the message names the field, the value and the accepted
        range.
    """

    n: int = 1
    """Outputs per prompt. The prompt is computed once and its memory shared."""
    best_of: int | None = None
    """Outputs to generate, of which the n with the highest log-probability per token are returned,
    the best first; at least n, None is n. If it is more than n, nothing is told before all have
    ended."""
    temperature: float = 1.0
    """0 is greedy. Any positive value is used as it is, however small."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 0
    """At least 1; 0 or -1 is off (-1 becomes 0)."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    seed: int | None = None
    """A signed or unsigned 64-bit number; with one, the same request gets the same tokens. Output i
    of several is what a single request with the seed `sample_seed(i)` gets; output 0 has the seed
    itself."""
    stop: str | Iterable[str] | None = None
    """Strings that end the output; kept as a tuple."""
    stop_token_ids: Iterable[int] | None = None
    """Tokens that end the output, beside the model's own; kept as a tuple without repeats."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """At least 1; None is up to the model's length."""
    min_tokens: int = 0
    """No stop token is chosen, and no stop string ends the output, before this many tokens."""
    logprobs: int | None = None
    """None wants none; 0 the chosen token's; n also those of the n most likely."""
    detokenize: bool = True
    """Make text of the tokens. Stop strings need it."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0
    """Lower is more urgent. Where the engine's policies go by it only; others refuse all but 0."""
    cache_salt: str | None = None
    """Only requests with the same one share cached keys and values, so that nobody else learns from
    the time an answer takes what has been sent. None is shared by all that have none."""

    def __post_init__(self) -> None:
        self._set("n", check_integer("n", self.n, 1, _MAX_INT32))
        if self.best_of is not None:
            best_of = check_integer(
                "best_of", self.best_of, self.n, _MAX_INT32, note=" (at least n)"
            )
            self._set("best_of", best_of)
        self._set(
            "temperature", check_real("temperature", self.temperature, 0, math.inf, "[0, inf)")
        )
        self._set("top_p", check_real("top_p", self.top_p, 0, 1, "(0, 1]"))
        self._set("min_p", check_real("min_p", self.min_p, 0, 1, "[0, 1]"))
        top_k = check_integer("top_k", self.top_k, -1, _MAX_INT32, note=" (0 or -1 is off)")
        self._set("top_k", max(top_k, 0))
        if self.seed is not None:
            self._set("seed", check_integer("seed", self.seed, -(2**63), 2**64 - 1))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.max_tokens is not None:
            self._set("max_tokens", check_integer("max_tokens", self.max_tokens, 1, _MAX_INT32))
        most = _MAX_INT32 if self.max_tokens is None else self.max_tokens
        note = "" if self.max_tokens is None else " (max_tokens)"
        self._set("min_tokens", check_integer("min_tokens", self.min_tokens, 0, most, note=note))
        if self.logprobs is not None:
            self._set("logprobs", check_integer("logprobs", self.logprobs, 0, _MAX_INT32))
        self._set("priority", check_integer("priority", self.priority, -_MAX_INT32, _MAX_INT32))
        check_cache_salt(self.cache_salt)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop must be empty when detokenize is False, got {self.stop!r}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def seed_bits(self) -> int | None:
        """The seed as the 32 bits the sampler takes: itself if it fits, mixed into them if not."""
        if self.seed is None:
            return None
        bits = self.seed % 2**64
        return (bits ^ ((bits >> 32) * 0x9E3779B1)) % 2**32

    @property
    def num_samples(self) -> int:
        """Outputs that are generated, `best_of` of them if that is given."""
        return self.n if self.best_of is None else self.best_of

    def sample_seed(self, index: int) -> int | None:
        """The seed of output `index`, 32 bits; None without a seed."""
        return None if self.seed is None else derived_seed(self.seed_bits, index)


def derived_seed(seed_bits: int, index: int) -> int:
    """A seed of its own for each output of a request: the seed plus MurmurHash3's finaliser of the
    index, which is 0 for 0. For one seed, no two of 2**32 outputs get the same."""
    x = (index * 0x9E3779B1) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return (seed_bits + x) & 0xFFFFFFFF


def check_integer(name: str, value: Any, low: int, high: int, *, note: str = "") -> int:
    """The value as an int; `ValueError` naming the field and the range for what is none in it."""
    wanted = str(low) if low == high else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise ValueError(
            f"{name} must be {'an integer ' * (low != high)}{wanted}{note}, got {value!r}"
        )
    return int(value)


def check_real(name: str, value: Any, low: float, high: float, accepted: str) -> float:
    """The value as a float; `ValueError` naming the field and the range, `accepted` in words, for
    what is none in it. An opening parenthesis leaves `low` out."""
    wanted = f"{name} must be a number in {accepted}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(wanted)
    if not low <= value <= high or (accepted[0] == "(" and value == low):
        raise ValueError(wanted)
    return float(value)


def check_cache_salt(salt: Any) -> None:
    """Raise `ValueError` for what is no salt."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt must be a non-empty string or None, got {salt!r}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Iterable):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    strings = tuple(strings)
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop must hold non-empty strings only, got {stop!r}")
    return strings


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ValueError(f"stop_token_ids must be a list of integers, got {ids!r}")
    # 2**31 - 1 is the sampler's "no token".
    checked = (check_integer("stop_token_ids", i, 0, _MAX_INT32 - 1) for i in ids)
    return tuple(dict.fromkeys(checked))
