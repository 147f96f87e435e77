"""The real model's tokenizer against Hugging Face's ids and texts."""

import pytest

from pagedjax.tokenizers import IncrementalDetokenizer, apply_chat_template, encode_chat

pytestmark = pytest.mark.real_model

CHAT_PROMPT = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def test_prompt_ids(smollm2, golden):
    assert len(golden) == 20
    for line in golden:
        assert smollm2.encode(line["prompt_text"]) == line["prompt_ids"], line["id"]


def test_output_texts(smollm2, golden):
    for line in golden:
        text = smollm2.decode(line["output_ids"], skip_special_tokens=False)
        assert text == line["output_text"], line["id"]


def test_streamed_outputs_after_their_prompts(smollm2, golden):
    for line in golden:
        stream = IncrementalDetokenizer(smollm2, line["prompt_ids"], skip_special_tokens=False)
        pieces = [stream.push([token_id]) for token_id in line["output_ids"]]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish() == line["output_text"], line["id"]


def test_round_trip_of_prompts(smollm2, golden):
    for line in golden:
        ids = line["prompt_ids"]
        assert smollm2.decode(ids, skip_special_tokens=False) == line["prompt_text"]


def test_what_the_file_says(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.encode("Hi", add_special_tokens=True) == smollm2.encode(
        "Hi", add_special_tokens=False
    )


def test_chat_template(smollm2):
    messages = [{"role": "user", "content": "What is gravity?"}]
    assert apply_chat_template(smollm2, messages) == CHAT_PROMPT
    closed = CHAT_PROMPT.removesuffix("<|im_start|>assistant\n")
    assert apply_chat_template(smollm2, messages, add_generation_prompt=False) == closed
    own_system = [{"role": "system", "content": "Answer in JSON."}, *messages]
    assert apply_chat_template(smollm2, own_system).startswith(
        "<|im_start|>system\nAnswer in JSON.<|im_end|>\n<|im_start|>user\n"
    )


def test_chat_templates_give_the_golden_ids(smollm2, golden):
    line = next(line for line in golden if line["prompt_text"].startswith("<|im_start|>system\nA"))
    turns = line["prompt_text"].split("<|im_end|>\n")
    messages = []
    for turn in turns[:-1]:
        role, content = turn.removeprefix("<|im_start|>").split("\n", 1)
        messages.append({"role": role, "content": content})
    assert encode_chat(smollm2, messages) == line["prompt_ids"]
