"""SmolLM2-135M-Instruct itself, against logprobs that transformers computed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models import presets
from pagedjax.models.forward import forward_dense
from pagedjax.models.weights import load_model, read_config

# "The capital of France is", 48 greedy tokens with end-of-sequence ignored, and their logprobs.
PROMPT_IDS = [504, 3575, 282, 4649, 314]
# fmt: off
OUTPUT_IDS = [
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216,
    33, 34, 42, 33, 34, 42, 37, 35, 30, 2, 198, 1, 520, 9531, 198, 504, 2988, 314, 42, 216, 34, 32,
    33, 40, 29, 32, 33, 29,
]
LOGPROBS = [
        -0.25807, -0.38013, -1.00935, -0.87928, -1.936, -3.2094, -0.35028, -0.46372, -0.69237,
    -1.23453, -1.76219, -1.58794, -1.43447, -0.59932, -0.31825, -1.87164, -0.0014, -0.98599,
    -1.7552, -1.26775, -0.89037, -1.80478, -0.08382, -1.57617, -2.05248, -0.50708, -1.53391,
    -1.96515, -0.77557, -0.16773, -0.00096, -0.40793, -0.34664, -1e-05, -0.00043, -1.40832,
    -0.32418, -0.49181, -0.55243, -0.33971, -0.07695, -0.0066, -0.06551, -0.09414, -0.00089,
    -0.05628, -0.03237, -2e-05,
]
# fmt: on


@pytest.mark.real_model
def test_configuration_equals_the_preset(smollm2_gguf):
    assert read_config(smollm2_gguf) == presets.preset_config("smollm2-135m")


@pytest.mark.real_model
def test_greedy_tokens_and_logprobs_equal_the_reference(smollm2_gguf):
    loaded = load_model(smollm2_gguf, dtype="float32", stacked=True)
    tokens = jnp.asarray([PROMPT_IDS + OUTPUT_IDS])
    logits = jax.jit(forward_dense, static_argnums=2)(loaded.params, tokens, loaded.config)[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits))[len(PROMPT_IDS) - 1 : -1]
    assert logprobs.argmax(axis=-1).tolist() == OUTPUT_IDS
    chosen = logprobs[np.arange(len(OUTPUT_IDS)), OUTPUT_IDS]
    np.testing.assert_allclose(chosen, LOGPROBS, atol=1e-4, rtol=0)
