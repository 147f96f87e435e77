"""The figures of an article on PagedAttention, checked: `python scripts/plan_memory.py --article`.

PagedJAX began with an article that explains PagedAttention and vLLM on Llama-2-13B in 16-bit
numbers, an A100 with 80 GB and requests of up to 4,096 tokens. Every figure it gives is computed
here from `pagedjax.planning`, and where it rounds or errs, that is said.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pagedjax import planning
from pagedjax.memory import GIB
from pagedjax.models.presets import preset_config
from pagedjax.planning import Lengths

GB, MIB, MB = 10**9, 1 << 20, 10**6
DTYPE, BLOCK_SIZE, MAX_LEN = "bfloat16", 16, 4096
A100_GIB = 80


VERDICTS = {
    "exact": "as computed",
    "rounded": "as computed, rounded",
    "unit": "right as a number, but GiB or MiB are called GB or MB",
    "depends": "true under a condition that the article leaves out",
    "wrong": "not what its own numbers give",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the article.

    Attributes:
      what: what it is about.
      article: as the article has it.
      computed: as the functions have it.
      verdict: one of VERDICTS.
      note: what to know about it; empty when there is nothing.
    """

    what: str
    article: str
    computed: str
    verdict: str
    note: str = ""


def article_figures() -> list[Figure]:
    """All figures of the article, in its order."""
    return [*_sequences(), *_utilisations(), *_blocks(), *_prefix(), *_batching()]


def article_report(figures: Sequence[Figure]) -> str:
    """The figures as text, one paragraph each, and how many hold."""
    parts = []
    for figure in figures:
        lines = [
            f"[{figure.verdict}] {figure.what}",
            f"    article   {figure.article}",
            f"    computed  {figure.computed}",
        ]
        lines += textwrap.wrap(figure.note, 96, initial_indent="    ", subsequent_indent="    ")
        parts.append("\n".join(lines))
    counts = {kind: sum(figure.verdict == kind for figure in figures) for kind in VERDICTS}
    width = max(map(len, VERDICTS))
    parts.append(
        "\n".join(f"{counts[kind]:>2} {kind:<{width}}  {why}" for kind, why in VERDICTS.items())
    )
    return "\n\n".join(parts)


def _units(size_bytes: Fraction | int) -> str:
    return f"{float(size_bytes) / GB:.3f} GB = {float(size_bytes) / GIB:.3f} GiB"


def _kv(length: int) -> int:
    return planning.kv_bytes(preset_config("llama-2-13b"), length, dtype=DTYPE)


