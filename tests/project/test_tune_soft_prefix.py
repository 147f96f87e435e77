"""scripts/tune_soft_prefix.py: its gradient beside a dense float64 model, and a whole small run."""

import dataclasses
import functools
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.config import ModelConfig
from pagedjax.models.params import init_params
from pagedjax.models.rope import inverse_frequencies
from pallas_kernels import NULL
from pallas_kernels.interpret import interpret_mode
from scripts import train_tiny
from scripts import tune_soft_prefix as soft

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    tie_word_embeddings=True,
)
SETTINGS = soft.Settings(prefix_tokens=8, block_size=4, steps=40, learning_rate=0.1)
# Lengths of one token, within a block, of whole blocks and over their edge.
EXAMPLES = [([3, 5], [7]), ([1, 2, 3], [9, 8, 7, 6]), ([4], [22, 0, 1, 2, 3, 4, 5, 6])]


@pytest.fixture(scope="module")
def params():
    weights = init_params(CONFIG, jax.random.key(0), dtype=jnp.float32, stacked=True)
    # The matrices only: a stacked norm has two axes as well, the first of two layers.
    return jax.tree.map(lambda x: x * 12 if x.ndim > 1 and x.shape[-2] > 2 else x, weights)


@pytest.fixture(scope="module")
def prefix():
    shape = (2, 2, SETTINGS.prefix_tokens, CONFIG.num_key_value_heads, CONFIG.head_dim)
    k, v = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return soft.Prefix(k=jnp.asarray(k), v=jnp.asarray(v))


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * weight


