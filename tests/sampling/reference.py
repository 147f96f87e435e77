"""The sampler's definition in plain numpy, float64, with a full sort; helpers for its tests."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pagedjax.sampling import NULL, SamplingInputs


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one row's filters keep."""

    probabilities: np.ndarray
    """[V] float64, zero for tokens that are not kept."""
    kept: np.ndarray
    """[V] bool."""
    margin: float
    """How far, relative to all weight, top-p and min-p are from deciding the other way."""


def order(logits: np.ndarray) -> np.ndarray:
    """Token ids by rank: larger logit first, then lower id."""
    return np.argsort(-logits.astype(np.float64), kind="stable")


def filtered(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Reference:
    """Temperature, then min-p, top-k and top-p, for temperature > 0."""
    x = logits.astype(np.float64)
    share = np.exp((x - x.max()) / float(np.float32(temperature)))
    min_p, top_p = float(np.float32(min_p)), float(np.float32(top_p))
    kept = share >= min_p
    margin = float(np.abs(share - min_p).min()) if 0 < min_p < 1 else 1.0
    ranked = order(x)
    if 0 < top_k < len(x):
        kept[ranked[top_k:]] = False
    if top_p < 1:
        mass = np.where(kept, share, 0.0)[ranked]
        before = np.cumsum(mass) - mass
        need = top_p * mass.sum()
        kept[ranked[(before >= need) & (before > 0)]] = False
        margin = min(margin, float(np.abs(before[1:] - need).min()) / mass.sum())
    weight = np.where(kept, share, 0.0)
    return Reference(probabilities=weight / weight.sum(), kept=kept, margin=margin)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make_inputs(
    rows: int,
    *,
    temperature: object = 0.0,
    top_k: object = 0,
    top_p: object = 1.0,
    min_p: object = 0.0,
    seed: object = 0,
    position: object = 0,
    forbid_stop: object = False,
    stop_token_ids: object = (),
    num_logprobs: object = -1,
    valid: object = True,
    num_stop: int = 6,
) -> SamplingInputs:
    """Inputs for R rows; every field is a value for all rows or one per row."""

    def fill(value: object, dtype: object) -> object:
        return jnp.asarray(np.broadcast_to(np.asarray(value), (rows,)).astype(dtype))

    stops = np.full((rows, num_stop), NULL, np.int32)
    stops[:, : len(stop_token_ids)] = stop_token_ids  # type: ignore[arg-type]
    return SamplingInputs(
        temperature=fill(temperature, np.float32),
        top_k=fill(top_k, np.int32),
        top_p=fill(top_p, np.float32),
        min_p=fill(min_p, np.float32),
        seed=fill(seed, np.uint32),
        position=fill(position, np.int32),
        forbid_stop=fill(forbid_stop, bool),
        stop_token_ids=jnp.asarray(stops),
        num_logprobs=fill(num_logprobs, np.int32),
        valid=fill(valid, bool),
    )
