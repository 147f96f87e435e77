"""Chat messages to a prompt, by the template that the checkpoint brings."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pagedjax.tokenizers.base import Tokenizer

Message = Mapping[str, Any]

_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


def apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for `messages`, as transformers' method of the same name renders it.

    Args:
      messages: {"role": ..., "content": ...} each; content is a string, a list of OpenAI's text
        parts (joined by newlines), or None beside "tool_calls". Other keys reach the template.
      add_generation_prompt: end with the beginning of the assistant's turn.
      tools, documents: passed to the template.
      chat_template: used instead of the checkpoint's.
      template_kwargs: further variables for the template (e.g. {"enable_thinking": False}).

    Encode the result with `add_special_tokens=False` (or use `encode_chat`): templates write the
    beginning-of-sequence token themselves.

    ValueError, with the reason: no template, a template that does not parse, fails or raises
    (`raise_exception`), messages of the wrong shape.
    """
    template = chat_template if chat_template is not None else tokenizer.chat_template
    if template is None:
        raise ValueError(
            "the tokenizer has no chat template: give chat_template, or send a plain prompt "
            "(the completions API)"
        )
    extra = dict(template_kwargs or {})
    for name in _OWN_NAMES:
        if name in extra:
            raise ValueError(f"template_kwargs: {name!r} is an argument of its own")
    variables = {
        **tokenizer.special_tokens,
        **extra,
        "messages": check_messages(messages),
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    compiled = _compile(template)
    try:
        return compiled.render(variables)
    except Exception as error:  # whatever a template does wrong, the request is at fault
        raise ValueError(f"the chat template failed: {_reason(error)}") from error


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], **template_arguments: Any
) -> list[int]:
    """Token ids of the prompt for `messages`; arguments as for `apply_chat_template`."""
    prompt = apply_chat_template(tokenizer, messages, **template_arguments)
    return tokenizer.encode(prompt, add_special_tokens=False)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dicts with text content; ValueError names the message at fault."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least one message")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role must be a non-empty string, not {role!r}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "\n".join(
            _part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif content is None and message.get("tool_calls"):
        content = None
    elif not isinstance(content, str):
        raise ValueError(
            f"{where}.content must be a string or a list of text parts, not {content!r}"
        )
    return {**message, "role": role, "content": content}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        if isinstance(part.get("text"), str):
            return part["text"]
        raise ValueError(f"{where}.text must be a string, not {part.get('text')!r}")
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise ValueError(f"{where} must be a text part, not {kind!r}: the model reads text only")


@functools.lru_cache(maxsize=8)
def _compile(template: str):
    """The compiled template, in the environment that transformers gives templates."""
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template does not parse: {_reason(error)}") from error


def _environment():
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """{% generation %} marks the assistant's text for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own filter escapes HTML characters, which a prompt must not contain.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(pattern):
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _reason(error: Exception) -> str:
    name = type(error).__name__
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    if name == "TemplateError":  # raise_exception: the template's own words
        return f"{error}{where}"
    return f"{name}: {error}{where}"
