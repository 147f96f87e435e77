"""Incremental detokenization: pieces add up to the whole, whatever the cuts."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.tokenizers import IncrementalDetokenizer
from pagedjax.tokenizers.gguf_file import tokenizer_from_metadata
from tests.tokenizers.corpus import TEXTS
from tests.tokenizers.test_gguf import byte_level_metadata

ALPHABET = "a é日😀👩‍🚀e\u0301▁ \n0'<>ß𝔘\u200d"
TEXT = st.text(alphabet=ALPHABET, max_size=30) | st.text(max_size=20)


def cut(ids, cuts):
    """`ids` in parts that end at `cuts` (any ints)."""
    ends = sorted({place % (len(ids) + 1) for place in cuts} | {len(ids)})
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def stream(tokenizer, parts, prompt_ids=(), *, skip_special_tokens=True):
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
    )
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


@pytest.fixture(scope="module")
def gguf_byte_level():
    return tokenizer_from_metadata(byte_level_metadata(), "test")


def check_cuts_of_any_ids(tokenizer):
    ids = st.lists(st.integers(0, min(tokenizer.vocab_size, 320) - 1), max_size=20)

    @given(ids=ids, cuts=st.lists(st.integers(0, 50), max_size=8), skip=st.booleans())
    @settings(max_examples=150)
    def any_ids(ids, cuts, skip):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        pieces = stream(tokenizer, cut(ids, cuts), skip_special_tokens=skip)
        assert "".join(pieces) == whole
        single = stream(tokenizer, [[token_id] for token_id in ids], skip_special_tokens=skip)
        assert "".join(single) == whole

    any_ids()


def check_text_token_by_token(tokenizer):
    """Valid text: no piece holds U+FFFD or half a character, and nothing waits for the end."""

    @given(text=TEXT.filter(lambda text: "\ufffd" not in text))
    @settings(max_examples=150)
    def any_text(text):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        if "\ufffd" in whole:  # not all of the text is in the vocabulary
            return
        *pieces, rest = stream(tokenizer, [[token_id] for token_id in ids])
        assert "".join(pieces) == whole
        assert rest == ""
        assert all("\ufffd" not in piece for piece in pieces)

    any_text()


def check_after_a_prompt(tokenizer):
    """What the prompt shows, the pushes and finish are the text of prompt and output together."""
    ids = st.lists(st.integers(0, min(tokenizer.vocab_size, 320) - 1), max_size=12)

    @given(prompt=ids, output=ids, skip=st.booleans())
    @settings(max_examples=150)
    def any_split(prompt, output, skip):
        shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip).push(prompt)
        pieces = stream(tokenizer, [output], prompt, skip_special_tokens=skip)
        whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
        assert shown + "".join(pieces) == whole

    any_split()


CHECKS = [check_cuts_of_any_ids, check_text_token_by_token, check_after_a_prompt]


@pytest.mark.parametrize("check", CHECKS)
def test_tokenizer_json(trained, check):
    check(trained[1])


@pytest.mark.parametrize("check", CHECKS)
def test_sentencepiece(mistral, check):
    check(mistral)


@pytest.mark.parametrize("check", CHECKS)
def test_gguf(gguf_byte_level, check):
    check(gguf_byte_level)


@pytest.mark.real_model
@pytest.mark.parametrize("check", CHECKS)
def test_real_model(smollm2, check):
    check(smollm2)


def test_a_character_waits_for_its_last_byte(mistral):
    ids = [3 + byte for byte in "🙂".encode()]  # byte tokens
    assert stream(mistral, [[token_id] for token_id in ids]) == ["", "", "", "🙂", ""]
    assert stream(mistral, [[token_id] for token_id in ids[:3]]) == ["", "", "", "\ufffd" * 3]


def test_bytes_are_given_up_once_they_cannot_become_a_character(gguf_byte_level):
    first, letter = (gguf_byte_level.token_to_id(token) for token in ("ð", "a"))
    assert stream(gguf_byte_level, [[first], [letter]]) == ["", "\ufffda", ""]


def test_word_mark_is_a_space_after_a_prompt_only(mistral):
    prompt, word = mistral.encode("The capital of France is"), mistral.token_to_id("▁Paris")
    assert stream(mistral, [[word]]) == ["Paris", ""]
    assert stream(mistral, [[word]], prompt) == [" Paris", ""]
    only_bos = [mistral.bos_token_id]
    assert stream(mistral, [[word]], only_bos) == ["Paris", ""]


def test_special_tokens_are_skipped_or_shown(gguf_byte_level):
    hello, end = gguf_byte_level.encode("Hi"), 1
    assert "".join(stream(gguf_byte_level, [hello, [end]])) == "Hi"
    assert "".join(stream(gguf_byte_level, [hello, [end]], skip_special_tokens=False)) == (
        "Hi<|end|>"
    )


def test_a_wrong_id_changes_nothing(gguf_byte_level):
    size = gguf_byte_level.vocab_size
    ids = gguf_byte_level.encode("é!")
    detokenizer = IncrementalDetokenizer(gguf_byte_level)
    text = detokenizer.push(ids[:1])
    with pytest.raises(ValueError, match=rf"token id {size} is out of range"):
        detokenizer.push([*ids[1:], size])
    assert text + detokenizer.push(ids[1:]) + detokenizer.finish() == "é!"


def test_cost_does_not_grow_with_the_text(mistral):
    """A push sees its tokens and what the detokenizer keeps: three bytes and a rule or two."""
    ids = mistral.encode(" ".join(TEXTS))[:256] * 4
    detokenizer = IncrementalDetokenizer(mistral)
    for token_id in ids:
        detokenizer.push([token_id])
        kept = vars(detokenizer) | vars(detokenizer._state)
        assert kept.pop("_state") is detokenizer._state
        assert kept.pop("_vocabulary") is mistral.vocabulary
        assert len(pickle.dumps(kept)) < 150
        assert len(kept["_pending"]) <= 3
