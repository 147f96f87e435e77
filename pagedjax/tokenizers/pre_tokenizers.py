"""The pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`).

A byte-level BPE merges inside the pieces that its pre-tokenizer cuts. A GGUF file holds only a name
for it, so a wrong guess gives tokens that the model was not trained on, without any error. Names
and patterns: llama.cpp, llama-vocab.cpp (patterns that llama.cpp had to rewrite for its own regex
engine are given in their original form).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a text is cut before byte-pair merges.

    Fields:
      patterns: applied one after another; matches and what lies between them become pieces.
      ignore_merges: a piece that is a token as a whole becomes it, whatever the merges say.
      add_bos: the beginning-of-sequence token is added unless tokenizer.ggml.add_bos_token says no.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DEFAULT = PreTokenizer(
    patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)
_DIGITS_THEN_GPT2 = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA_BPE = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(patterns=(_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), PreTokenizer(patterns=(_QWEN2,))
    ),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2"), PreTokenizer(patterns=(_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_THEN_GPT2
    ),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
}


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The pre-tokenizer of that name; ValueError lists the known ones."""
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None:
        raise ValueError(
            f"tokenizer.ggml.pre is missing, so the pre-tokenizer is unknown (known: {known})"
        )
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: {name!r} is not supported (known: {known})")
    return PRE_TOKENIZERS[name]


def build_pre_tokenizer(pre_tokenizer: PreTokenizer) -> Any:
    """The same as a pre-tokenizer of the `tokenizers` library, followed by bytes."""
    from tokenizers import Regex, pre_tokenizers

    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in pre_tokenizer.patterns
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])
