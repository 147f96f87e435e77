"""Tokenizers inside GGUF files, written here with the gguf library."""

import json

import gguf
import pytest

from pagedjax.tokenizers import load_tokenizer, read_gguf_metadata
from pagedjax.tokenizers.gguf_file import tokenizer_from_metadata
from pagedjax.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from tests.tokenizers.conftest import train_byte_level
from tests.tokenizers.corpus import TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def piece_type(library, token_id):
    for is_type, kind in (
        (library.is_unknown, UNKNOWN),
        (library.is_control, CONTROL),
        (library.is_byte, BYTE),
        (library.is_unused, UNUSED),
    ):
        if is_type(token_id):
            return kind
    return NORMAL


@pytest.fixture(scope="module")
def mistral_gguf(mistral_library, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "mistral.gguf"
    size = mistral_library.vocab_size()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([mistral_library.id_to_piece(i).encode() for i in range(size)])
    writer.add_token_scores([mistral_library.get_score(i) for i in range(size)])
    writer.add_token_types([piece_type(mistral_library, i) for i in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_sentencepiece_from_gguf(mistral_gguf, mistral_library):
    tokenizer = load_tokenizer(mistral_gguf)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    for text in [*TEXTS, "\n".join(TEXTS)]:
        ids = mistral_library.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == mistral_library.decode(ids)


def test_flags_of_sentencepiece_files(mistral_gguf, mistral_library):
    metadata = read_gguf_metadata(mistral_gguf)
    metadata |= {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
    }
    metadata["tokenizer.ggml.eot_token_id"] = 1  # not what add_eos_token means
    tokenizer = tokenizer_from_metadata(metadata, "test")
    hello = mistral_library.piece_to_id("Hello")
    assert tokenizer.encode("Hello") == [hello, 2]
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


def test_metadata_as_the_gguf_library_reads_it(tmp_path):
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    values = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60000,
        "int16": -30000,
        "uint32": 2**31,
        "int32": -(2**31),
        "uint64": 2**63,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "grüße 🙂",
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["a", "", "ü"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.25, -1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_metadata(path)
    assert {key: metadata[f"test.{key}"] for key in values} == values
    for key, field in gguf.GGUFReader(str(path)).fields.items():
        if not key.startswith("GGUF."):
            assert metadata[key] == field.contents(), key


def byte_level_metadata(**changes):
    """Keys of a gpt2-type file with the same tokens and merges as `train_byte_level`."""
    model = json.loads(train_byte_level().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "wörd"]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3), USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_byte_level_from_gguf():
    library = train_byte_level()
    tokenizer = tokenizer_from_metadata(byte_level_metadata(), "test")
    for text in [*TEXTS, "<|begin|>Hello<|end|>", "a wörd and a word"]:
        assert tokenizer.encode(text) == library.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode("<|begin|>Hi")) == "Hi"
    assert tokenizer.special_token_ids == {0, 1}


def test_beginning_of_sequence():
    hello = tokenizer_from_metadata(byte_level_metadata(), "test").encode("Hello")
    added = tokenizer_from_metadata(byte_level_metadata(add_bos_token=True), "test")
    assert added.encode("Hello") == [0, *hello]
    assert added.encode("Hello", add_special_tokens=False) == hello
    by_name = tokenizer_from_metadata(byte_level_metadata(pre="llama-bpe"), "test")
    assert by_name.encode("Hello")[0] == 0
    without = byte_level_metadata(pre="llama-bpe", add_bos_token=False, add_eos_token=True)
    assert tokenizer_from_metadata(without, "test").encode("Hello")[0] != 0
    assert tokenizer_from_metadata(without, "test").encode("Hello")[-1] == 1


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {1}),
        ({"eot_token_id": 2}, {1, 2}),
        ({"eot_token_id": 2, "eom_token_id": 3}, {1, 2, 3}),
    ],
)
def test_ends_of_sequence(keys, expected):
    assert set(tokenizer_from_metadata(byte_level_metadata(**keys), "x").eos_token_ids) == expected


