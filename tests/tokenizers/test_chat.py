"""Chat templates: the environment that checkpoints expect, and what can be wrong."""

import dataclasses
from datetime import datetime

import pytest

from pagedjax.tokenizers import apply_chat_template, encode_chat
from pagedjax.tokenizers.gguf_file import tokenizer_from_metadata
from tests.tokenizers.test_gguf import byte_level_metadata

HI = [{"role": "user", "content": "hi"}]

# The template of Llama-2-chat, as its tokenizer_config.json has it, wrapped.
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)


@dataclasses.dataclass
class Stub:
    """As much of a tokenizer as rendering needs."""

    chat_template: str | None
    special_tokens: dict = dataclasses.field(
        default_factory=lambda: {"bos_token": "<s>", "eos_token": "</s>"}
    )


def render(template, messages=HI, **arguments):
    return apply_chat_template(Stub(template), messages, **arguments)


def test_llama_2():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    assert render(LLAMA_2, messages) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"
    )


def test_blocks_are_trimmed():
    template = """{% for message in messages %}
    {% if true %}
{{ message.content }}
    {% endif %}
{% endfor %}
end"""
    assert render(template) == "hi\nend"


def test_loop_controls_and_namespaces():
    template = (
        "{% set ns = namespace(seen=0) %}{% for m in messages %}{% set ns.seen = ns.seen + 1 %}"
        "{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{% if loop.index0 == 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ ns.seen }}"
    )
    messages = [{"role": "user", "content": letter} for letter in "abcde"]
    assert render(template, messages) == "ac4"


def test_generation_tag_changes_nothing():
    assert render("<{% generation %}{{ messages[0].content }}{% endgeneration %}>") == "<hi>"


def test_to_json_does_not_escape_html():
    value = {"b": "<é>", "a": ["'", 1.5, None]}
    template = "{{ value | tojson }}{{ value | tojson(indent=2, sort_keys=True) }}"
    compact = '{"b": "<é>", "a": ["\'", 1.5, null]}'
    pretty = '{\n  "a": [\n    "\'",\n    1.5,\n    null\n  ],\n  "b": "<é>"\n}'
    assert render(template, template_kwargs={"value": value}) == compact + pretty


def test_strftime_now():
    before = datetime.now().strftime("%d %b %Y")
    text = render("{{ strftime_now('%d %b %Y') }}")
    assert text in (before, datetime.now().strftime("%d %b %Y"))


def test_variables():
    template = (
        "{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}"
        "{{ enable_thinking is defined }}{{ unheard_of }}"
    )
    assert render(template) == "<s>TrueTrueTrueFalse"
    arguments = {
        "add_generation_prompt": False,
        "tools": [{"type": "function"}],
        "documents": [{"title": "t"}],
        "template_kwargs": {"enable_thinking": False},
    }
    assert render(template, **arguments) == "<s>FalseFalseFalseTrue"
    assert render("{{ tools[0].type }}", tools=[{"type": "function"}]) == "function"
    assert apply_chat_template(Stub(None), HI, chat_template="own") == "own"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_content_may_be_absent_beside_tool_calls():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]
    assert render("{{ messages[0].tool_calls[0].id }}", messages) == "x"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages, not str"),
        ({"role": "user"}, "messages must be a list of messages, not dict"),
        ([], "messages must hold at least one message"),
        (["hi"], r"messages\[0\] must be an object, not str"),
        ([{"content": "hi"}], r"messages\[0\].role must be a non-empty string, not None"),
        ([*HI, {"role": "user"}], r"messages\[1\].content must be a string .* not None"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string .* not 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\] must be a text part, not 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"messages\[0\].content\[0\].text must be a string, not None",
        ),
    ],
)
def test_faulty_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render("{{ messages }}", messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template"),
        ("{% if %}", r"the chat template does not parse: TemplateSyntaxError: .*\(line 1\)"),
        ("\n{% nonsense %}", r"does not parse: .*unknown tag 'nonsense'.*\(line 2\)"),
        ("{{ raise_exception('Only users may speak') }}", "failed: Only users may speak"),
        ("{{ messages[0].content + 1 }}", "failed: TypeError"),
        ("{{ missing.attribute }}", "failed: UndefinedError: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ messages.append(1) }}", "failed: SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed: (SecurityError|Undefined)"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "failed: OverflowError"),
    ],
)
def test_faulty_templates(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


def test_template_arguments_do_not_hide_messages():
    with pytest.raises(ValueError, match="template_kwargs: 'messages' is an argument of its own"):
        render("x", template_kwargs={"messages": []})


def test_alternation_fault_names_the_reason():
    with pytest.raises(ValueError, match="Conversation roles must alternate"):
        render(LLAMA_2, [{"role": "assistant", "content": "Hi"}])


def test_encoded_chats_have_one_beginning():
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    metadata = byte_level_metadata(add_bos_token=True)
    metadata["tokenizer.chat_template"] = template
    tokenizer = tokenizer_from_metadata(metadata, "test")
    ids = encode_chat(tokenizer, HI)
    assert ids == [0, *tokenizer.encode("hi", add_special_tokens=False), 1]
