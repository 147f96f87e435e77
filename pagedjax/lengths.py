"""Lengths of sequences: distributions of them, in exact integers.

A *length* is the number of tokens whose keys and values a sequence holds. The last token of a
request is never fed back, so one with p prompt and o output tokens holds at most p + o - 1.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction


def blocks_for(length: int, *, block_size: int) -> int:
    """Blocks that hold `length` tokens; the last one may be partly filled."""
    check_at_least("length", length, 0)
    check_at_least("block_size", block_size, 1)
    return -(-length // block_size)


@dataclass(frozen=True)
class Lengths:
    """A distribution of sequence lengths: ascending pairs of (length, how many have it).

    The counts are weights, only their ratios matter. Raises `ValueError` for no pair at all, a
    length or a count below 1, or lengths that do not ascend.
    """

    counts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.counts:
            raise ValueError("counts must hold at least one length (got none)")
        for length, count in self.counts:
            check_at_least("length", length, 1)
            check_at_least("count", count, 1)
        if any(a >= b for (a, _), (b, _) in itertools.pairwise(self.counts)):
            raise ValueError(f"counts must ascend strictly in length (got {self.counts})")

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "Lengths":
        """The distribution of a list of lengths."""
        return cls(tuple(sorted(collections.Counter(lengths).items())))

    @classmethod
    def fixed(cls, length: int) -> "Lengths":
        """Every sequence holds `length` tokens."""
        return cls(((length, 1),))

    @classmethod
    def uniform(cls, low: int, high: int) -> "Lengths":
        """Every length from `low` to `high`, both included, equally often."""
        check_at_least("low", low, 1)
        check_at_least("high", high, low)
        return cls(tuple((length, 1) for length in range(low, high + 1)))

    @classmethod
    def in_service(cls, prompt: "Lengths", output: "Lengths") -> "Lengths":
        """Lengths seen at a random step of random requests, prompt and output drawn independently.

        A request of p and o tokens holds p after the step that yields its first token, p + 1 after
        the next, p + o - 1 in the end: it grows through o lengths, each for one step. This weighs
        long outputs by the time that they stay. Chunked prefill and waiting are left out.
        """
        outputs = dict(output.counts)
        # longer[t]: how many outputs have more than t tokens, so reach the length p + t.
        longer = list(itertools.accumulate(outputs.get(t, 0) for t in range(output.longest, 0, -1)))
        grown = dict(enumerate(reversed(longer)))
        return cls(tuple(_sum_counts(dict(prompt.counts), grown)))

    @property
    def total(self) -> int:
        """Sum of the counts."""
        return sum(count for _, count in self.counts)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(length * count for length, count in self.counts)

    @property
    def mean(self) -> Fraction:
        """Mean length."""
        return Fraction(self.tokens, self.total)

    @property
    def shortest(self) -> int:
        """The least length."""
        return self.counts[0][0]

    @property
    def longest(self) -> int:
        """The greatest length."""
        return self.counts[-1][0]

    def blocks(self, block_size: int) -> int:
        """Blocks of all sequences, nothing shared."""
        return sum(
            count * blocks_for(length, block_size=block_size) for length, count in self.counts
        )


def _sum_counts(a: Mapping[int, int], b: Mapping[int, int]) -> Iterable[tuple[int, int]]:
    """(x + y, how often) for x drawn from `a` and y from `b`, ascending.

    Each mapping becomes one large integer whose digit number x is the count of x, in a base that no
    result can overflow. Multiplying them is the convolution: exact, and much faster than pairs.
    """
    width = (sum(a.values()) * sum(b.values())).bit_length() // 8 + 1

    def pack(counts: Mapping[int, int]) -> int:
        digits = (counts.get(x, 0).to_bytes(width, "little") for x in range(max(counts) + 1))
        return int.from_bytes(b"".join(digits), "little")

    size = (max(a) + max(b) + 1) * width
    product = (pack(a) * pack(b)).to_bytes(size, "little")
    for x in range(max(a) + max(b) + 1):
        if count := int.from_bytes(product[x * width : (x + 1) * width], "little"):
            yield x, count


def check_at_least(name: str, value: int, low: int) -> None:
    """Raises `ValueError` naming the field unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low} (got {value!r})")
