"""The small JSON files beside a tokenizer in a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token added to the vocabulary after training."""

    content: str
    token_id: int
    special: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """What tokenizer_config.json, special_tokens_map.json, added_tokens.json,
    generation_config.json, config.json and the chat template's file say. Absent files say nothing.

    Fields:
      special_tokens: {"bos_token": "<s>", ...}.
      added_tokens: tokens declared with their ids.
      eos_token_ids: of generation_config.json, or else of config.json.
      add_bos_token, add_eos_token: None where tokenizer_config.json does not say.
      tokenizer_class: "LlamaTokenizer", ..., or None.
      chat_template: chat_template.jinja before tokenizer_config.json's.
    """

    special_tokens: Mapping[str, str]
    added_tokens: tuple[AddedToken, ...]
    eos_token_ids: tuple[int, ...]
    add_bos_token: bool | None
    add_eos_token: bool | None
    tokenizer_class: str | None
    chat_template: str | None


def read_checkpoint_files(directory: Path) -> CheckpointFiles:
    """Reads what there is in `directory`; ValueError names a file or a value that is malformed."""
    config = read_json_object(directory / "tokenizer_config.json")
    special = read_json_object(directory / "special_tokens_map.json")
    special.update({key: value for key, value in config.items() if key.endswith("_token")})
    return CheckpointFiles(
        special_tokens={
            key: text
            for key, value in special.items()
            if key.endswith("_token") and (text := _token_text(value)) is not None
        },
        added_tokens=_added_tokens(directory, config),
        eos_token_ids=_eos_token_ids(directory),
        add_bos_token=_flag(config, "add_bos_token"),
        add_eos_token=_flag(config, "add_eos_token"),
        tokenizer_class=config.get("tokenizer_class"),
        chat_template=_chat_template(directory, config),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds a JSON {type(data).__name__}, not an object")
    return data


def _token_text(value: Any) -> str | None:
    """Text of a token written as a string or as {"content": string, ...}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"tokenizer_config.json: {key} must be true or false, not {value!r}")
    return value


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    found = {
        token_id: AddedToken(content=content, token_id=token_id, special=False)
        for content, token_id in read_json_object(directory / "added_tokens.json").items()
    }
    for key, value in (config.get("added_tokens_decoder") or {}).items():
        content = _token_text(value)
        if content is None or not str(key).isdigit():
            raise ValueError(
                f"tokenizer_config.json: added_tokens_decoder[{key!r}] must be a token with "
                f"content under a number, not {value!r}"
            )
        special = isinstance(value, Mapping) and bool(value.get("special", False))
        found[int(key)] = AddedToken(content=content, token_id=int(key), special=special)
    return tuple(found[token_id] for token_id in sorted(found))


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise ValueError(f"{name}: eos_token_id must be token ids (0 or more), not {value!r}")
        return tuple(ids)
    return ()


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None:
        template = read_json_object(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise ValueError(
                f"tokenizer_config.json: chat_template has no entry named 'default' "
                f"(found {sorted(map(str, named))})"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"tokenizer_config.json: chat_template must be text, not {type(template).__name__}"
        )
    return template
