"""The Llama model as Flax NNX modules: one definition, driven by :class:`ModelConfig`.

The modules say which parameters exist and what a layer computes; what attention means is handed in
as a function, so the paged engine, the dense reference and the training script run the same layers.
Outside this folder a model is a plain pytree (:func:`model_params`), and forward passes are pure
functions of it (``pagedjax.models.forward``).

Numbers: weights and the activations that enter a product have the parameters' dtype, products
accumulate in float32, and norms, rotary embeddings, the activation function and the residual stream
are float32. So bfloat16 rounds only what a product reads, and float32 is float32 throughout (on a
GPU too, where the default would be TF32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pagedjax.models.config import ModelConfig
from pagedjax.models.rope import apply_rope

Cache = TypeVar("Cache")
# (q [T, H, D], k [T, K, D], v [T, K, D], cache) -> (output [T, H, D], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] (any float dtype) times weight [out, in], transposed: [T, out] float32.

    Contracting the last axis of both is the layout that XLA's CPU libraries are fastest with.
    """
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """A product without bias; weight [out, in]."""

    def __init__(self, in_size: int, out_size: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (out_size, in_size), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(x, self.weight[...])


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32; weight [E]."""

    def __init__(self, size: int, *, eps: float, dtype: Any) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weight[...].astype(jnp.float32)


class LlamaLayer(nnx.Module):
    """One transformer layer: attention and a gated feed-forward network, each behind a norm and a
    residual sum.

    The projections that read the same input are one product: q, k and v as ``qkv_proj`` [(H + 2K)
    D, E], gate and up as ``gate_up_proj`` [2F, E].
    """

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        size, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        q_size = self.num_heads * self.head_dim
        qkv_size = q_size + 2 * self.num_kv_heads * self.head_dim
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.qkv_proj = Linear(size, qkv_size, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(q_size, size, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.gate_up_proj = Linear(size, 2 * inner, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attend: Attend,
        cache: Cache,
        select: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[jax.Array, Cache]:
        """x [T, E] float32 -> [T, E] float32; ``select`` drops tokens that nothing after attention
        needs.
        """
        attended, cache = attend(*self.project(x, rope), cache)
        if select is not None:
            x, attended = select(x), select(attended)
        return self.finish(x, attended), cache

    def project(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What goes into attention: x [T, E] -> q [T, H, D], k and v [T, K, D]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        dtype = self.qkv_proj.weight[...].dtype
        qkv = self.qkv_proj(self.input_layernorm(x)).reshape(x.shape[0], -1, self.head_dim)
        q = apply_rope(qkv[:, :heads], rope).astype(dtype)
        k = apply_rope(qkv[:, heads : heads + kv_heads], rope).astype(dtype)
        v = qkv[:, heads + kv_heads :].astype(dtype)
        return q, k, v

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """What comes after attention: x [T, E] and attended [T, H, D] -> x [T, E]."""
        x = x + self.o_proj(attended.reshape(x.shape[0], -1))
        gate, up = jnp.split(self.gate_up_proj(self.post_attention_layernorm(x)), 2, axis=-1)
        return x + self.down_proj(jax.nn.silu(gate) * up)


class Embedding(nnx.Module):
    """A table of vectors, one a token; weight [V, E]."""

    def __init__(self, vocab_size: int, size: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocab_size, size), dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return self.weight[...].at[token_ids].get(mode="clip").astype(jnp.float32)


class LlamaTrunk(nnx.Module):
    """What is not a layer: the embedding, the final norm and, when it is not tied to the embedding,
    the head.
    """

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, E] float32, before the final norm -> [R, V] float32."""
        head = self.embed_tokens if self.tied else self.lm_head
        return product(self.norm(hidden), head.weight[...])


class Llama(nnx.Module):
    """The whole model. Split it once with :func:`model_params`; the engine keeps only the resulting
    pytree.
    """

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.config = config
        self.trunk = LlamaTrunk(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )


def model_params(model: Llama, *, stacked: bool = False) -> dict[str, Any]:
    """The parameters of a module as a plain pytree: ``trunk`` and ``layers``.

    ``layers`` is a tuple with one dict a layer, or, stacked, one dict whose arrays have a leading
    axis of layers.
    """
    state = nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
    layers = tuple(state["layers"][index] for index in range(model.config.num_hidden_layers))
    return {"trunk": state["trunk"], "layers": stack_layers(layers) if stacked else layers}


def stack_layers(layers: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Per-layer pytrees as one pytree of arrays with a leading axis of layers."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def unstack_layers(layers: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The inverse of :func:`stack_layers`."""
    count = jax.tree.leaves(layers)[0].shape[0]
    return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count))