def rotate(x, positions):
    angles = positions[:, None, None] * inverse_frequencies(CONFIG).astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def dense_loss(k, v, params):
    """The loss in numpy float64: no pages, one sequence after the other, one layer after the
    other. k, v: [L, P, K, D]."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    embed, group = params["trunk"]["embed_tokens"]["weight"], 2
    total = count = 0
    for prompt, target in EXAMPLES:
        tokens = np.array(prompt + target)
        inputs, length = tokens[:-1], len(tokens) - 1
        positions = np.arange(k.shape[1], k.shape[1] + length)
        x = embed[inputs]
        for layer in range(CONFIG.num_hidden_layers):
            w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
            h = norm(x, w["input_layernorm"]["weight"]) @ w["qkv_proj"]["weight"].T
            h = h.reshape(length, -1, CONFIG.head_dim)
            q, keys = rotate(h[:, :4], positions), rotate(h[:, 4:6], positions)
            keys = np.concatenate([k[layer], keys]).repeat(group, axis=1)
            values = np.concatenate([v[layer], h[:, 6:]]).repeat(group, axis=1)
            scores = np.einsum("qhd,shd->hqs", q, keys) / np.sqrt(CONFIG.head_dim)
            seen = np.arange(keys.shape[0]) <= np.arange(length)[:, None] + k.shape[1]
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended = np.einsum("hqs,shd->qhd", weights, values).reshape(length, -1)
            x = x + attended @ w["o_proj"]["weight"].T
            both = norm(x, w["post_attention_layernorm"]["weight"]) @ w["gate_up_proj"]["weight"].T
            gate, up = np.split(both, 2, axis=-1)
            x = x + gate / (1 + np.exp(-gate)) * up @ w["down_proj"]["weight"].T
        logits = norm(x, params["trunk"]["norm"]["weight"]) @ embed.T
        logits -= logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logprobs[np.arange(length), tokens[1:]]
        total -= chosen[len(prompt) - 1 :].sum()
        count += len(target)
    return total / count


def paged_loss(params):
    layout, batch, labels, weights = soft.training_batch(EXAMPLES, SETTINGS)

    def loss(prefix):
        return soft.prefix_loss(
            prefix, params, batch, labels, weights, config=CONFIG, layout=layout
        )

    return loss


@pytest.fixture(scope="module")
def loss_and_gradient(params, prefix):
    return jax.jit(jax.value_and_grad(paged_loss(params)))(prefix)


def test_the_sequences_share_the_blocks_of_the_prefix_and_no_others():
    layout, batch, _, _ = soft.training_batch(EXAMPLES, SETTINGS)
    tables = np.asarray(batch.block_tables)
    assert tables[:, :2].tolist() == [[0, 1]] * 3
    own = [block for row in tables[:, 2:] for block in row if block != NULL]
    assert sorted(own) == list(range(2, layout.num_blocks))
    slots = np.asarray(batch.slot_mapping)
    assert len(set(slots.tolist())) == len(slots)
    assert slots.min() >= SETTINGS.prefix_tokens


def test_loss_and_gradient_equal_finite_differences_of_a_dense_float64_model(
    params, prefix, loss_and_gradient
):
    loss, gradient = loss_and_gradient
    k, v = (np.asarray(x, np.float64) for x in (prefix.k, prefix.v))
    assert float(loss) == pytest.approx(dense_loss(k, v, params), rel=1e-5)
    step = 1e-5
    for name in ("k", "v"):
        got = np.asarray(getattr(gradient, name))
        wanted = np.zeros(got.shape)
        for index in np.ndindex(got.shape):
            ends = []
            for sign in (1, -1):
                moved = {"k": k.copy(), "v": v.copy()}
                moved[name][index] += sign * step
                ends.append(dense_loss(moved["k"], moved["v"], params))
            wanted[index] = (ends[0] - ends[1]) / (2 * step)
        scale = np.abs(wanted).max()
        assert scale > 1e-2
        assert np.abs(got - wanted).max() < 2e-5 * scale, name
        # Every layer, and every token of the prefix, has its part.
        assert (np.abs(got).max((2, 3)) > 1e-3 * scale).all()


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU of jax 0.10 has no mma.sync"
)
def test_through_the_gpu_kernels_the_gradient_is_the_same():
    """Prefix and layers written and attended to by the kernels, in the interpreter."""
    config = dataclasses.replace(CONFIG, head_dim=64, num_attention_heads=3, num_key_value_heads=1)
    settings = dataclasses.replace(SETTINGS, block_size=8)
    weights = init_params(config, jax.random.key(0), dtype=jnp.float32, stacked=True)
    shape = (2, 2, settings.prefix_tokens, 1, 64)
    k, v = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layout, batch, labels, counted = soft.training_batch(EXAMPLES, settings)

    def results(attention):
        chosen = dataclasses.replace(layout, attention=attention)
        loss = functools.partial(soft.prefix_loss, config=config, layout=chosen)
        prefix = soft.Prefix(k=jnp.asarray(k), v=jnp.asarray(v))
        return jax.jit(jax.value_and_grad(loss))(prefix, weights, batch, labels, counted)

    expected_loss, expected = results("xla")
    with interpret_mode():
        loss, got = results("pallas")
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for name in ("k", "v"):
        x, y = np.asarray(getattr(got, name)), np.asarray(getattr(expected, name))
        assert np.abs(x).max() > 1e-4
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


def test_a_platform_without_the_kernels_is_named(monkeypatch, capsys, tmp_path):
    def load(_):
        weights = init_params(CONFIG, jax.random.key(0), dtype=jnp.float32, stacked=True)
        return CONFIG, weights, types.SimpleNamespace(encode=lambda text, **_: [1, 2, 3])

    monkeypatch.setattr(soft, "load", load)
    arguments = ["--attention", "pallas", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["tune_soft_prefix.py", *arguments])
    assert soft.main() == 1
    assert "implementation 'pallas' needs" in capsys.readouterr().err


def test_tuning_teaches_the_targets_and_touches_only_the_prefix(params, prefix, loss_and_gradient):
    before = jax.tree.map(np.array, params)
    tuned, losses = soft.tune(params, CONFIG, prefix, EXAMPLES, SETTINGS)
    assert len(losses) == SETTINGS.steps + 1
    assert losses[0] == pytest.approx(float(loss_and_gradient[0]), rel=1e-5)
    assert losses[-1] < losses[0] - 1
    assert losses[-1] == pytest.approx(
        dense_loss(np.asarray(tuned.k, np.float64), np.asarray(tuned.v, np.float64), params),
        rel=1e-4,
    )
    jax.tree.map(np.testing.assert_array_equal, before, params)
    # Greedy generation over the pool says the targets with the tuned prefix, and nothing of them
    # with the one before, or with none.
    prompts, targets = zip(*EXAMPLES, strict=True)
    for chosen, wanted in ((tuned, True), (prefix, False), (None, False)):
        outputs = soft.generate(params, CONFIG, list(prompts), 8, prefix=chosen, block_size=4)
        right = [
            soft.right(output, target) for output, target in zip(outputs, targets, strict=True)
        ]
        assert right == [len(target) * wanted for target in targets]


@pytest.mark.slow
def test_the_prefix_of_a_text_is_what_the_text_would_be(params):
    """Generating after a prefix made of tokens is generating after those tokens."""
    text = [5, 9, 2, 14, 3, 3, 8, 1]
    prefix = soft.prefix_of_text(params, CONFIG, text, 4)
    prompts = [[4, 7, 9], [11]]
    with_prefix = soft.generate(params, CONFIG, prompts, 9, prefix=prefix, block_size=4)
    whole = soft.generate(params, CONFIG, [text + p for p in prompts], 9, prefix=None, block_size=4)
    without = soft.generate(params, CONFIG, prompts, 9, prefix=None, block_size=4)
    assert with_prefix == whole
    assert with_prefix != without


@pytest.mark.slow
def test_a_whole_run_on_a_trained_model(tmp_path, capsys):
    model, pairs = tmp_path / "model", tmp_path / "pairs.txt"
    train_tiny.train(
        train_tiny.Settings(
            out=model,
            text=ROOT / "LICENSE",
            steps=30,
            context=64,
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            learning_rate=1e-2,
            sample_prompt="The Licensor",
        )
    )
    pairs.write_text("The Licensor\t may dance.\n\nYou\t may sing.\n")
    settings = soft.Settings(
        model=str(model), examples=pairs, out=tmp_path / "out", steps=150, learning_rate=0.1
    )
    losses, with_prefix, without, total = soft.run(settings)
    # So small a model has little to be steered by; what it can say, the test above shows.
    assert losses[-1] < losses[0] - 0.5
    assert 0 <= without <= with_prefix <= total
    saved = np.load(tmp_path / "out" / "prefix.npz")
    assert saved["k"].shape == saved["v"].shape == (2, 16, 2, 8)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "2 sequences share 1 block(s)" in printed
    assert f"{with_prefix} with it" in printed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prefix_tokens": 20}, r"prefix_tokens must be a multiple of block_size, 16 \(got 20\)"),
        ({"steps": 0}, r"steps must be at least 1 \(got 0\)"),
        ({"learning_rate": 0.0}, r"learning_rate must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        soft.Settings(**values)


def test_a_line_without_a_target_is_named(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("a\tb\nonly a prompt\n")
    with pytest.raises(ValueError, match="line 2: not a prompt, a tab, a target"):
        soft.read_examples(dataclasses.replace(SETTINGS, examples=path))
