"""The model as the engine's core sees it: a static object with pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pagedjax.models.config import ModelConfig
from pagedjax.models.exact import TILE, forward_exact
from pagedjax.models.forward import Batch, compute_logits, forward


@dataclass(frozen=True, kw_only=True)
class LlamaModel:
    """The static model object that the engine's core is given: pure functions and the sizes they
    imply.

    Attributes:
      attention: the implementation that `paged_attention` takes.
      deterministic: the bit-exact mode, see `pagedjax.models.exact`.
    """

    config: ModelConfig
    attention: str | None = None
    deterministic: bool = False

    @property
    def rows_at_once(self) -> int | None:
        """Rows whose logits are computed and sampled together; None: all."""
        return TILE if self.deterministic else None

    @property
    def num_layers(self) -> int:
        """Layers with keys and values in the pool."""
        return self.config.num_hidden_layers

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads a layer."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Elements a head."""
        return self.config.head_dim

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    def forward(
        self,
        params: dict[str, Any],
        k_pool: jax.Array,
        v_pool: jax.Array,
        batch: Batch,
        output_indices: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See ``forward.forward``."""
        run = forward_exact if self.deterministic else forward
        return run(
            params,
            k_pool,
            v_pool,
            batch,
            config=self.config,
            attention=self.attention,
            output_indices=output_indices,
        )

    def compute_logits(self, params: dict[str, Any], hidden: jax.Array) -> jax.Array:
        """See ``forward.compute_logits``."""
        return compute_logits(params, hidden, config=self.config)
