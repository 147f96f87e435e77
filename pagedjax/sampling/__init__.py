"""The on-device sampler: pure functions from logits to token ids and log-probabilities."""

from pagedjax.sampling.sampler import sample
from pagedjax.sampling.types import NULL, Sampled, SamplingInputs

__all__ = ["NULL", "Sampled", "SamplingInputs", "sample"]
