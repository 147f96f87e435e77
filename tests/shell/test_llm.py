"""`LLM`: prompts of every form, order, chat, errors, and coming back from an interruption."""

import pytest

import pagedjax
from pagedjax import LLM, SamplingParams
from tests.shell.tiny import make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm(engine):
    return LLM(engine=engine)


def test_every_form_of_prompt(llm):
    ids = list(b"hello")
    (text,) = llm.generate("hello", GREEDY, use_tqdm=False)
    for form in ([ids], ids, {"prompt_token_ids": ids}, {"prompt": "hello"}, ["hello"]):
        (output,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == text.outputs[0].token_ids
        assert output.finished
    assert text.prompt == "hello"
    assert len(text.outputs[0].token_ids) == 6
    assert text.outputs[0].text == llm.get_tokenizer().decode(text.outputs[0].token_ids)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_results_are_in_the_order_of_the_prompts(llm):
    """Later prompts end first, and there are more of them than the queue holds."""
    small = LLM(engine=make_engine(max_queue_size=1))
    prompts = [f"{i} " * (1 + i % 5) for i in range(30)]
    params = [SamplingParams(temperature=0, max_tokens=31 - i, ignore_eos=True) for i in range(30)]
    outputs = small.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(31, 1, -1))
    for prompt, one, output in list(zip(prompts, params, outputs, strict=True))[::7]:
        (alone,) = llm.generate(prompt, one, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == "<user>hi<eos><assistant>"
    both = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both] == [answer.outputs[0].token_ids] * 2


def test_errors_name_the_prompt_and_generate_nothing(llm):
    with pytest.raises(ValueError, match=r"prompt 1: prompt has 200 tokens.*max_model_len"):
        llm.generate(["fine", "x" * 200], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work()
    with pytest.raises(ValueError, match="one for each of the 2 prompts, got 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="a prompt must be text"):
        llm.generate({"text": "a"}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="max_num_sequences"):
        LLM("smollm2-135m", max_num_sequences=4)


def test_interrupted_generate_leaves_the_engine_usable(llm, monkeypatch):
    (expected,) = llm.generate("hello", GREEDY, use_tqdm=False)
    calls = iter(range(100))
    step = llm.engine.step

    def interrupted():
        if next(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"] * 10, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_work()
    (again,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_progress_bar(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    bar = capsys.readouterr().err
    assert "2/2" in bar
    assert "tok/s" in bar


def test_lazy_names():
    for name in pagedjax.__all__:
        assert getattr(pagedjax, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        pagedjax.no_such_name  # noqa: B018
