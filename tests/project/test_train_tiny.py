"""scripts/train_tiny.py: a short run learns something and writes a directory that loads."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.forward import forward_dense
from pagedjax.models.weights import load_model
from pagedjax.tokenizers import apply_chat_template, load_tokenizer
from scripts import train_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(directory, loss curve) of 30 steps of a very small model on the licence text."""
    out = tmp_path_factory.mktemp("tiny")
    settings = train_tiny.Settings(
        out=out,
        text=ROOT / "LICENSE",
        steps=30,
        batch_size=8,
        context=32,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        learning_rate=1e-2,
        sample_prompt="The Licensor",
    )
    return out, train_tiny.train(settings)


def test_training_and_held_out_loss_fall(run):
    _, curve = run
    steps, training, held_out = zip(*curve, strict=True)
    assert steps[0] == 0
    assert steps[-1] == 30
    # Untrained is a uniform guess over 300 tokens.
    assert held_out[0] == pytest.approx(np.log(300), rel=0.05)
    assert training[-1] < training[0] - 1
    assert held_out[-1] < held_out[0] - 0.7


def test_the_written_model_has_the_held_out_loss_that_was_reported(run):
    """The weights in the directory are the trained ones, in the right places."""
    out, curve = run
    model = load_model(out, dtype=jnp.float32)
    documents = train_tiny.load_documents(train_tiny.Settings(text=ROOT / "LICENSE"))
    tokenizer = train_tiny.train_tokenizer(documents, 300)
    _, held_out = train_tiny.encode_split(tokenizer, documents)
    starts = np.linspace(0, len(held_out) - 1, 32, dtype=int)
    batch = train_tiny.windows(held_out, starts, 33)
    loss = train_tiny.loss_fn(model.params, batch, model.config)
    assert float(loss) == pytest.approx(curve[-1][2], abs=1e-4)


def test_the_directory_has_the_tokenizer_and_its_chat_template(run):
    out, _ = run
    tokenizer = load_tokenizer(out)
    config = load_model(out).config
    text = "Licensed under the Apache License, Version 2.0"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < config.vocab_size == tokenizer.vocab_size
    assert set(config.eos_token_ids) == set(tokenizer.encode("<|im_end|><|endoftext|>"))
    chat = apply_chat_template(tokenizer, [{"role": "user", "content": "Hello"}])
    assert chat == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    logits = forward_dense(load_model(out).params, jnp.asarray([ids]), config)
    assert bool(jnp.isfinite(logits).all())


def test_the_plot_is_a_picture(run):
    assert (run[0] / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run[0] / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_documentation_strings_are_found_without_importing():
    names = dict(train_tiny.documentation_strings())
    assert "textwrap.dedent" in names
    assert "leading whitespace" in names["textwrap.dedent"]
    assert len(names) > 1000


def test_the_sampled_text_continues_the_prompt_and_stops_at_the_window(run):
    model = load_model(run[0], dtype=jnp.float32)
    ids = train_tiny.sample(model.params, model.config, [5, 6, 7], 100, seed=1)
    assert ids[:3] == [5, 6, 7]
    assert len(ids) == model.config.max_position_embeddings
    assert ids == train_tiny.sample(model.params, model.config, [5, 6, 7], 100, seed=1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"vocab_size": 100}, r"vocab_size must be at least 259 \(got 100\)"),
        ({"steps": 0}, r"steps must be at least 1 \(got 0\)"),
        ({"num_heads": 7}, r"hidden_size must be a multiple of num_heads, 7"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        train_tiny.Settings(**values)


def test_too_little_text_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("One.\n\nTwo.\n")
    with pytest.raises(ValueError, match="2 documents; at least 20"):
        train_tiny.load_documents(train_tiny.Settings(text=path))
