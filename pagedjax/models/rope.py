"""Rotary position embeddings (RoFormer, arXiv:2104.09864) in the half-split layout that Hugging
Face uses.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.models.config import ModelConfig, RopeScaling


def llama3_factors(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by. inv_freq, result: [D/2] float64.

    Wavelengths above ``original_max_position_embeddings / low_freq_factor`` are stretched by
    ``factor``, those below ``... / high_freq_factor`` are kept, with a linear ramp of the frequency
    between (Llama 3.1's reference code).
    """
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    ramp = np.clip(ramp, 0.0, 1.0)
    return 1.0 / ((1 - ramp) / scaling.factor + ramp)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each rotary pair: [D/2] float32, scaled as the configuration says."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling or RopeScaling()
    if scaling.rope_type == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.rope_type == "llama3":
        inv_freq = inv_freq / llama3_factors(inv_freq, scaling)
    elif scaling.rope_type == "factors":
        inv_freq = inv_freq / np.asarray(scaling.factors)
    return inv_freq.astype(np.float32)


def rope_tables(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of positions [T] int32: two [T, 1, D/2] float32, made once a step and used
    by all layers.
    """
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(config)
    tables = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    # Without the barrier XLA computes the cosines anew in every layer, where they are used.
    return lax.optimization_barrier(tables)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each head of x [T, heads, D] float32; element i pairs with element i + D/2."""
    cos, sin = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
