"""Trains a tiny Llama in about two minutes on two cores and writes it as a Hugging Face directory.

    python scripts/train_tiny.py                        # -> runs/tiny
    python scripts/serve_local.py --model runs/tiny     # serve it

The text is at hand on any machine: the documentation strings of Python's standard library, as
short conversations ("What does textwrap.dedent do?"), or a file of your own (`--text FILE`). The
directory has config.json, model.safetensors, tokenizer.json, tokenizer_config.json (with a chat
template) and generation_config.json, as the server and the tests load them, and loss.png.
"""

import ast
import json
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figure_files import save_losses

from pagedjax.models.config import ModelConfig
from pagedjax.models.forward import forward_dense
from pagedjax.models.params import init_params
from pagedjax.models.weights.hf import save_hf

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train on, how large, how long. The defaults take about two minutes on two cores."""

    out: Path = Path("runs/tiny")
    """Directory to write."""
    text: Path | None = None
    """Text file to train on; blank lines part its documents. None: Python's documentation."""
    steps: int = 550
    batch_size: int = 8
    context: int = 128
    """Tokens in one training window; becomes the model's longest sequence."""
    vocab_size: int = 1024
    hidden_size: int = 160
    intermediate_size: int = 432
    num_layers: int = 4
    num_heads: int = 5
    num_kv_heads: int = 1
    learning_rate: float = 3e-3
    seed: int = 0
    max_documents: int = 20_000
    sample_prompt: str = "What does"
    """Beginning of the text that the model continues before and after training."""

    def __post_init__(self) -> None:
        least = {"vocab_size": 256 + len(SPECIAL_TOKENS), "context": 8}
        for name in ("steps", "batch_size", "context", "vocab_size", "num_layers", "max_documents"):
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(
                    f"{name} must be at least {least.get(name, 1)} (got {getattr(self, name)})"
                )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads, {self.num_heads} "
                f"(got {self.hidden_size})"
            )


