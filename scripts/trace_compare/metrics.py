"""How far two arrays are apart, and whether two tokens that differ were as good as equal."""

import dataclasses

import numpy as np
from gpu_bench.cases import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one array to another.

    Attributes:
      max_abs: largest absolute difference; infinite where one is not finite and the other is, or
        both are not and they are not the same.
      scale: largest absolute finite value of the first.
      not_finite: elements that are NaN or infinite in either.
    """

    max_abs: float
    scale: float
    not_finite: int = 0

    @property
    def relative(self) -> float:
        """``max_abs`` over ``scale``: 0 when nothing differs, infinite when only scale is 0."""
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.scale if self.scale else float("inf")


def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Of two arrays of one shape, in float64."""
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"shapes {first.shape} and {second.shape} differ")
    finite = np.isfinite(first) & np.isfinite(second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    apart = np.abs(np.where(finite, first, 0) - np.where(finite, second, 0))
    apart = np.where(finite, apart, np.where(same, 0, np.inf))
    return Difference(
        max_abs=float(apart.max(initial=0)),
        scale=float(np.abs(np.where(np.isfinite(first), first, 0)).max(initial=0)),
        not_finite=int((~finite).sum()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """A row that got two different tokens.

    Attributes:
      row: of the request table.
      margin: by how much the first's logits prefer its token to the second's.
      logits_apart: largest difference of the row's logits.
    """

    row: int
    first: int
    second: int
    margin: float
    logits_apart: float
    sampled: bool

    @property
    def near_tie(self) -> bool:
        """Whether the difference of the logits is enough to turn a greedy choice round: each of
        two logits may have moved by it. A sampled token has no such rule and is never one.
        """
        return not self.sampled and self.margin <= 2 * self.logits_apart


def token_differences(
    rows: np.ndarray,
    tokens: tuple[np.ndarray, np.ndarray],
    logits: tuple[np.ndarray, np.ndarray],
    sampled: np.ndarray,
) -> list[TokenDifference]:
    """The rows whose tokens differ.

    Args:
      rows: [R] row of each rank. tokens: [R] of both. logits: [R, V] of both.
      sampled: [R] bool, not greedy.
    """
    found = []
    for rank in np.flatnonzero(tokens[0] != tokens[1]):
        first, second = int(tokens[0][rank]), int(tokens[1][rank])
        found.append(
            TokenDifference(
                row=int(rows[rank]),
                first=first,
                second=second,
                margin=float(logits[0][rank, first]) - float(logits[0][rank, second]),
                logits_apart=difference(logits[0][rank], logits[1][rank]).max_abs,
                sampled=bool(sampled[rank]),
            )
        )
    return found


def attention_work(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> dict[str, int]:
    """What attention of one step must do whoever computes it: FLOPs of both products over what each
    token may see, bytes of every row's keys and values read once, of queries read and outputs
    written, and of the step's own keys and values written.
    """
    case = Case(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    outside = 2 * case.num_tokens * num_heads * head_dim * np.dtype(case_dtype(dtype)).itemsize
    return {
        "flops": num_layers * case.flops,
        "bytes": num_layers
        * (case.context_bytes + outside + 2 * case.num_tokens * case.token_bytes),
    }


def case_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of a name, bfloat16 included."""
    import jax.numpy as jnp

    return np.dtype(jnp.dtype(dtype))
