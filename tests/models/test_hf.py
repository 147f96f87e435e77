"""Hugging Face directories: what is read, and what is refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax.models.config import ModelConfig
from pagedjax.models.params import init_params
from pagedjax.models.weights import load_model, read_config, save_hf
from tests.models.support import LLAMA3, random_tensors, tiny_hf_config, write_hf

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
CONFIG = tiny_hf_config(rope_scaling=LLAMA3)


def assert_trees_equal(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stacked", [False, True])
def test_saved_parameters_load_back(tmp_path, dtype, stacked):
    config = ModelConfig.from_hf_dict(CONFIG)
    params = init_params(config, jax.random.key(0), dtype=dtype, stacked=stacked)
    save_hf(tmp_path, config, params)
    loaded = load_model(tmp_path, dtype=dtype, stacked=stacked)
    assert loaded.config == config == read_config(tmp_path)
    assert (loaded.kind, loaded.path) == ("hf", tmp_path)
    assert_trees_equal(loaded.params, params)


def test_saved_tensors_are_those_that_were_loaded(tmp_path):
    tensors = random_tensors(CONFIG)
    loaded = load_model(write_hf(tmp_path / "a", CONFIG, tensors), dtype="float32", stacked=False)
    save_hf(tmp_path / "b", loaded.config, loaded.params)
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(saved[name], tensor)


def test_layouts_hold_the_same_random_parameters():
    config = ModelConfig.from_hf_dict(CONFIG)
    key = jax.random.key(3)
    unrolled = init_params(config, key, dtype="float32", stacked=False)
    stacked = init_params(config, key, dtype="float32", stacked=True)
    for layer in range(config.num_hidden_layers):
        assert_trees_equal(
            unrolled["layers"][layer],
            jax.tree.map(lambda leaf, i=layer: leaf[i], stacked["layers"]),
        )
    first, second = (layer["down_proj"]["weight"] for layer in unrolled["layers"])
    assert np.abs(first - second).max() > 0
    assert 0.015 < np.std(first) < 0.025


@pytest.mark.parametrize("file_dtype", [np.float16, jnp.bfloat16])
def test_stored_half_precision_is_read_exactly(tmp_path, file_dtype):
    tensors = {name: t.astype(file_dtype) for name, t in random_tensors(CONFIG).items()}
    loaded = load_model(write_hf(tmp_path, CONFIG, tensors), dtype="float32", stacked=False)
    got = loaded.params["layers"][1]["qkv_proj"]["weight"][: tensors[Q_PROJ].shape[0]]
    np.testing.assert_array_equal(got, tensors[Q_PROJ].astype(np.float32))


def write_sharded(path, tensors, weight_map=None):
    """Two shards and their index; returns the index's path."""
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, path / file)
    if weight_map is None:
        weight_map = {name: file for file, part in halves.items() for name in part}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_sharded_weights_equal_a_single_file(tmp_path):
    tensors = random_tensors(CONFIG)
    write_sharded(tmp_path / "sharded", tensors)
    single = write_hf(tmp_path / "single", CONFIG, tensors)
    one, two = (
        load_model(path, dtype="float32", stacked=True) for path in (single, tmp_path / "sharded")
    )
    assert_trees_equal(one.params, two.params)


def test_shards_and_index_must_agree(tmp_path):
    tensors = random_tensors(CONFIG)
    index = write_sharded(tmp_path / "m", tensors)
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]

    index.write_text(json.dumps({"weight_map": weight_map | {"ghost.weight": "one.safetensors"}}))
    with pytest.raises(ValueError, match=r"ghost\.weight is in the index, not in its shards"):
        load_model(tmp_path / "m", dtype="float32")

    short = {name: file for name, file in weight_map.items() if name != Q_PROJ}
    index.write_text(json.dumps({"weight_map": short}))
    with pytest.raises(ValueError, match=f"{Q_PROJ} is in the shards, not in the index"):
        load_model(tmp_path / "m", dtype="float32")

    index.write_text(json.dumps(content))
    (tmp_path / "m" / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no two\.safetensors"):
        load_model(tmp_path / "m", dtype="float32")


def changed(tensors, name, value):
    """The tensors with one replaced, added, or (None) removed."""
    tensors = tensors | {name: value}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (Q_PROJ, None, rf"missing tensor {Q_PROJ}"),
        (Q_PROJ, np.zeros((31, 32), np.float32), rf"{Q_PROJ} has shape \(31, 32\), expected \(32,"),
        (Q_PROJ, np.zeros((32, 32), np.int32), rf"{Q_PROJ} has dtype I32; supported: F32, F16, BF"),
        (
            "model.layers.0.self_attn.q_proj.bias",
            np.zeros(32, np.float32),
            r"extra tensor model\.layers\.0\.self_attn\.q_proj\.bias of shape \(32,\)",
        ),
        ("lm_head.weight", None, "missing tensor lm_head.weight"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, name, value, message):
    write_hf(tmp_path, CONFIG, changed(random_tensors(CONFIG), name, value))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, dtype="float32")


def test_rotary_tables_of_old_conversions_are_not_extra(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG) | {name: np.ones(4, np.float32)})
    load_model(tmp_path, dtype="float32")


def test_a_tied_model_may_repeat_its_embedding_as_head_only_unchanged(tmp_path):
    config = tiny_hf_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    embedding = tensors["model.embed_tokens.weight"]
    path = write_hf(tmp_path, config, tensors | {"lm_head.weight": embedding})
    assert "lm_head" not in load_model(path, dtype="float32").params["trunk"]
    write_hf(tmp_path, config, tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"extra tensor lm_head\.weight"):
        load_model(path, dtype="float32")


def test_generation_config_adds_end_tokens(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    assert read_config(tmp_path).eos_token_ids == (2, 7, 9)


def test_paths_that_are_no_model_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"neither a directory with a config.json nor a .gguf"):
        load_model(tmp_path / "nothing", dtype="float32")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path / "empty", dtype="float32")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_model(tmp_path / "empty", dtype="float32")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "opt"}))
    with pytest.raises(ValueError, match=r"config\.json: model_type is 'opt'; supported: llama"):
        load_model(tmp_path / "empty", dtype="float32")


def test_loading_holds_one_leaf_beside_the_model(tmp_path, monkeypatch):
    """Tensors are read one by one, each only when its leaf is filled: never a whole checkpoint."""
    from pagedjax.models.weights.hf import HFSource

    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    alive, most = [], 0
    read = HFSource.read

    def counting(self, name):
        nonlocal most
        import weakref

        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(HFSource, "read", counting)
    load_model(tmp_path, dtype="float32", stacked=True)
    assert len(alive) == 3 + 9 * 2
    assert most == 1