def documentation_strings() -> Iterator[tuple[str, str]]:
    """(dotted name, documentation) of the standard library's modules, classes and functions.

    Read from the source files, nothing is imported; always in the same order.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
    }
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if skipped & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from _documented(tree, module)


def _documented(node: Any, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text and len(text) >= 40:
        yield name, text
    for child in node.body:
        definition = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if definition and not child.name.startswith("_"):
            yield from _documented(child, f"{name}.{child.name}")


def load_documents(settings: Settings) -> list[str]:
    """The texts to learn from, shuffled by the seed.

    Raises `ValueError` when there are fewer than 20.
    """
    if settings.text is not None:
        text = settings.text.read_text(encoding="utf-8")
        documents = [part.strip() for part in text.split("\n\n") if part.strip()]
    else:
        documents = [
            f"{TURN_START}user\nWhat does {name} do?{TURN_END}\n"
            f"{TURN_START}assistant\n{doc}{TURN_END}\n"
            for name, doc in documentation_strings()
        ]
    if len(documents) < 20:
        raise ValueError(f"the text has {len(documents)} documents; at least 20 are needed")
    random.Random(settings.seed).shuffle(documents)
    return documents[: settings.max_documents]


def train_tokenizer(documents: list[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (tokenizers.Tokenizer) with at most vocab_size tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode_split(tokenizer: Any, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token streams to train on and to hold out (every 20th document), int32."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = [[*item.ids, end] for item in tokenizer.encode_batch(documents)]
    held_out = [token for ids in encoded[::20] for token in ids]
    kept = [token for i, ids in enumerate(encoded) if i % 20 for token in ids]
    return np.array(kept, np.int32), np.array(held_out, np.int32)


def windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """[len(starts), length] windows of a stream [N]; short streams repeat from their beginning."""
    return tokens.take(starts[:, None] + np.arange(length)[None, :], mode="wrap")


def loss_fn(params: Any, batch: jax.Array, config: ModelConfig) -> jax.Array:
    """Mean cross-entropy (nats a token) of batch [Bt, context + 1] int32."""
    logits = forward_dense(params, batch[:, :-1], config)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def sample(params: Any, config: ModelConfig, ids: list[int], count: int, seed: int) -> list[int]:
    """`count` further tokens at temperature 0.7, by recomputing the whole window for each."""
    window = config.max_position_embeddings

    @jax.jit
    def step(params: Any, tokens: jax.Array, length: jax.Array, key: jax.Array) -> jax.Array:
        logits = forward_dense(params, tokens[None], config)[0, length - 1]
        return jax.random.categorical(key, logits / 0.7)

    ids = list(ids)
    for key in jax.random.split(jax.random.key(seed), min(count, window - len(ids))):
        padded = np.zeros(window, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(step(params, padded, len(ids), key)))
    return ids


def fit(
    config: ModelConfig, settings: Settings, train: np.ndarray, held_out: np.ndarray
) -> tuple[Any, list[tuple[int, float, float]]]:
    """Trained parameters, and (step, training loss, held-out loss) along the way."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, max(1, settings.steps // 20), settings.steps, 0.0
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    @jax.jit
    def held_out_loss(params: Any, batch: jax.Array) -> jax.Array:
        return loss_fn(params, batch, config)

    @jax.jit
    def update(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch, config)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init_params(config, jax.random.key(settings.seed), dtype=jnp.float32, stacked=False)
    state = optimizer.init(params)
    rng = np.random.default_rng(settings.seed)
    length = settings.context + 1
    check = windows(held_out, np.linspace(0, len(held_out) - 1, 32, dtype=int), length)
    every = max(1, settings.steps // 20)
    untrained = float(held_out_loss(params, check))
    curve = [(0, untrained, untrained)]
    recent: list[jax.Array] = []
    bar = tqdm(range(1, settings.steps + 1), desc="training", unit="step")
    for step in bar:
        starts = rng.integers(0, len(train), settings.batch_size)
        params, state, loss = update(params, state, windows(train, starts, length))
        recent.append(loss)
        if step % every == 0 or step == settings.steps:
            mean = float(np.mean([float(value) for value in recent]))
            curve.append((step, mean, float(held_out_loss(params, check))))
            recent.clear()
            bar.set_postfix(loss=f"{curve[-1][1]:.3f}", held_out=f"{curve[-1][2]:.3f}")
    return params, curve


def write_directory(out: Path, config: ModelConfig, params: Any, tokenizer: Any) -> None:
    """The checkpoint and everything that goes with it, in Hugging Face's form."""
    save_hf(out, config, params)
    tokenizer.save(str(out / "tokenizer.json"))
    details = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(details, indent=2) + "\n")
    generation = {"eos_token_id": list(config.eos_token_ids), "do_sample": True, "temperature": 0.7}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def train(settings: Settings) -> list[tuple[int, float, float]]:
    """The whole run: text, tokenizer, training, directory. Returns the loss curve of `fit`."""
    started = time.perf_counter()
    documents = load_documents(settings)
    tokenizer = train_tokenizer(documents, settings.vocab_size)
    train_ids, held_out_ids = encode_split(tokenizer, documents)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        eos_token_ids=(tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)),
    )
    print(
        f"{len(documents):,} documents, {len(train_ids):,} tokens to train on, "
        f"{len(held_out_ids):,} held out; {config.num_parameters:,} parameters"
    )

    def show(when: str, params: Any) -> None:
        ids = sample(params, config, prompt_ids, 48, settings.seed)
        print(f"--- {when} ---\n{tokenizer.decode(ids, skip_special_tokens=False)}\n")

    opening = "" if settings.text is not None else f"{TURN_START}user\n"
    prompt_ids = tokenizer.encode(opening + settings.sample_prompt).ids[: settings.context // 2]
    show("before training", init_params(config, jax.random.key(settings.seed), stacked=False))
    params, curve = fit(config, settings, train_ids, held_out_ids)
    show("after training", params)
    write_directory(settings.out, config, params, tokenizer)
    steps, training, held_out = zip(*curve, strict=True)
    curves = {"training": (steps, training), "held out": (steps, held_out)}
    save_losses(curves, settings.out / "loss.png", "train_tiny")
    print(
        f"held-out loss {curve[0][2]:.3f} -> {curve[-1][2]:.3f} in "
        f"{time.perf_counter() - started:.0f} s; wrote {settings.out}"
    )
    return curve


if __name__ == "__main__":
    import tyro

    train(tyro.cli(Settings, description=__doc__))