def _sequences() -> list[Figure]:
    model, llama31 = preset_config("llama-2-13b"), preset_config("llama-3.1-8b")
    heads = replace(llama31, num_key_value_heads=llama31.num_attention_heads)
    by_heads = planning.kv_bytes_per_token(heads, dtype=DTYPE)
    right = planning.kv_bytes_per_token(llama31, dtype=DTYPE)
    full, ten = _kv(MAX_LEN), 10 * _kv(MAX_LEN)
    weights = planning.weight_bytes(model, dtype=DTYPE)
    card = A100_GIB * GIB
    return [
        Figure(
            what="Keys and values of 1,000 tokens",
            article="819,200,000 bytes",
            computed=f"{_kv(1000):,} bytes",
            verdict="exact",
        ),
        Figure(
            what="The same in GB",
            article="about 0.78 GB",
            computed=_units(_kv(1000)),
            verdict="wrong",
            note=f"It is {_kv(1000) / MIB:.2f} MiB, and 0.78 comes of dividing that by 1,000: two "
            "steps of 1,024 and one of 1,000.",
        ),
        Figure(
            what="2 L H D S B, with H the attention heads of a layer",
            article=f"for Llama-3.1-8B that makes {by_heads:,} bytes a token",
            computed=f"{right:,} bytes a token",
            verdict="depends",
            note="H must count the key-value heads. Llama-2-13B has 40 of both, so its figures "
            f"hold; with grouped queries (Llama-3.1-8B: {llama31.num_attention_heads} query, "
            f"{llama31.num_key_value_heads} key-value heads) the formula gives "
            f"{by_heads // right} times too much.",
        ),
        Figure(
            what="Keys and values of 4,096 tokens",
            article="3,355,443,200 bytes",
            computed=f"{full:,} bytes",
            verdict="exact",
        ),
        Figure(
            what="The same in GB",
            article="about 3.13 GB",
            computed=_units(full),
            verdict="unit",
            note="GiB, called GB.",
        ),
        Figure(
            what="10 such requests",
            article="31.3 GB, 39 % of an A100 with 80 GB",
            computed=f"{_units(ten)}, {ten / card:.1%} of 80 GiB",
            verdict="unit",
            note=f"GiB again. 39 % is right against 80 GiB; against 80 GB it would be "
            f"{ten / (80 * GB):.1%}.",
        ),
        Figure(
            what="Weights of Llama-2-13B, 2 bytes each",
            article="26 GB",
            computed=f"{weights:,} bytes, {_units(weights)}",
            verdict="rounded",
            note=f"{model.num_parameters:,} parameters. These are real GB, unlike the 31.3 above.",
        ),
        Figure(
            what="Both together",
            article="57.3 GB",
            computed=_units(ten + weights),
            verdict="wrong",
            note="31.3 GiB and 26 GB were added as if of one unit.",
        ),
    ]


def _utilisations() -> list[Figure]:
    model = preset_config("llama-2-13b")
    figures = []
    for length, article in ((50, "1.2 %"), (200, "4.9 %"), (1000, "24.4 %")):
        reserved = planning.preallocation(
            model, Lengths.fixed(length), max_model_len=MAX_LEN, dtype=DTYPE
        )
        figures.append(
            Figure(
                what=f"Utilisation of 4,096 reserved tokens by {length:,}",
                article=article,
                computed=f"{float(reserved.utilisation):.3%}",
                verdict="rounded",
            )
        )
    return figures


def _blocks() -> list[Figure]:
    model = preset_config("llama-2-13b")
    block = planning.kv_bytes_per_block(model, block_size=BLOCK_SIZE, dtype=DTYPE)
    in_64, in_16 = (planning.blocks_for(17, block_size=size) for size in (64, 16))
    few = Lengths.of([50, 200, 1000])
    waste = {name: _waste(lengths) for name, lengths in (("few", few), ("50", Lengths.fixed(50)))}
    first = next(n for n in range(BLOCK_SIZE, MAX_LEN, BLOCK_SIZE) if _waste(_window(n)) < 0.05)
    entries = planning.blocks_for(MAX_LEN, block_size=4)
    table = entries * planning.TABLE_ENTRY_BYTES
    return [
        Figure(
            what="A block of 16 tokens",
            article="13,107,200 bytes",
            computed=f"{block:,} bytes",
            verdict="exact",
        ),
        Figure(
            what="The same in MB",
            article="about 12.5 MB",
            computed=f"{block / MB:.3f} MB = {block / MIB:.3f} MiB",
            verdict="unit",
            note="12.5 MiB exactly, called MB.",
        ),
        Figure(
            what="Blocks of 50 tokens",
            article="4",
            computed=f"{planning.blocks_for(50, block_size=BLOCK_SIZE)}",
            verdict="exact",
            note="The last block holds 2 tokens. The article's kernel takes it for full and "
            "attends to 64 tokens.",
        ),
        Figure(
            what="17 tokens in blocks of 64",
            article="2 blocks, 15 places wasted",
            computed=f"{in_64} block, {in_64 * 64 - 17} places wasted",
            verdict="wrong",
            note=f"{in_16} blocks and {in_16 * 16 - 17} places are those of blocks of 16, the size "
            "that the example argues for.",
        ),
        Figure(
            what="Waste with blocks of 16",
            article="below 5 %, most lengths being multiples of 16",
            computed=f"{waste['few']:.1%} for its requests of 50, 200 and 1,000 tokens together, "
            f"{waste['50']:.1%} for 50 tokens alone",
            verdict="depends",
            note="Nothing makes lengths multiples of 16. With every remainder equally likely one "
            "in 16 is, and 7.5 places are lost a sequence, whatever its length: below 5 % of what "
            f"is held from {first - BLOCK_SIZE + 1} tokens on, above it for shorter sequences.",
        ),
        Figure(
            what="Block table with blocks of 4",
            article="too many entries",
            computed=f"{entries:,} entries, {table:,} bytes, beside {_kv(MAX_LEN):,} bytes of keys "
            "and values",
            verdict="depends",
            note="As memory they are nothing. What small blocks cost is work: more entries to hand "
            "out and to follow, and shorter runs of memory to read.",
        ),
    ]