def test_end_of_turn_by_its_name():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|eot_id|>", "<|eom_id|>"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL, CONTROL]
    tokenizer = tokenizer_from_metadata(metadata, "test")
    last = tokenizer.vocab_size - 1
    assert tokenizer.eos_token_ids == (1, last - 1, last)


# Pieces of one text under each family, by the patterns that the original tokenizers publish.
PIECES = {
    "smollm": ["In", " ", "2", "0", "2", "4", ",", " it", "'s", " I", "'", "LL", "\n\n ", " x"],
    "gpt-2": ["In", " 2024", ",", " it", "'s", " I", "'", "LL", "\n\n ", " x"],
    "llama-bpe": ["In", " ", "202", "4", ",", " it", "'s", " I", "'LL", "\n\n", " ", " x"],
    "qwen2": ["In", " ", "2", "0", "2", "4", ",", " it", "'s", " I", "'LL", "\n\n", " ", " x"],
    "tekken": ["In", " ", "2", "0", "2", "4", ",", " it", "'s", " I", "'LL", "\n\n", " ", " x"],
    "default": ["In", " ", "202", "4", ",", " it", "'", "s", " I", "'", "LL", "\n\n ", " x"],
}


@pytest.mark.parametrize("name", sorted(PIECES))
def test_pre_tokenizers(name):
    from pagedjax.tokenizers.pre_tokenizers import build_pre_tokenizer, find_pre_tokenizer

    text = "In 2024, it's I'LL\n\n  x"
    cuts = build_pre_tokenizer(find_pre_tokenizer(name)).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == PIECES[name]


def test_every_pre_tokenizer_keeps_every_byte():
    for name in PRE_TOKENIZERS:
        tokenizer = tokenizer_from_metadata(byte_level_metadata(pre=name), "test")
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text, (name, text)


def test_whole_pieces_ignore_merges():
    metadata = byte_level_metadata(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["Ġunmergeable"]
    metadata["tokenizer.ggml.token_type"] += [NORMAL]
    tokenizer = tokenizer_from_metadata(metadata, "test")
    assert tokenizer.encode(" unmergeable", add_special_tokens=False) == [tokenizer.vocab_size - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(tokenizer_from_metadata(metadata, "test").encode(" unmergeable")) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"f: tokenizer.ggml.model: 'bert' is not supported"),
        ({"model": None}, r"tokenizer.ggml.model: None is not supported"),
        ({"pre": "klingon"}, r"f: tokenizer.ggml.pre: 'klingon' is not supported \(known: .*smoll"),
        ({"pre": None}, r"tokenizer.ggml.pre is missing"),
        ({"tokens": None}, r"tokenizer.ggml.tokens is missing"),
        ({"token_type": [1]}, r"token_type has 1 values for 401 tokens"),
        ({"eos_token_id": 401}, r"eos_token_id: 401 is out of range: the vocabulary has 401"),
        ({"merges": ["a zzz"]}, r"tokenizer.ggml.merges: 'a zzz' does not join"),
        ({"merges": None}, r"tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, r"tokenizer.ggml.merges: 'ab' does not join"),
        ({"bos_token_id": None, "add_bos_token": True}, r"bos_token_id is missing"),
        ({"bos_token_id": "0"}, r"tokenizer.ggml.bos_token_id must be int, not '0'"),
        ({"model": "llama"}, r"tokenizer.ggml.scores is missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_faulty_metadata(changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_metadata(byte_level_metadata(**changes), "f")


def test_faulty_files(tmp_path, mistral_gguf):
    data = mistral_gguf.read_bytes()
    for content, message in (
        (data[:100_000], "cut short"),
        (b"GGUF" + (3).to_bytes(4, "big") + data[8:], "version 50331648"),
    ):
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"bad\.gguf: .*{message}"):
            load_tokenizer(path)
    with pytest.raises(ValueError, match=r"nothing\.gguf: no such file"):
        load_tokenizer(tmp_path / "nothing.gguf")
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no tokenizer\.model"):
        load_tokenizer(tmp_path)
