"""What is served: a model, the sizes of the engine's core, and requests that meet in it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.requests import RequestParams
from pagedjax.core.state import NULL
from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import LlamaModel
from pagedjax.models.params import default_stacked, init_params

TINY = ModelConfig(
    vocab_size=260,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
)
"""Random weights. The smallest head that the kernels take, and three query heads to a KV head as
SmolLM2 has."""

TINY_GAIN = 4.0
"""On the tiny model's matrices, so that attention is far from uniform and tokens vary."""

MAX_NUM_SEQS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Static sizes of the core, apart from those that follow from the requests.

    Attributes:
      block_size: B. buckets: the step sizes, ascending. num_blocks: N; None: too few for what runs
        at once, so that rows are preempted.
      dtype: of the weights and the KV pool.
    """

    block_size: int
    buckets: tuple[int, ...]
    num_blocks: int | None
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request. It gets the row of its place in the list.

    Attributes:
      arrival: it is handed over before this step.
    """

    arrival: int
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model by name: configuration, parameters and token ids to cut prompts from."""

    name: str
    config: ModelConfig
    params: Any
    text: np.ndarray


def model_config(name: str) -> ModelConfig:
    """The configuration of ``tiny``, a preset or a checkpoint, without its weights."""
    from pagedjax.models.presets import list_presets, preset_config
    from pagedjax.models.weights import read_config

    if name == "tiny":
        return TINY
    return preset_config(name) if name in list_presets() else read_config(name)


def load(name: str, *, dtype: str, seed: int, text: Path) -> Loaded:
    """The model with weights. The tiny one has random weights and random text.

    Args:
      text: a file whose tokens become the prompts of a real model.
    """
    if name == "tiny":
        params = init_params(TINY, jax.random.key(seed), dtype=jnp.dtype(dtype))
        params = jax.tree.map(
            # Matrices; a stacked norm has two axes as well, the first of layers.
            lambda x: x * TINY_GAIN if x.ndim > 1 and x.shape[-2] > TINY.num_hidden_layers else x,
            params,
        )
        random = np.random.default_rng(seed).integers(0, TINY.vocab_size, 4096)
        return Loaded(name=name, config=TINY, params=params, text=random)
    from pagedjax.models.presets import resolve_model
    from pagedjax.models.weights import load_model
    from pagedjax.tokenizers import load_tokenizer

    path = resolve_model(name)
    model = load_model(path, dtype=jnp.dtype(dtype), stacked=default_stacked())
    tokenizer = load_tokenizer(path, vocab_size=model.config.vocab_size)
    tokens = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    return Loaded(name=name, config=model.config, params=model.params, text=np.array(tokens))


def make_requests(text: np.ndarray, count: int, *, block_size: int, seed: int) -> list[Request]:
    """Requests that arrive one after the other, with prompts of half a block to five blocks.

    Three of four begin with the same two and a half blocks, so that later ones find two of them
    cached and part of a third (which is copied); every fourth has a text of its own. Every third
    is sampled at temperature 0.8 with a seed, the others are greedy.
    """
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, len(text)))
    shared = text.take(start + np.arange(2 * block_size + block_size // 2), mode="wrap")
    requests = []
    for i in range(count):
        own_length = int(rng.integers(block_size // 2, 2 * block_size + block_size // 2))
        own = text.take(int(rng.integers(0, len(text))) + np.arange(own_length), mode="wrap")
        prompt = own if i % 4 == 3 else np.concatenate([shared, own])
        requests.append(
            Request(
                arrival=0 if i < 2 else i,
                token_ids=tuple(map(int, prompt)),
                max_tokens=int(rng.integers(block_size // 2, 2 * block_size)),
                temperature=0.8 if i % 3 == 2 else 0.0,
                seed=seed + i,
            )
        )
    return requests


def scheduler_config(requests: list[Request], sizes: Sizes) -> SchedulerConfig:
    """The static sizes that serve the requests. Without ``num_blocks`` the pool holds twice
    the longest request, while up to four run.
    """
    b = sizes.block_size
    longest = max(len(r.token_ids) + r.max_tokens for r in requests)
    blocks = -(-longest // b)
    on_cpu = jax.default_backend() == "cpu"
    return SchedulerConfig(
        num_rows=max(len(requests), MAX_NUM_SEQS),
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=sizes.num_blocks or 2 * blocks,
        block_size=b,
        max_model_len=blocks * b,
        max_num_batched_tokens=sizes.buckets[-1],
        max_logprobs=1,
        max_stop_token_ids=1,
        max_admissions=MAX_NUM_SEQS,
        use_cond=on_cpu,
    )


def step_config(
    model: ModelConfig, requests: list[Request], sizes: Sizes, *, attention: str
) -> StepConfig:
    """A step with one implementation of the kernels."""
    return StepConfig(
        scheduler=scheduler_config(requests, sizes),
        model=LlamaModel(config=model, attention=attention),
    )


def request_params(request: Request) -> RequestParams:
    """What the core is told about a request. No token stops it: it runs to its length."""
    return RequestParams(
        max_total_tokens=np.int32(len(request.token_ids) + request.max_tokens),
        min_output_tokens=np.int32(0),
        stop_token_ids=np.full(1, NULL, np.int32),
        temperature=np.float32(request.temperature),
        top_k=np.int32(0),
        top_p=np.float32(1),
        min_p=np.float32(0),
        seed=np.uint32(request.seed),
        num_logprobs=np.int32(-1),
        salt=np.uint32(0),
    )
