"""SentencePiece models against the sentencepiece library's own output."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.tokenizers import load_tokenizer
from pagedjax.tokenizers.spm import load_processor
from pagedjax.tokenizers.spm_model import read_space_rules
from tests.tokenizers.conftest import train_sentencepiece
from tests.tokenizers.corpus import TEXTS


def test_same_ids_as_the_library(mistral, mistral_library):
    for text in TEXTS:
        ids = mistral_library.encode(text)
        assert mistral.encode(text, add_special_tokens=False) == ids, text
        assert mistral.encode(text) == [mistral_library.bos_id(), *ids], text


def test_round_trip(mistral, mistral_library):
    for text in TEXTS:
        ids = mistral.encode(text)
        assert mistral.decode(ids) == text.replace("▁", " ")  # the one character that is lost
        assert mistral.decode(ids) == mistral_library.decode(ids)


@given(ids=st.lists(st.integers(0, 31999) | st.integers(0, 300), max_size=12))
@example([0, 28705, 1, 0])
@example([198, 2, 172])  # a control token between the bytes of a character
@settings(max_examples=300)
def test_decode_of_any_ids(mistral, mistral_library, ids):
    assert mistral.decode(ids) == mistral_library.decode(ids)


@given(data=st.binary(max_size=12))
@example(b"\xed\xa0\x80")  # a surrogate
@example(b"\xf0\x9f\x98")
@example(b"\xe6\x97\xa5\xff\xe6\x97")
def test_decode_of_any_bytes(mistral, mistral_library, data):
    ids = [3 + byte for byte in data]  # byte tokens follow <unk>, <s> and </s>
    assert mistral.decode(ids) == mistral_library.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {"model_type": "unigram", "byte_fallback": True},
        {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
        {"model_type": "bpe", "add_dummy_prefix": True, "remove_extra_whitespaces": False},
        {"model_type": "bpe", "add_dummy_prefix": False, "unk_surface": "?"},
        {"model_type": "unigram", "user_defined_symbols": ["▁fox", "<sep>"], "pad_id": 3},
    ],
    ids=str,
)
def test_every_rule_for_spaces(tmp_path, options):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_sentencepiece(**options))
    ours, library = load_tokenizer(path), load_processor(path.read_bytes(), "test")
    for text in TEXTS:
        ids = library.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == library.decode(ids)

    @given(ids=st.lists(st.integers(0, ours.vocab_size - 1), max_size=8))
    @settings(max_examples=60)
    def any_ids(ids):
        assert ours.decode(ids) == library.decode(ids)

    any_ids()
    marks = [i for i in range(ours.vocab_size) if set(ours.id_to_token(i)) == {"▁"}]
    for mark in marks:
        for ids in ([mark] * 3, [mark, 1, mark, 5], [1, mark, mark, 7]):
            assert ours.decode(ids) == library.decode(ids)


def test_flags_of_the_model_file(sentencepiece_model):
    spaces = read_space_rules(sentencepiece_model.read_bytes())
    assert (spaces.add_dummy_prefix, spaces.remove_extra_whitespaces) == (True, False)
    assert (spaces.treat_whitespace_as_suffix, spaces.denormalizes) == (False, False)


def test_suffix_marks_are_refused(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_sentencepiece(model_type="unigram", treat_whitespace_as_suffix=True))
    with pytest.raises(ValueError, match="treat_whitespace_as_suffix"):
        load_tokenizer(path)


def test_special_tokens_in_the_text(mistral, mistral_library):
    assert mistral.encode("<s>Hi</s>", add_special_tokens=False) == [
        1,
        *mistral_library.encode("Hi"),
        2,
    ]
    ids = mistral.encode("<s>Hi</s>")
    assert mistral.decode(ids) == "Hi"
    assert mistral.decode(ids[1:], skip_special_tokens=False) == "<s> Hi</s>"


def test_files_beside_the_model(tmp_path, sentencepiece_model):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
    config = {
        "add_bos_token": False,
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": "{{ messages[0].content }}",
        "added_tokens_decoder": {
            "0": {"content": "<unk>", "special": True},
            "32000": {"content": "<|im_start|>", "special": True},
            "32003": {"content": "<|im_end|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 32003]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 32004
    assert tokenizer.eos_token_ids == (2, 32003)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert (ids[0], ids[-1]) == (32000, 32003)
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.id_to_token(32001) is None  # a gap decodes to nothing
    assert tokenizer.decode([32001, *ids]) == "user"
    config["add_eos_token"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("user")[-1] == 32003
    config["added_tokens_decoder"]["5"] = {"content": "<clash>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'<clash>' is declared with id 5, which is '<0x02>'"):
        load_tokenizer(tmp_path)


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\x00 not a model")
    with pytest.raises(ValueError, match=r"tokenizer\.model: not a SentencePiece model"):
        load_tokenizer(path)