def _bind(module: type, config: ModelConfig, params: dict[str, Any]) -> Any:
    """A module over given parameters; its structure comes from an abstract run of __init__."""
    abstract = nnx.eval_shape(lambda: module(config, dtype=jnp.float32, rngs=nnx.Rngs(params=0)))
    return nnx.merge(nnx.split(abstract, nnx.Param)[0], params)


def bind_trunk(config: ModelConfig, params: dict[str, Any]) -> LlamaTrunk:
    """The trunk over ``params["trunk"]``."""
    return _bind(LlamaTrunk, config, params["trunk"])


def _loop_layers(
    layers: list[LlamaLayer],
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array | int], Attend],
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Layers of separate weights in one loop, so that attention is compiled once and not L times.

    On XLA:CPU a scan over stacked weights copies each layer's before use, and layers written out
    one by one take four times as long to compile. Here a switch picks the products of the layer:
    its branches only read their weights, which are not copied, and the cache stays outside it.
    """
    if not layers:
        return x, cache
    project = [lambda x, layer=layer: layer.project(x, rope) for layer in layers]
    finish = [lambda x, attended, layer=layer: layer.finish(x, attended) for layer in layers]

    def body(index: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        x, cache = carry
        attended, cache = attend(index)(*lax.switch(index, project, x), cache)
        return lax.switch(index, finish, x, attended), cache

    return lax.fori_loop(0, len(layers), body, (x, cache))


def run_layers(
    config: ModelConfig,
    layers: tuple[dict[str, Any], ...] | dict[str, Any],
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array | int], Attend],
    cache: Cache,
    select: Callable[[jax.Array], jax.Array] | None = None,
    *,
    unroll: bool = False,
) -> tuple[jax.Array, Cache]:
    """All layers over x [T, E]: a loop over a tuple of layers, or a scan over stacked arrays.

    ``attend(layer)`` gives the attention function of layer ``layer``. ``cache`` passes from layer
    to layer and stays in the loop's carry (as scanned input and output it would be allocated
    twice). ``select`` is applied inside the last layer of a tuple, after it when they are scanned.
    ``unroll`` writes the layers of a tuple out one by one: for gradients.
    """
    if isinstance(layers, tuple):
        bound = [_bind(LlamaLayer, config, layer_params) for layer_params in layers]
        # Nothing may be selected before the last layer, which then stands by itself.
        looped = 0 if unroll else len(bound) - (select is not None)
        x, cache = _loop_layers(bound[:looped], x, rope, attend, cache)
        for index in range(looped, len(bound)):
            last = index == len(bound) - 1
            x, cache = bound[index](x, rope, attend(index), cache, select if last else None)
        return x, cache

    def body(carry: tuple[jax.Array, Cache], scanned: tuple[Any, jax.Array]) -> Any:
        layer_params, index = scanned
        layer = _bind(LlamaLayer, config, layer_params)
        return layer(carry[0], rope, attend(index), carry[1]), None

    (x, cache), _ = lax.scan(body, (x, cache), (layers, jnp.arange(config.num_hidden_layers)))
    return x if select is None else select(x), cache
