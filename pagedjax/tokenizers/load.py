"""Finding out which tokenizer a path holds."""

from __future__ import annotations

from pathlib import Path

from pagedjax.tokenizers.base import Tokenizer
from pagedjax.tokenizers.gguf_file import load_gguf_tokenizer
from pagedjax.tokenizers.gguf_metadata import MAGIC
from pagedjax.tokenizers.hf import load_tokenizer_json
from pagedjax.tokenizers.spm import load_tokenizer_model


def load_tokenizer(path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: a Hugging Face directory (tokenizer.json, or else tokenizer.model), or one file:
        tokenizer.json, a SentencePiece model, or a GGUF file (told apart by content).
      vocab_size: the model's vocabulary. Where it is larger than the tokenizer's (a padded
        embedding), the ids beyond are valid and decode to nothing.

    ValueError names the path and what is wrong with it.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (path / name).is_file():
                return load_tokenizer(path / name, vocab_size=vocab_size)
        raise ValueError(f"{path}: the directory has no tokenizer.json and no tokenizer.model")
    if not path.is_file():
        raise ValueError(f"{path}: no such file or directory")
    with open(path, "rb") as file:
        head = file.read(64)
    if head.startswith(MAGIC):
        return load_gguf_tokenizer(path, vocab_size=vocab_size)
    if head.lstrip()[:1] == b"{":
        return load_tokenizer_json(path, vocab_size=vocab_size)
    return load_tokenizer_model(path, vocab_size=vocab_size)
