"""The tables that scripts/plan_memory.py prints."""

from collections.abc import Sequence
from typing import Any

TABLE_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def both_units(size_bytes: float) -> tuple[str, str]:
    """A size in decimal (kB, MB, GB) and in binary units (KiB, MiB, GiB)."""

    def scaled(base: int, names: str) -> str:
        value, unit = float(size_bytes), "B"
        for name in names.split():
            if value < base:
                break
            value, unit = value / base, name
        return f"{value:,.3f} {unit}" if unit != "B" else f"{value:,.0f} B"

    return scaled(1000, "kB MB GB"), scaled(1024, "KiB MiB GiB")


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns lined up, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size_table(title: str, sizes: Sequence[tuple[str, float]]) -> str:
    """Sizes in bytes and in both units."""
    rows = [(title, "bytes", "decimal", "binary")]
    rows += [(name, f"{size:,.0f}", *both_units(size)) for name, size in sizes]
    return format_table(rows)


def plan_report(plan: dict[str, Any]) -> str:
    """The plan as text."""
    pool, longest, reserved = plan["pool"], plan["lengths"]["longest"], plan["preallocation"]
    parts = [
        f"{plan['model']}, keys and values in {plan['dtype']}, blocks of {pool['block_size']}, "
        f"on {plan['device']}",
        size_table(
            "Keys and values",
            [
                ("a token", plan["kv_bytes_per_token"]),
                ("a block", pool["block_bytes"]),
                (f"a sequence of {longest:,} tokens", plan["lengths"]["longest_bytes"]),
            ],
        ),
        size_table(
            "The device",
            [
                ("memory", pool["device_bytes"]),
                ("JAX allocates from", pool["jax_bytes"]),
                ("weights", pool["weight_bytes"]),
                (f"pool: {pool['num_blocks']:,} blocks", pool["pool_bytes"]),
                ("left for everything else", pool["rest_bytes"]),
            ],
        ),
        _fit_table(plan),
        size_table(
            f"Pre-allocated to max_model_len, {plan['max_model_len']:,} tokens",
            [
                ("a sequence reserves", reserved["reserved_bytes"]),
                (f"and uses, in the mean ({reserved['utilisation']:.1%})", reserved["used_bytes"]),
            ],
        ),
    ]
    if "prefix" in plan:
        parts.append(_prefix_table(plan["prefix"]))
    parts.append(_study_table(plan))
    return "\n\n".join(parts)


def _fit_table(plan: dict[str, Any]) -> str:
    lengths, fits, longest = plan["lengths"], plan["capacity"], plan["lengths"]["longest"]
    rows = [("Sequences at the same time", "in blocks", "pre-allocated")]
    mean, worst, reserved = (f"{fits[name]:,}" for name in ("mean", "worst", "preallocated"))
    if lengths["shortest"] == longest:
        rows.append((f"as given: {longest:,} tokens each", worst, reserved))
    else:
        rows.append((f"as given: {lengths['mean']:,.1f} tokens in the mean", mean, reserved))
        rows.append((f"as given, all as long as the longest, {longest:,}", worst, reserved))
    note = "with the given prefix shared" if "prefix" in plan else "nothing shared"
    rows[1:] = [(f"{name} ({note})", *cells) for name, *cells in rows[1:]]
    for row in fits["fixed_lengths"]:
        rows.append((f"{row['length']:,} tokens each", f"{row['sequences']:,}", reserved))
    return format_table(rows)


def _prefix_table(prefix: dict[str, Any]) -> str:
    count, length = prefix["num_sequences"], prefix["prefix_length"]
    sizes = size_table(
        f"{count:,} sequences, first {length:,} tokens equal",
        [
            ("each its own", prefix["separate_bytes"]),
            ("shared", prefix["shared_bytes"]),
            (f"saved: {prefix['saving']:.1%} of the prefix's memory", prefix["saved_bytes"]),
        ],
    )
    copied = prefix["copied_tokens"]
    note = f"\nThe last {copied} tokens of the prefix fill no block: each sequence copies them."
    return sizes + (note if copied else "")


def _study_table(plan: dict[str, Any]) -> str:
    rows = [("Block size", "a block", "blocks", "tokens wasted", "waste", "table entries", "table")]
    for row in plan["block_sizes"]:
        if row["block_size"] in TABLE_BLOCK_SIZES:
            rows.append(
                (
                    str(row["block_size"]),
                    both_units(row["block_bytes"])[1],
                    f"{row['blocks']:,.1f}",
                    f"{row['wasted_tokens']:,.2f}",
                    f"{row['waste']:.2%}",
                    f"{row['table_entries']:,}",
                    both_units(row["table_bytes"])[1],
                )
            )
    return format_table(rows)
