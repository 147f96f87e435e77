"""Tunes a soft prefix through the paged KV cache, with a frozen model, and generates with it.

    python scripts/tune_soft_prefix.py                       # SmolLM2, minutes on two cores
    python scripts/tune_soft_prefix.py --model runs/tiny     # the model of scripts/train_tiny.py

The prefix is keys and values of a few tokens in every layer (prefix tuning), written to blocks of
the pool that all target sequences name first in their block tables: it is there once, however many
sequences share it, and its gradient collects from all of them. The loss is that of each target's
tokens after its prompt; only the prefix learns. Then each prompt is continued greedily, with the
prefix in the pool and without. The folder gets prefix.npz and loss.png.
"""

import functools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figure_files import save_losses
from soft_prefix import (
    Batch,
    Layout,
    Prefix,
    generate,
    pool_dtype,
    prefix_loss,
    prefix_of_text,
)

from pagedjax.models.config import ModelConfig

EXAMPLES = (
    ("What is the capital of France?", " Arr, that be Paris, matey!"),
    ("What is the capital of Italy?", " Arr, that be Rome, matey!"),
    ("What is two plus two?", " Arr, that be four, matey!"),
    ("What colour is the sky?", " Arr, that be blue, matey!"),
    ("What do cows drink?", " Arr, that be water, matey!"),
    ("What is the opposite of hot?", " Arr, that be cold, matey!"),
)
"""Prompt and target: answers in a manner that no model has by itself."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to tune, how long."""

    model: str = "smollm2-135m"
    """A preset, a directory or a GGUF file."""
    out: Path = Path("runs/soft_prefix")
    """Folder to write."""
    examples: Path | None = None
    """A text file, a prompt, a tab and its target on each line. None: six short answers."""
    prefix_tokens: int = 16
    """Tokens of the prefix: whole blocks, so that sequences can share them."""
    block_size: int = 16
    steps: int = 60
    learning_rate: float = 0.02
    init: str = "Answer the question in the manner of an old pirate. "
    """Text whose keys and values the prefix begins with, repeated to its length."""
    attention: Literal["auto", "xla", "pallas"] = "auto"
    """Implementation of attention and of writes to the pool, also while tuning; gradients are XLA's
    whichever it is. auto: the GPU kernels where there is a GPU."""

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "block_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if self.prefix_tokens % self.block_size:
            raise ValueError(
                f"prefix_tokens must be a multiple of block_size, {self.block_size} "
                f"(got {self.prefix_tokens})"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0 (got {self.learning_rate})")


def implementation(settings: Settings) -> str | None:
    """What `paged_attention` and `write_kv` take for the settings' `attention`."""
    return None if settings.attention == "auto" else settings.attention


def training_batch(
    examples: list[tuple[list[int], list[int]]], settings: Settings
) -> tuple[Layout, Batch, jax.Array, jax.Array]:
    """All (prompt, target) pairs as one ragged step, with labels and weights: targets count."""
    sequences = [prompt + target for prompt, target in examples]
    inputs = [tokens[:-1] for tokens in sequences]
    layout = Layout(
        block_size=settings.block_size,
        prefix_tokens=settings.prefix_tokens,
        max_tokens=tuple(map(len, inputs)),
        attention=implementation(settings),
    )
    labels = np.concatenate([tokens[1:] for tokens in sequences])
    counted = [
        np.arange(1, len(prompt) + len(target)) >= len(prompt) for prompt, target in examples
    ]
    weights = jnp.asarray(np.concatenate(counted), jnp.float32)
    batch = layout.batch(inputs, [0] * len(inputs))
    return layout, batch, jnp.asarray(labels, jnp.int32), weights


def tune(
    params: Any,
    config: ModelConfig,
    prefix: Prefix,
    examples: list[tuple[list[int], list[int]]],
    settings: Settings,
) -> tuple[Prefix, list[float]]:
    """The tuned prefix and the loss before each step and after the last."""
    layout, batch, labels, weights = training_batch(examples, settings)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps, 0.05)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    loss_fn = functools.partial(prefix_loss, config=config, layout=layout)

    @jax.jit
    def update(prefix: Prefix, state: Any, params: Any) -> tuple[Prefix, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(prefix, params, batch, labels, weights)
        updates, state = optimizer.update(gradients, state, prefix)
        return optax.apply_updates(prefix, updates), state, loss

    state, losses = optimizer.init(prefix), []
    bar = tqdm(range(settings.steps), desc="tuning", unit="step")
    for _ in bar:
        prefix, state, loss = update(prefix, state, params)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    losses.append(float(jax.jit(loss_fn)(prefix, params, batch, labels, weights)))
    return prefix, losses


def load(settings: Settings) -> tuple[ModelConfig, Any, Any]:
    """(configuration, parameters, tokenizer). Layers are stacked: written out one by one, or in a
    loop over a switch, a gradient through them would copy every layer's weights.
    """
    from pagedjax.models.presets import resolve_model
    from pagedjax.models.weights import load_model
    from pagedjax.tokenizers import load_tokenizer

    path = resolve_model(settings.model)
    model = load_model(path, dtype=pool_dtype(), stacked=True)
    return model.config, model.params, load_tokenizer(path, vocab_size=model.config.vocab_size)


def read_examples(settings: Settings) -> list[tuple[str, str]]:
    """Pairs of prompt and target. Raises ``ValueError`` naming a line that is none."""
    if settings.examples is None:
        return list(EXAMPLES)
    pairs = []
    for number, line in enumerate(settings.examples.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        prompt, tab, target = line.partition("\t")
        if not (prompt and tab and target):
            raise ValueError(f"{settings.examples}, line {number}: not a prompt, a tab, a target")
        pairs.append((prompt, target))
    if not pairs:
        raise ValueError(f"{settings.examples} has no lines")
    return pairs


def right(output: list[int], target: list[int]) -> int:
    """Tokens of the target that an output has before its first wrong one."""
    pairs = zip(output, target, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(target)))


def run(settings: Settings) -> tuple[list[float], int, int, int]:
    """The whole run. Returns the losses, and how many target tokens come out right with the prefix
    and without, of how many.
    """
    started = time.perf_counter()
    config, params, tokenizer = load(settings)
    texts = read_examples(settings)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    examples = [(encode(prompt), encode(target)) for prompt, target in texts]
    longest = settings.prefix_tokens + max(len(p) + len(t) for p, t in examples)
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"prefix, prompt and target have {longest} tokens, more than the model's "
            f"{config.max_position_embeddings}"
        )
    text_ids = encode(settings.init) or [0]
    begin = (text_ids * -(-settings.prefix_tokens // len(text_ids)))[: settings.prefix_tokens]
    attention = implementation(settings)
    prefix = prefix_of_text(params, config, begin, settings.block_size, attention)
    numbers = prefix.k.size + prefix.v.size
    print(
        f"{len(examples)} sequences share {settings.prefix_tokens // settings.block_size} block(s) "
        f"of the pool; {numbers:,} numbers to tune, {config.num_parameters:,} frozen"
    )
    prefix, losses = tune(params, config, prefix, examples, settings)
    prompts = [prompt for prompt, _ in examples]
    longest = max(len(target) for _, target in examples)
    outputs = [
        generate(
            *(params, config, prompts, longest),
            prefix=p,
            block_size=settings.block_size,
            attention=attention,
        )
        for p in (None, prefix)
    ]
    for (text, _), (_, target), *made in zip(texts, examples, *outputs, strict=True):
        print(f"\n{text}")
        for label, ids in zip(("without", "with"), made, strict=True):
            print(f"  {label:>8}: {tokenizer.decode(ids[: len(target)])!r}")
    counts = [
        sum(right(out, target) for out, (_, target) in zip(of, examples, strict=True))
        for of in outputs
    ]
    total = sum(len(target) for _, target in examples)
    settings.out.mkdir(parents=True, exist_ok=True)
    np.savez(settings.out / "prefix.npz", k=np.asarray(prefix.k), v=np.asarray(prefix.v))
    title = f"soft prefix of {settings.prefix_tokens} tokens"
    save_losses({"loss": (range(len(losses)), losses)}, settings.out / "loss.png", title)
    print(
        f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}; of {total} target tokens {counts[0]} come "
        f"out right without the prefix, {counts[1]} with it; "
        f"{time.perf_counter() - started:.0f} s; wrote {settings.out}"
    )
    return losses, counts[1], counts[0], total


def main() -> int:
    """Returns the exit status."""
    import tyro

    try:
        run(tyro.cli(Settings, description=__doc__))
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
