"""SamplingParams: vLLM's defaults, and refusals that name the field, the value and the range."""

import dataclasses
import math

import numpy as np
import pytest

from pagedjax.sampling_params import SamplingParams


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "best_of": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "priority": 0,
        "cache_salt": None,
    }


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 0, "[1, 2147483647]"),
        ("n", 1.0, "[1, 2147483647]"),
        ("best_of", 0, "[1, 2147483647] (at least n)"),
        ("best_of", True, "[1, 2147483647] (at least n)"),
        ("temperature", -0.1, "[0, inf)"),
        ("temperature", math.inf, "[0, inf)"),
        ("temperature", math.nan, "[0, inf)"),
        ("temperature", "1", "[0, inf)"),
        ("temperature", None, "[0, inf)"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("top_k", -2, "[-1, 2147483647]"),
        ("top_k", 1.5, "[-1, 2147483647]"),
        ("top_k", True, "[-1, 2147483647]"),
        ("top_k", 2**31, "[-1, 2147483647]"),
        ("min_p", -0.01, "[0, 1]"),
        ("min_p", 1.01, "[0, 1]"),
        ("seed", 2**64, "18446744073709551615]"),
        ("seed", 1.0, "18446744073709551615]"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [1], "non-empty"),
        ("stop", 3, "string or a list"),
        ("stop_token_ids", [-1], "[0, 2147483646]"),
        ("stop_token_ids", [2**31 - 1], "[0, 2147483646]"),
        ("stop_token_ids", "12", "list of integers"),
        ("stop_token_ids", 5, "list of integers"),
        ("max_tokens", 0, "[1, 2147483647]"),
        ("min_tokens", -1, "[0, 16]"),
        ("min_tokens", 17, "[0, 16] (max_tokens)"),
        ("logprobs", -1, "[0, 2147483647]"),
        ("ignore_eos", 1, "True or False"),
        ("detokenize", None, "True or False"),
    ],
)
def test_refusals_name_field_value_and_range(field: str, value: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} must ")
    assert says in message
    odd = value[-1] if field == "stop_token_ids" and isinstance(value, list) else value
    assert repr(odd) in message


def test_stop_needs_text() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_values_are_normalized() -> None:
    params = SamplingParams(
        top_k=-1,
        stop="x",
        stop_token_ids=[3, 2, 3],
        temperature=np.float32(0.5),
        max_tokens=None,
        min_tokens=10**6,
        seed=np.int64(7),
    )
    assert params.top_k == 0
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 2)
    assert params.temperature == 0.5
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    # What is normalized stays so when a copy is made.
    assert dataclasses.replace(params, seed=8).stop_token_ids == (3, 2)
    assert hash(params) == hash(dataclasses.replace(params))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_seed_bits_keep_small_seeds_and_mix_large_ones() -> None:
    assert SamplingParams().seed_bits is None
    assert SamplingParams(seed=0).seed_bits == 0
    assert SamplingParams(seed=2**32 - 1).seed_bits == 2**32 - 1
    large = [SamplingParams(seed=s << 32).seed_bits for s in range(100)]
    negative = [SamplingParams(seed=-s).seed_bits for s in range(2, 100)]
    assert len(set(large)) == 100
    assert len({0, *negative}) == 99
    assert all(0 <= bits < 2**32 for bits in (*large, *negative))


def test_several_outputs() -> None:
    params = SamplingParams(n=3, best_of=5, seed=2**40 + 7)
    assert params.num_samples == 5
    assert SamplingParams(n=3).num_samples == 3
    seeds = [params.sample_seed(i) for i in range(1000)]
    assert seeds[0] == params.seed_bits
    assert len(set(seeds)) == 1000
    # A derived seed is a seed like any other.
    assert all(SamplingParams(seed=seed).seed_bits == seed for seed in seeds)
    assert SamplingParams(n=2).sample_seed(1) is None
    with pytest.raises(ValueError, match=r"best_of must be .* in \[3, .*at least n.*got 2"):
        SamplingParams(n=3, best_of=2)
