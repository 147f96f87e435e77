"""GGUF files written here, in every quantisation, against their dequantised values."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pagedjax.models.config import RopeScaling
from pagedjax.models.forward import forward_dense
from pagedjax.models.rope import inverse_frequencies
from pagedjax.models.weights import load_model, read_config
from tests.models.support import numpy_llama, random_tensors, tiny_hf_config, write_hf

# Quantised rows come in blocks of 32 elements (256 for the K kinds), so every row is 256 long.
CONFIG = tiny_hf_config(
    hidden_size=256,
    intermediate_size=256,
    head_dim=64,
    num_hidden_layers=1,
    rope_theta=10000.0,
    rope_scaling=None,
)
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    trunk = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in trunk:
        return trunk[stem] + ".weight"
    _model, _layers, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def permute(weight, heads):
    """llama.cpp's conversion of q and k rows: the two halves of each head, interleaved."""
    per_head = weight.reshape(heads, -1, weight.shape[1])
    half = per_head.shape[1] // 2
    out = np.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return out.reshape(weight.shape)


def in_gguf_order(config, tensors):
    """The tensors under GGUF's names, q and k permuted."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor = permute(tensor, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            tensor = permute(tensor, config["num_key_value_heads"])
        out[gguf_name(name)] = tensor
    return out


def write_gguf(path, config, tensors, metadata=(), architecture="llama"):
    """Write tensors (arrays, or pairs of raw blocks and their kind) under GGUF names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list(["a"] * config["vocab_size"])
    for key, value in metadata:
        getattr(writer, f"add_{type(value).__name__.replace('str', 'string')}")(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(tensors, kind):
    """GGUF tensors quantised (norms stay float32), and the values that they then stand for."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            stored[name] = values[name] = tensor
            continue
        raw = random_k_blocks(tensor, kind) if "_K" in kind.name else None
        raw = gguf.quants.quantize(tensor, kind) if raw is None else raw
        stored[name] = (raw, kind)
        values[name] = DECODERS[kind](raw).reshape(tensor.shape)
    return stored, values


def random_k_blocks(tensor, kind):
    """Random blocks of a K kind, which the library cannot quantise to; their scales are small."""
    rng = np.random.default_rng(tensor.size)
    size = {Kind.Q4_K: 144, Kind.Q6_K: 210}[kind]
    rows, columns = tensor.shape
    raw = rng.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    scale = np.float16(2e-4) * np.ones((rows, columns // 256, 1), np.float16)
    at = slice(0, 2) if kind == Kind.Q4_K else slice(208, 210)
    raw[..., at] = scale.view(np.uint8)
    if kind == Kind.Q4_K:
        raw[..., 2:4] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def _half(raw, at):
    return raw[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def decode_q8_0(raw):
    blocks = raw.reshape(-1, 34)
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def decode_q4_0(raw):
    blocks = raw.reshape(-1, 18)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return _half(blocks, 0) * (nibbles.astype(np.float32) - 8)


def decode_q4_1(raw):
    blocks = raw.reshape(-1, 20)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return _half(blocks, 0) * nibbles.astype(np.float32) + _half(blocks, 2)


def decode_q4_k(raw):
    """256 weights: 8 groups of 32 with 6-bit scales and minima (llama.cpp's get_scale_min_k4)."""
    blocks = raw.reshape(-1, 144)
    packed, nibbles = blocks[:, 4:16], blocks[:, 16:].reshape(-1, 4, 32)
    groups = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[:, group] & 63, packed[:, group + 4] & 63
        else:
            scale = (packed[:, group + 4] & 15) | ((packed[:, group - 4] >> 6) << 4)
            minimum = (packed[:, group + 4] >> 4) | ((packed[:, group] >> 6) << 4)
        values = (nibbles[:, group // 2] >> (4 * (group % 2))) & 15
        scale, minimum = _half(blocks, 0) * scale[:, None], _half(blocks, 2) * minimum[:, None]
        groups.append(scale * values - minimum)
    return np.concatenate(groups, axis=1)


def decode_q6_k(raw):
    """256 weights: low 4 and high 2 bits apart, 16 groups of 16 with 8-bit scales."""
    blocks = raw.reshape(-1, 210)
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    groups = []
    for half in range(2):
        for part in range(4):
            lows = low[:, half, 32 * (part % 2) : 32 * (part % 2) + 32] >> (4 * (part // 2))
            highs = (high[:, half] >> (2 * part)) & 3
            values = ((lows & 15) | (highs << 4)).astype(np.float32) - 32
            scale = np.repeat(scales[:, 8 * half + 2 * part : 8 * half + 2 * part + 2], 16, axis=1)
            groups.append(_half(blocks, 208) * scale * values)
    return np.concatenate(groups, axis=1)


DECODERS = {
    Kind.F32: lambda raw: raw,
    Kind.F16: lambda raw: raw.astype(np.float32),
    Kind.BF16: lambda raw: (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    Kind.Q8_0: decode_q8_0,
    Kind.Q4_0: decode_q4_0,
    Kind.Q4_1: decode_q4_1,
    Kind.Q4_K: decode_q4_k,
    Kind.Q6_K: decode_q6_k,
}


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_each_kind_loads_as_its_dequantised_values(tmp_path, kind):
    tensors = random_tensors(CONFIG)
    stored, values = quantised(in_gguf_order(CONFIG, tensors), kind)
    loaded = load_model(
        write_gguf(tmp_path / "m.gguf", CONFIG, stored), dtype="float32", stacked=False
    )
    assert loaded.kind == "gguf"
    layer, trunk = loaded.params["layers"][0], loaded.params["trunk"]
    expected = {
        "qkv_proj": ("attn_q", "attn_k", "attn_v"),
        "o_proj": ("attn_output",),
        "gate_up_proj": ("ffn_gate", "ffn_up"),
        "down_proj": ("ffn_down",),
        "input_layernorm": ("attn_norm",),
        "post_attention_layernorm": ("ffn_norm",),
    }
    for leaf, parts in expected.items():
        got, start = np.asarray(layer[leaf]["weight"]), 0
        for part in parts:
            value = values[f"blk.0.{part}.weight"]
            piece = got[start : start + len(value)]
            heads = {"attn_q": 4, "attn_k": 2}.get(part)
            piece = permute(piece, heads) if heads else piece
            np.testing.assert_allclose(piece, value, rtol=1e-6, atol=1e-7)
            start += len(value)
        assert start == len(got)
    for leaf, name in (
        ("embed_tokens", "token_embd"),
        ("norm", "output_norm"),
        ("lm_head", "output"),
    ):
        np.testing.assert_allclose(
            trunk[leaf]["weight"], values[f"{name}.weight"], rtol=1e-6, atol=1e-7
        )


def test_logits_equal_numpy_with_the_rotary_order_undone(tmp_path):
    tensors = random_tensors(CONFIG)
    path = write_gguf(tmp_path / "m.gguf", CONFIG, in_gguf_order(CONFIG, tensors))
    loaded = load_model(path, dtype="float32", stacked=True)
    tokens = [3, 1, 30, 7, 7, 12]
    logits = forward_dense(loaded.params, jnp.asarray([tokens]), loaded.config)[0]
    np.testing.assert_allclose(logits, numpy_llama(CONFIG, tensors, tokens), atol=1e-5, rtol=1e-5)


def test_configuration_and_weights_equal_the_hugging_face_directory(tmp_path):
    tensors = random_tensors(CONFIG)
    hf = load_model(write_hf(tmp_path / "hf", CONFIG, tensors), dtype="bfloat16", stacked=True)
    path = write_gguf(tmp_path / "m.gguf", CONFIG, in_gguf_order(CONFIG, tensors))
    loaded = load_model(path, dtype="bfloat16", stacked=True)
    assert loaded.config == hf.config == read_config(path)
    for leaf in hf.params["layers"]:
        one, two = (params["layers"][leaf]["weight"] for params in (hf.params, loaded.params))
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def rope_of(tmp_path, metadata=(), factors=None):
    tensors = in_gguf_order(CONFIG, random_tensors(CONFIG))
    if factors is not None:
        tensors["rope_freqs.weight"] = np.asarray(factors, np.float32)
    return read_config(write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata)).rope_scaling


def test_rope_settings(tmp_path):
    key = "llama.rope.scaling."
    assert rope_of(tmp_path) is None
    assert rope_of(tmp_path, [(key + "type", "none")]) is None
    linear = RopeScaling(rope_type="linear", factor=4.0)
    typed = [(key + "type", "linear"), (key + "factor", np.float32(4.0))]
    assert rope_of(tmp_path, typed) == linear
    assert rope_of(tmp_path, [("llama.rope.scale_linear", np.float32(4.0))]) == linear
    with pytest.raises(ValueError, match=r"llama\.rope\.scaling\.type is 'yarn'"):
        rope_of(tmp_path, [(key + "type", "yarn")])


def test_llama3_factors_are_recognised_and_others_kept(tmp_path):
    """llama.cpp's converter writes Llama 3's scaling as divisors of the 32 frequencies."""
    factors = []
    for pair in range(32):
        wavelength = 2 * np.pi * 10000.0 ** (pair / 32)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert 1 < sorted(set(factors))[1] < 8  # one at least on the ramp
    assert rope_of(tmp_path, factors=factors) == RopeScaling(rope_type="llama3", factor=8.0)

    other = np.linspace(1, 3, 32, dtype=np.float32)
    tensors = in_gguf_order(CONFIG, random_tensors(CONFIG))
    path = write_gguf(tmp_path / "o.gguf", CONFIG, tensors | {"rope_freqs.weight": other})
    config = read_config(path)
    assert config.rope_scaling.rope_type == "factors"
    plain = 10000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(inverse_frequencies(config), plain / other, rtol=1e-6)


def test_tied_head_and_chat_end_tokens(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = in_gguf_order(config, random_tensors(config))
    eot = [("tokenizer.ggml.eot_token_id", np.uint32(5))]
    path = write_gguf(tmp_path / "m.gguf", config, tensors, eot)
    loaded = load_model(path, dtype="float32")
    assert loaded.config.tie_word_embeddings
    assert "lm_head" not in loaded.params["trunk"]
    assert loaded.config.eos_token_ids == (2, 5)


Q_PROJ = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (Q_PROJ, None, r"missing tensor model\.layers\.0\.self_attn\.q_proj"),
        (Q_PROJ, np.zeros((8, 256), np.float32), r"q_proj\.weight has shape \(8, 256\), expected"),
        (Q_PROJ, np.zeros((256, 256), np.int32), r"blk\.0\.attn_q\.weight has type I32, which"),
        ("blk.0.attn_q.bias", np.zeros(256, np.float32), r"extra tensor blk\.0\.attn_q\.bias"),
        ("blk.1.ffn_up.weight", np.zeros((2, 2), np.float32), r"extra tensor model\.layers\.1\.ml"),
        ("token_embd.weight", None, "vocab_size is 0|missing tensor model.embed_tokens"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, name, value, message):
    tensors = in_gguf_order(CONFIG, random_tensors(CONFIG)) | {name: value}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    with pytest.raises(ValueError, match=message):
        load_model(path, dtype="float32")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([("llama.attention.key_length", np.uint32(32))], r"rope\.dimension_count differs from"),
        ([("llama.expert_count", np.uint32(8))], "expert_count is not 0"),
        ([("llama.vocab_size", np.uint32(41))], r"embed_tokens\.weight has shape \(40, 256\)"),
    ],
)
def test_metadata_that_does_not_fit_is_named(tmp_path, metadata, message):
    tensors = in_gguf_order(CONFIG, random_tensors(CONFIG))
    with pytest.raises(ValueError, match=message):
        load_model(write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata), dtype="float32")


def test_files_that_are_no_llama_are_refused(tmp_path):
    tensors = in_gguf_order(CONFIG, random_tensors(CONFIG))
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, architecture="qwen2")
    with pytest.raises(ValueError, match=r"general\.architecture is 'qwen2'; supported: 'llama'"):
        load_model(path, dtype="float32")
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        load_model(tmp_path / "x.gguf", dtype="float32")
    with pytest.raises(FileNotFoundError, match=r"there is no GGUF file .*nothing\.gguf"):
        load_model(tmp_path / "nothing.gguf", dtype="float32")
