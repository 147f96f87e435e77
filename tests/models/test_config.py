"""Model configurations: the files, Hugging Face's form, and what is refused by name."""

import pytest

from pagedjax.models import presets
from pagedjax.models.config import ModelConfig, RopeScaling
from pagedjax.models.params import default_dtype, default_stacked, resolve_dtype
from tests.models.support import LINEAR, LLAMA3, tiny_hf_config

# Published parameter counts: wrong hyper-parameters would hardly give them.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
}


def test_every_preset_has_its_published_size():
    sizes = {name: presets.preset_config(name).num_parameters for name in presets.list_presets()}
    assert sizes == PARAMETERS


def test_presets_hold_the_settings_that_size_does_not_show():
    llama31, llama2 = presets.preset_config("llama-3.1-8b"), presets.preset_config("llama-2-7b")
    assert llama31.rope_scaling == RopeScaling(rope_type="llama3", factor=8.0)
    assert (llama31.rope_theta, llama31.max_position_embeddings) == (500000.0, 131072)
    assert (llama2.rope_theta, llama2.rope_scaling) == (10000.0, None)
    assert presets.preset_config("smollm2-135m").rope_theta == 100000.0
    assert presets.preset_config("llama-3.2-1b").rope_scaling.factor == 32.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size", "hiden_size", r"\[model\]: unknown key 'hiden_size'; known: vocab_size,"),
        ("hidden_size = 2048\n", "", r"\[model\]: missing key 'hidden_size'"),
        ("\nfactor = 32.0", "\nfacto = 32.0", r"\[model\.rope_scaling\]: unknown key 'facto'"),
        ("[model", "[models", r"no \[model\] table"),
        ('rope_type = "llama3"', 'rope_type = "yarn"', "rope_type is 'yarn'; supported: def"),
        ("num_key_value_heads = 8", "num_key_value_heads = 5", "must be a multiple of num_key_val"),
        ("head_dim = 64", "head_dim = 63", "head_dim is 63"),
        ("vocab_size = 128256", "vocab_size = 0", "vocab_size is 0; it must be"),
        ("bos_token_id = 128000", "bos_token_id = 128256", "holds 128256; accepted: 0 to 128255"),
    ],
)
def test_faulty_files_are_refused_with_the_key(tmp_path, old, new, message):
    text = (presets.config_dir() / "llama-3.2-1b.toml").read_text()
    assert old in text
    path = tmp_path / "model.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_toml(path)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rope_scaling": LLAMA3, "tie_word_embeddings": True, "eos_token_id": [2, 3]},
        {"rope_scaling": LINEAR, "eos_token_id": None, "bos_token_id": None},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
    ],
)
def test_hugging_face_round_trip(overrides):
    config = ModelConfig.from_hf_dict(tiny_hf_config(**overrides))
    assert ModelConfig.from_hf_dict(config.to_hf_dict()) == config
    assert hash(config) == hash(ModelConfig.from_hf_dict(tiny_hf_config(**overrides)))
    if overrides.get("rope_scaling") == LLAMA3:
        assert config.rope_scaling.original_max_position_embeddings == 32
        assert config.eos_token_ids == (2, 3)


def test_defaults_and_both_spellings_of_rope():
    old = tiny_hf_config(rope_scaling={"type": "linear", "factor": 4.0})
    for name in ("num_key_value_heads", "head_dim"):
        del old[name]
    config = ModelConfig.from_hf_dict(old)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    new = tiny_hf_config(rope_parameters=LINEAR | {"rope_theta": 100.0})
    del new["rope_theta"], new["rope_scaling"]
    assert ModelConfig.from_hf_dict(new).rope_scaling == config.rope_scaling
    assert ModelConfig.from_hf_dict(new).rope_theta == 100.0
    window = tiny_hf_config(sliding_window=4096)  # Llama has none, whatever its file says
    assert ModelConfig.from_hf_dict(window).sliding_window is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: llama, mistral"),
        ({"architectures": ["Phi3ForCausalLM"]}, "architecture is 'Phi3ForCausalLM'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks high_freq_factor"),
        ({"rope_scaling": LINEAR | {"beta": 1}}, "rope_scaling has beta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict(tiny_hf_config(**overrides))


def test_dtype_follows_the_processor(tmp_path):
    def choose(flags):
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} avx2\nbugs\t\t: amx_bf16\n")
        return default_dtype("cpu", path)

    assert choose("amx_bf16") == choose("avx512_bf16") == "bfloat16"
    assert choose("avx512f") == choose("avx512_bf16x") == "float32"
    assert default_dtype("cpu", tmp_path / "missing") == "float32"
    assert default_dtype("gpu", tmp_path / "missing") == "bfloat16"
    assert (default_stacked("cpu"), default_stacked("gpu")) == (False, True)


def test_dtype_names():
    assert resolve_dtype("bfloat16") == "bfloat16"
    assert resolve_dtype(resolve_dtype("float32")) == "float32"
    assert resolve_dtype(None) == resolve_dtype("auto") == default_dtype()
    with pytest.raises(ValueError, match="dtype is 'float16'; accepted: auto, float32, bfloat16"):
        resolve_dtype("float16")
    with pytest.raises(ValueError, match="dtype is 'half'"):
        resolve_dtype("half")
    with pytest.raises(ValueError, match="dtype is 'nonsense'"):
        resolve_dtype("nonsense")
