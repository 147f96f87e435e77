"""A tiny random model and a tokenizer of bytes, for tests of the shell."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from pagedjax.config import EngineConfig
from pagedjax.core.execute import StepConfig
from pagedjax.engine import Engine
from pagedjax.engine.build import scheduler_config
from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import LlamaModel
from pagedjax.models.params import init_params
from pagedjax.tokenizers import Vocabulary
from pagedjax.tokenizers.detokenizer import decode
from pagedjax.tokenizers.vocabulary import DecodeRules

EOS = 256
USER = 257
ASSISTANT = 258
VOCAB_SIZE = 260
SPECIAL = {EOS: "<eos>", USER: "<user>", ASSISTANT: "<assistant>", 259: "<unused>"}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteTokenizer:
    """One token a byte, and a few special ones."""

    def __init__(self) -> None:
        names = [f"<0x{i:02X}>" for i in range(256)] + list(SPECIAL.values())
        data = [bytes([i]) for i in range(256)] + [s.encode() for s in SPECIAL.values()]
        self.vocabulary = Vocabulary(
            tokens=tuple(names),
            token_bytes=tuple(data),
            special_ids=frozenset(SPECIAL),
            literal_ids=frozenset(),
            rules=DecodeRules(),
        )
        self.bos_token_id = None
        self.eos_token_ids = (EOS,)
        self.special_tokens = {"eos_token": "<eos>"}
        self.chat_template = TEMPLATE
        self.vocab_size = VOCAB_SIZE
        self.special_token_ids = frozenset(SPECIAL)

    def encode(self, text, *, add_special_tokens=True):
        for token_id, name in SPECIAL.items():
            if name in text:
                left, right = text.split(name, 1)
                return [*self.encode(left), token_id, *self.encode(right)]
        return list(text.encode())

    def decode(self, ids, *, skip_special_tokens=True):
        return decode(self.vocabulary, ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id):
        return self.vocabulary.tokens[token_id]

    def token_to_id(self, token):
        return self.vocabulary.tokens.index(token)


MODEL = LlamaModel(
    config=ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_ids=(EOS,),
    )
)
SETTINGS = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "block_size": 4,
    "num_blocks": 28,
    "max_num_seqs": 4,
    "num_rows": 8,
    "max_num_batched_tokens": 16,
    "token_buckets": (4, 16),
    "max_model_len": 96,
    "max_queue_size": 64,
    "max_logprobs": 5,
}
# More rows than a small pool holds, victims swapped out: what several files compile once.
PRESSED = {
    "max_num_seqs": 8,
    "num_rows": 12,
    "num_blocks": 30,
    "watermark": 0.0,
    "token_buckets": (16,),
    "max_logprobs": 16,
    "max_beam_width": 8,
    "num_host_blocks": 40,
    "preemption_mode": "swap",
    "scheduling_policy": "priority",
}


@functools.cache
def params():
    """Weights large enough that greedy outputs vary from prompt to prompt."""
    weights = init_params(MODEL.config, jax.random.key(0), dtype=jnp.float32, stacked=False)
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, weights)


def make_engine(weights=None, costs=None, **changes) -> Engine:
    """An engine over the tiny model, not warmed up. `costs`: fields of `SchedulerConfig`."""
    config = EngineConfig(**(SETTINGS | changes))
    # Fewer than there are rows, so that a full table is given back row by row.
    scheduler = replace(
        scheduler_config(config, platform="cpu"), max_retirements=1, **(costs or {})
    )
    return Engine(
        params() if weights is None else weights,
        StepConfig(scheduler=scheduler, model=MODEL),
        ByteTokenizer(),
        config=config,
        kv_dtype=jnp.dtype(config.kv_cache_dtype),
        model_name="tiny",
    )


def drain(engine):
    """Step until idle; -> all deltas. Fails if that never happens, or if a request that has
    finished gets more."""
    deltas, finished = [], set()
    for _ in range(5000):
        if not engine.has_work():
            return deltas
        for delta in engine.step():
            assert delta.request_id not in finished
            if delta.finished:
                finished.add(delta.request_id)
            deltas.append(delta)
    raise AssertionError("the engine never becomes idle")


def run(engine, requests):
    """Add (id, prompt, params) to an engine, step until idle; -> id -> whole output."""
    outputs = {}
    for request_id, prompt, sampling in requests:
        engine.add_request(request_id, prompt, sampling)
    for delta in drain(engine):
        if delta.request_id in outputs:
            outputs[delta.request_id].add(delta)
        else:
            outputs[delta.request_id] = delta
    return outputs