def _waste(lengths: Lengths) -> float:
    (row,) = planning.block_size_study(
        preset_config("llama-2-13b"),
        lengths,
        max_model_len=MAX_LEN,
        dtype=DTYPE,
        block_sizes=(BLOCK_SIZE,),
    )
    return float(row.waste)


def _window(highest: int) -> Lengths:
    """All lengths of which `highest` (a multiple of the block size) fills the last block."""
    return Lengths.uniform(highest - BLOCK_SIZE + 1, highest)


def _prefix() -> list[Figure]:
    shared = planning.prefix_saving(
        preset_config("llama-2-13b"),
        prefix_length=2000,
        num_sequences=10,
        block_size=BLOCK_SIZE,
        dtype=DTYPE,
    )
    own = shared.separate_bytes + 10 * _kv(1000)
    return [
        Figure(
            what="10 requests, each with its own 2,000 tokens of prompt",
            article="10 x 1.53 GB = 15.3 GB",
            computed=f"{shared.separate_bytes:,} bytes, {_units(shared.separate_bytes)}",
            verdict="unit",
            note="GiB, called GB.",
        ),
        Figure(
            what="The prompt once",
            article="1.53 GB",
            computed=f"{shared.shared_bytes:,} bytes, {_units(shared.shared_bytes)}",
            verdict="unit",
            note="GiB, called GB. 2,000 tokens are 125 whole blocks, so no block is half shared "
            "and nothing is copied.",
        ),
        Figure(
            what="Saved",
            article="15.3 - 1.53 = 13.77 GB",
            computed=f"{shared.saved_bytes:,} bytes, {_units(shared.saved_bytes)}",
            verdict="wrong",
            note="GiB, called GB, and the difference of two rounded numbers: 13.73.",
        ),
        Figure(
            what="The same as a share",
            article="90 %",
            computed=f"{float(shared.saving):.1%}",
            verdict="exact",
            note="Of the prefix's memory. If each request holds 1,000 more tokens of its own, "
            f"{shared.saved_bytes / own:.0%} of all memory is saved.",
        ),
    ]


def _batching() -> list[Figure]:
    lengths = Lengths.of([100, 50, 200, 30])
    # A static batch reserves a row for as many steps as its longest request takes: the same
    # arithmetic as memory reserved for the longest sequence.
    reserved = planning.preallocation(
        preset_config("llama-2-13b"), lengths, max_model_len=lengths.longest, dtype=DTYPE
    )
    return [
        Figure(
            what="Utilisation of a static batch of 100, 50, 200 and 30 tokens",
            article="30 %",
            computed=f"{lengths.tokens} of {4 * lengths.longest} row-steps, "
            f"{float(reserved.utilisation):.1%}",
            verdict="wrong",
            note="30 % does not follow from these lengths, and the bars draw 100 tokens as long as "
            "200. The step counters of the continuous timeline beside it are consistent.",
        )
    ]
