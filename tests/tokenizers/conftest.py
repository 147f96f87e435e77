"""Tokenizers that the tests of this folder share, real ones and small ones made here."""

import json

import pytest

from pagedjax.tokenizers import load_tokenizer
from tests.tokenizers.corpus import TEXTS


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def mistral(sentencepiece_model):
    return load_tokenizer(sentencepiece_model)


@pytest.fixture(scope="session")
def mistral_library(sentencepiece_model):
    """The sentencepiece library itself on the same model."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))


def train_byte_level():
    """A byte-level BPE of the tokenizers library, with two special tokens and one added word."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("wörd", normalized=False)])
    return backend


def train_byte_fallback():
    """A Llama-2-like BPE: word marks, bytes for unknown characters, a leading space stripped."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"],
        limit_alphabet=60,
    )
    backend.train_from_iterator(TEXTS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_]
    tokens += [token for token in model["vocab"] if token not in tokens]
    made = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = backend.normalizer
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def train_metaspace():
    """A BPE with Metaspace before and after, as older SentencePiece conversions have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback", "metaspace"])
def trained(request, tmp_path_factory):
    """(library's tokenizer, ours) for one of the three kinds of tokenizer.json."""
    makers = {
        "byte_level": train_byte_level,
        "byte_fallback": train_byte_fallback,
        "metaspace": train_metaspace,
    }
    backend = makers[request.param]()
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    backend.save(str(path))
    return backend, load_tokenizer(path)


def train_sentencepiece(**options):
    """A small model of the sentencepiece library's own trainer; its serialized bytes."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        minloglevel=2,
        **{"vocab_size": 480, "hard_vocab_limit": False, **options},
    )
    return model.getvalue()
