"""Tiny checkpoints, and a Llama in plain numpy that shares no code with the package."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def tiny_hf_config(**overrides):
    """The content of a config.json: 2 layers, 4 query heads over 2 KV heads of 8."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "rope_scaling": None,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | overrides


def random_tensors(config, seed=0):
    """Every tensor of a checkpoint, float32, large enough that each one matters to the logits."""
    rng = np.random.default_rng(seed)
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head
    kv_size = config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], size)}
    shapes["model.norm.weight"] = (size,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], size)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (size,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q_size, size)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, size)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, size)
        shapes[prefix + "self_attn.o_proj.weight"] = (size, q_size)
        shapes[prefix + "post_attention_layernorm.weight"] = (size,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, size)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, size)
        shapes[prefix + "mlp.down_proj.weight"] = (size, inner)
    tensors = {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = 1 + 0.2 * value if len(shape) == 1 else value * shape[1] ** -0.5
    return tensors


def write_hf(path, config, tensors):
    """A Hugging Face directory with one safetensors file."""
    from safetensors.numpy import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def _frequency(pair, config):
    """Radians a position of one rotary pair, from the definitions, one number at a time."""
    frequency = config["rope_theta"] ** (-2 * pair / config["head_dim"])
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        wavelength = 2 * math.pi / frequency
        trained = scaling["original_max_position_embeddings"]
        if wavelength < trained / scaling["high_freq_factor"]:
            return frequency
        if wavelength > trained / scaling["low_freq_factor"]:
            return frequency / scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (trained / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
    return frequency


def _rotate(vector, position, config):
    """One head's vector as complex numbers: element i and element i + D/2 are one of them."""
    half = len(vector) // 2
    turns = [_frequency(pair, config) * position for pair in range(half)]
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * np.array(turns))
    return np.concatenate([turned.real, turned.imag])


def _norm(x, weight, config):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weight


def numpy_llama(config, tensors, token_ids):
    """Logits [tokens, V] float64 of one sequence, token by token, head by head."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    head, heads = config["head_dim"], config["num_attention_heads"]
    group = heads // config["num_key_value_heads"]
    window = config.get("sliding_window") or len(token_ids)
    x = w["model.embed_tokens.weight"][token_ids]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = _norm(x, w[p + "input_layernorm.weight"], config)
        q, k, v = (h @ w[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        out = np.zeros_like(q)
        for n in range(heads):
            q_slice = slice(n * head, (n + 1) * head)
            kv_slice = slice(n // group * head, (n // group + 1) * head)
            keys = [_rotate(k[t, kv_slice], t, config) for t in range(len(token_ids))]
            for t in range(len(token_ids)):
                seen = range(max(0, t - window + 1), t + 1)
                query = _rotate(q[t, q_slice], t, config)
                scores = np.array([query @ keys[s] for s in seen]) / math.sqrt(head)
                weights = np.exp(scores - scores.max())
                out[t, q_slice] = (weights / weights.sum()) @ v[list(seen), kv_slice]
        x = x + out @ w[p + "self_attn.o_proj.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"], config)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        up = h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(x, w["model.norm.weight"], config) @ head_weight.T


def make_batch(chunks, block_tables, block_size, num_tokens):
    """The ragged batch of one step: ``chunks`` has (token ids so far, tokens to compute) a row."""
    null = 2**31 - 1
    batch = SimpleNamespace(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.full(num_tokens, null, np.int32),
        query_start_loc=np.zeros(len(chunks) + 1, np.int32),
        seq_lens=np.zeros(len(chunks), np.int32),
        block_tables=np.asarray(block_tables, np.int32),
    )
    start = 0
    for row, (tokens, count) in enumerate(chunks):
        positions = np.arange(len(tokens) - count, len(tokens))
        where = slice(start, start + count)
        batch.token_ids[where] = tokens[len(tokens) - count :]
        batch.positions[where] = positions
        batch.slot_mapping[where] = (
            batch.block_tables[row, positions // block_size] * block_size + positions % block_size
        )
        start += count
        batch.query_start_loc[row + 1] = start
        batch.seq_lens[row] = len(tokens) if count else 0
    return batch
