"""tokenizer.json and the files beside it, against the tokenizers library."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.tokenizers import load_tokenizer
from tests.tokenizers.conftest import train_byte_fallback, train_byte_level, train_metaspace
from tests.tokenizers.corpus import TEXTS


def save(directory, backend, **files):
    """A Hugging Face directory; keyword `generation_config={...}` writes generation_config.json."""
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_same_ids_and_texts_as_the_library(trained):
    library, ours = trained
    assert ours.vocab_size == library.get_vocab_size()
    for text in [*TEXTS, "special <s>and</s> <|begin|>more<|end|>"]:
        ids = library.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            expected = library.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text
    for token_id in range(ours.vocab_size):
        token = ours.id_to_token(token_id)
        assert token == library.id_to_token(token_id)
        assert ours.token_to_id(token) == token_id


def test_decode_of_any_ids(trained):
    library, ours = trained

    @given(ids=st.lists(st.integers(0, ours.vocab_size - 1), max_size=10), skip=st.booleans())
    @settings(max_examples=200)
    def any_ids(ids, skip):
        expected = library.decode(ids, skip_special_tokens=skip)
        text = ours.decode(ids, skip_special_tokens=skip)
        if ours.vocabulary.rules.replace_each_byte:
            # The library gives up a whole run of bytes when one of them is invalid.
            if "\ufffd" in text:
                return
        elif "wörd" in text:
            # The library takes characters of added tokens for bytes.
            return
        assert text == expected

    any_ids()


def test_what_the_library_loses_is_kept(tmp_path):
    library = train_byte_fallback()
    ours = load_tokenizer(save(tmp_path, library))
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert library.decode(ids) == "\ufffd" * 3
    assert ours.decode(ids) == "é\ufffd"

    library = train_byte_level()
    ours = load_tokenizer(save(tmp_path, library))
    ids = ours.encode("a wörd")
    assert library.decode(ids) == "a w\ufffdrd"
    assert ours.decode(ids) == "a wörd"


def test_padding_and_truncation_are_switched_off(tmp_path):
    backend = train_byte_level()
    expected = backend.encode(TEXTS[1]).ids
    backend.enable_padding(length=512)
    backend.enable_truncation(max_length=4)
    assert load_tokenizer(save(tmp_path, backend)).encode(TEXTS[1]) == expected


def test_end_ids_and_special_tokens(tmp_path):
    save(
        tmp_path,
        train_byte_level(),
        tokenizer_config={"eos_token": "<|end|>", "bos_token": {"content": "<|begin|>"}},
        generation_config={"eos_token_id": [1, 17]},
        config={"eos_token_id": 99},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1, 17))
    assert tokenizer.special_tokens == {"eos_token": "<|end|>", "bos_token": "<|begin|>"}
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_token_ids == (1, 99)


def test_special_tokens_map_and_chat_template_files(tmp_path):
    save(
        tmp_path,
        train_byte_level(),
        special_tokens_map={"eos_token": "<|end|>"},
        tokenizer_config={"chat_template": "from the config"},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.chat_template) == ((1,), "from the config")
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    save(tmp_path, train_byte_level(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert load_tokenizer(tmp_path).chat_template == "from its own file"


def test_tokens_that_only_the_configuration_declares(tmp_path):
    size = train_byte_level().get_vocab_size()
    declared = {str(size): {"content": "<|tool|>", "special": True}}
    save(tmp_path, train_byte_level(), tokenizer_config={"added_tokens_decoder": declared})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|tool|>") == [size]
    assert tokenizer.decode([size]) == ""
    declared = {str(size - 1): {"content": "wörd", "special": True}}
    save(tmp_path, train_byte_level(), tokenizer_config={"added_tokens_decoder": declared})
    assert load_tokenizer(tmp_path).special_token_ids == {0, 1, size - 1}
    declared = {str(size + 7): {"content": "<|tool|>"}}
    save(tmp_path, train_byte_level(), tokenizer_config={"added_tokens_decoder": declared})
    with pytest.raises(ValueError, match=rf"'<\|tool\|>' has id {size}, .* declare {size + 7}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True}, ([1], [2])),
        ({"add_bos_token": False, "add_eos_token": True}, ([], [2])),
    ],
)
def test_llama_flags(tmp_path, flags, expected):
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    save(tmp_path, train_byte_fallback(), tokenizer_config={**names, **flags})
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*expected[0], *plain, *expected[1]]


def test_post_processor_is_kept(tmp_path):
    from tokenizers import processors

    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer = load_tokenizer(save(tmp_path, backend))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [0, *plain]


def test_padded_model_vocabulary(tmp_path):
    save(tmp_path, train_byte_level())
    size = load_tokenizer(tmp_path).vocab_size
    padded = load_tokenizer(tmp_path, vocab_size=size + 10)
    assert padded.vocab_size == size + 10
    assert padded.decode([size + 9, *padded.encode("Hi"), size]) == "Hi"
    assert load_tokenizer(tmp_path, vocab_size=5).vocab_size == size


def test_ids_outside_the_vocabulary(trained):
    _, tokenizer = trained
    size = tokenizer.vocab_size
    for wrong in (size, -1, 2**31 - 1):
        message = rf"token id {wrong} is out of range: the vocabulary has {size} tokens \(0 to "
        with pytest.raises(ValueError, match=message):
            tokenizer.decode([5, wrong])
        with pytest.raises(ValueError, match=message):
            tokenizer.id_to_token(wrong)
    for wrong in (1.5, "1", None):
        with pytest.raises(ValueError, match="is not an integer"):
            tokenizer.decode([wrong])
    assert tokenizer.decode(np.arange(5, 9, dtype=np.int32)) == tokenizer.decode([5, 6, 7, 8])


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"], "a lone surrogate \ud83d"])
def test_texts_that_are_none(trained, text):
    with pytest.raises(ValueError, match="text"):
        trained[1].encode(text)


def decoder_file(tmp_path, decoder):
    save(tmp_path, train_metaspace())
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = decoder
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "decoder None is not supported"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "decoder 'WordPiece'"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "Byte"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}],
            },
            r"decoder Sequence \['Strip'\]",
        ),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(tmp_path, decoder, named):
    with pytest.raises(ValueError, match=named):
        load_tokenizer(decoder_file(tmp_path, decoder))


@pytest.mark.parametrize(
    "decoder",
    [
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 3, "stop": 0},
            ],
        },
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    ],
    ids=lambda decoder: decoder["type"],
)
def test_other_rules_for_leading_spaces(tmp_path, decoder):
    from tokenizers import Tokenizer

    path = decoder_file(tmp_path, decoder)
    library, ours = Tokenizer.from_file(str(path)), load_tokenizer(path)
    mark = ours.token_to_id("▁")
    for ids in ([mark] * 5, [1, mark, 1, mark, mark, mark, 9], [9, mark], [mark, 9, mark]):
        assert ours.decode(ids) == library.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == library.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "<none>"}}, "eos_token '<none>' is not in the vocab"),
        ({"tokenizer_config": []}, "tokenizer_config.json: holds a JSON list"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token must be true or false"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template must be text, not int"),
        ({"generation_config": {"eos_token_id": "2"}}, "generation_config.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": 12345}}, "eos_token_id 12345 is out of range"),
    ],
)
def test_faulty_files(tmp_path, files, message):
    save(tmp_path, train_byte_level(), **files)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer of the tokenizers"):
        load_tokenizer(tmp_path)
