"""Requests as a snapshot holds them: what JSON can say of each, and the request made of it again.

Text state is not saved: it is a function of the tokens, and is made again from them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax.beam_search import BeamSearchParams
from pagedjax.core.state import NULL
from pagedjax.engine.beams import Beam, BeamSearch, Hypothesis
from pagedjax.engine.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizers import Tokenizer


def describe_request(leader: Request, now: float) -> dict[str, Any]:
    """What `restore_request` needs of a request and all of its samples, as JSON can say it.

    Args:
      now: of the clock that the request's times are of.
    """
    return {
        "request_id": leader.request_id,
        "prompt": leader.prompt,
        "prompt_token_ids": leader.prompt_token_ids,
        "params": _init_fields(leader.params),
        "group": None if leader.group == NULL else leader.group,
        "max_total_tokens": leader.max_total_tokens,
        "salt": leader.salt,
        "search": None if leader.search is None else _describe_search(leader.search),
        "samples": [_describe_sample(sample, now) for sample in leader.samples],
    }


def restore_request(
    described: Mapping[str, Any], now: float, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> Request:
    """The request as it was: its leader, with all samples."""
    kind = Request if described["search"] is None else Beam
    params = SamplingParams(**_with_tuples(described["params"]))
    group = int(NULL) if described["group"] is None else described["group"]
    samples: list[Request] = []
    for index, fields in enumerate(described["samples"]):
        sample = kind(
            described["request_id"],
            described["prompt"],
            described["prompt_token_ids"],
            params,
            seed=fields["seed"],
            max_total_tokens=described["max_total_tokens"],
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            index=index,
        )
        sample.samples, sample.group = samples, group
        sample.salt = described["salt"]
        sample.num_cached_tokens = fields["num_cached_tokens"]
        sample.resume(
            fields["output_token_ids"], fields["cumulative_logprob"], fields["finish_reason"]
        )
        times = (None if age is None else now - age for age in fields["ages_s"])
        sample.arrival_time_s, sample.first_token_time_s, sample.last_token_time_s = times
        samples.append(sample)
    if described["search"] is not None:
        search = _restore_search(described["search"], samples[0])
        for beam in samples:
            beam.search = search
    return samples[0]


def _describe_sample(sample: Request, now: float) -> dict[str, Any]:
    times = sample.arrival_time_s, sample.first_token_time_s, sample.last_token_time_s
    return {
        "seed": sample.seed,
        "num_cached_tokens": sample.num_cached_tokens,
        "output_token_ids": sample.all_token_ids[len(sample.prompt_token_ids) :],
        "cumulative_logprob": sample.cumulative_logprob,
        "finish_reason": sample.finish_reason,
        "ages_s": [None if time_s is None else now - time_s for time_s in times],
    }


def _describe_search(search: BeamSearch) -> dict[str, Any]:
    return {
        "params": _init_fields(search.params),
        "final": sorted(search.final),
        "rows": search.rows,
        "beams": [(row, *_plain(beam)) for row, beam in search.beams.items()],
        "completed": [_plain(hypothesis) for hypothesis in search.completed],
    }


def _restore_search(described: Mapping[str, Any], leader: Request) -> BeamSearch:
    params = BeamSearchParams(**described["params"])
    search = BeamSearch(leader, params, described["final"])
    search.rows = described["rows"]
    search.beams = {row: (tokens, np.float32(x)) for row, tokens, x in described["beams"]}
    search.completed = [(tokens, np.float32(total)) for tokens, total in described["completed"]]
    return search


def _plain(hypothesis: Hypothesis) -> tuple[list[int], float]:
    """A float32 is a double exactly, and JSON says every double exactly."""
    tokens, total = hypothesis
    return tokens, float(total)


def _init_fields(params: Any) -> dict[str, Any]:
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.init}


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(value) if isinstance(value, list) else value for k, value in fields.items()}
