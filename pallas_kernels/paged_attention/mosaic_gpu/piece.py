"""One tile's work for one KV head: what both prefill kernels go by."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.mosaic_gpu.launch import Call, Inputs
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import Stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A prefill tile and one KV head.

    Attributes:
      stream: the keys and values that the tile's queries see.
      position: the first query's position in its row.
      end: the context of the last query; what lies after it no query sees.
      oldest: the first token that any query sees.
    """

    stream: Stream
    position: jax.Array
    end: jax.Array
    oldest: jax.Array

    def visible(
        self,
        tokens: jax.Array,
        queries: jax.Array,
        call: Call,
        spread: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> jax.Array:
        """Whether each query, counted from the tile's first, sees each token of the row.

        ``spread`` brings what is computed of each query into the tokens' shape and layout.
        """
        # Rows past the tile's queries show nothing of what lies after its context.
        positions = jnp.minimum(queries + self.position, self.end - 1)
        seen = tokens <= spread(positions)
        if call.sliding_window is not None:
            seen &= tokens > spread(positions - call.sliding_window)
        return seen

    def seen(self, tokens: jax.Array) -> jax.Array:
        """Whether any query sees the tokens."""
        return (tokens >= self.oldest) & (tokens < self.end)

    def whole_chunks(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Where the chunks begin and end that every query sees whole, and which need no mask: those
        between the last query's window and the first query.
        """
        stream, chunk = self.stream, self.stream.tile.chunk
        whole_end = jnp.clip((self.position + 1 - stream.begin) // chunk, 0, stream.num_chunks)
        if call.sliding_window is None:
            return jnp.int32(0), whole_end
        newest_oldest = jnp.maximum(self.end - call.sliding_window, 0)
        whole_begin = (newest_oldest - stream.begin + chunk - 1) // chunk
        return jnp.clip(whole_begin, 0, whole_end), whole_end


def open_piece(
    inputs: Inputs,
    stages: tuple[Any, ...],
    call: Call,
    item: jax.Array,
    head: jax.Array,
    filled: jax.Array | int = 0,
) -> Piece:
    """The piece of a work item; ``filled`` as for ``Stream``."""
    tile = call.config.prefill
    row, num_queries, position = (inputs.items[item, c] for c in range(3))
    end = position + num_queries
    oldest = begin = jnp.int32(0)
    if call.sliding_window is not None:
        oldest = jnp.maximum(position - call.sliding_window + 1, 0)
        begin = oldest // tile.chunk * tile.chunk
    stream = inputs.stream(
        stages, call, tile, row=row, head=head, begin=begin, end=end, filled=filled
    )
    return Piece(stream=stream, position=position, end=end, oldest=oldest)
