"""The real model through the GPU kernels, in Pallas's interpreter: the reference's tokens.

The interpreter takes a minute for a step of 16 tokens and thirty layers, so these are a few tokens
of a few short lines: a prompt that comes in two chunks, others beside decoding rows, one of a
single token.
"""

import jax
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine import build_engine
from pagedjax.llm import LLM
from pagedjax.sampling_params import SamplingParams
from pallas_kernels.interpret import interpret_mode

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11), reason="the Mosaic GPU of jax 0.10 has no mma.sync"
    ),
]

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a chosen token's logprob, by the pool's type: the kernels round queries and softmax weights
to it, too."""


def serve(gguf, lines, num_tokens, kv_cache_dtype):
    """Outputs of the lines' prompts, served together in steps of 16 tokens."""
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        attention="pallas",
        num_blocks=16,
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        token_buckets=(16,),
        max_logprobs=1,
        compilation_cache_dir="off",
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    with interpret_mode():
        llm = LLM(engine=build_engine(gguf, config, progress=False, warm_up=False))
        return llm.generate([line["prompt_text"] for line in lines], params, use_tqdm=False)


def largest_error(outputs, lines, num_tokens):
    """Of the chosen tokens' logprobs, after the tokens up to the first near-tie were compared."""
    errors = []
    for output, line in zip(outputs, lines, strict=True):
        n = min([num_tokens, *line["near_ties"]])
        got = output.outputs[0]
        assert output.prompt_token_ids == line["prompt_ids"], line["id"]
        assert len(got.token_ids) == num_tokens
        assert list(got.token_ids[:n]) == line["output_ids"][:n], line["id"]
        logprobs = [got.logprobs[i][got.token_ids[i]].logprob for i in range(n)]
        errors += np.abs(np.subtract(logprobs, line["logprobs"][:n])).tolist()
    assert errors
    return max(errors)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "names", "num_tokens"),
    [
        # Prompts of 5, 11, 1 and 16 tokens.
        ("float32", ("g00", "g04", "g08", "g18"), 4),
        # As the kernels run on a GPU.
        ("bfloat16", ("g00", "g08"), 3),
    ],
)
def test_golden_lines(smollm2_gguf, golden, kv_cache_dtype, names, num_tokens):
    lines = [line for line in golden if line["id"] in names]
    outputs = serve(smollm2_gguf, lines, num_tokens, kv_cache_dtype)
    error = largest_error(outputs, lines, num_tokens)
    assert error < TOLERANCES[kv_cache_dtype]
