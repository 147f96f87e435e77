"""Other names for tokens: equal exactly where the scheduler could see that two tokens are equal.

The scheduler never looks at what a token is. It asks whether two are equal, and only ever behind
equal beginnings: blocks are shared when all tokens up to their end are equal. So a token may be
replaced by a keyed hash of the whole sequence up to it. Sequences that begin alike get equal names
as long as they are alike, and unrelated names after that; a token has another name behind each
other beginning, so that counting names tells nothing about the text. The key is random and is never
written down: what is left in the log is lengths, and which requests begin alike for how long.
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

NAMES = 1 << 30
"""Names are below this. Two different continuations get the same one once in so many."""

STOP = np.int32(NAMES)
"""Name of a token that ended its request. It is the last of its sequence and is never computed, so
nobody shares it."""


class PrefixNames:
    """Names of the tokens of sequences that grow, each in a row of the request table."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(32) if key is None else key
        self._digests: dict[int, bytes] = {}

    def start(self, row: int, token_ids: Sequence[int]) -> np.ndarray:
        """[n] int32: names of a new sequence's tokens."""
        named, self._digests[row] = self.walk(b"", token_ids)
        return named

    def branch(self, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Rows go on with the sequences that others have now, or their own."""
        digests = [self._digests[source] for source in sources]
        self._digests |= dict(zip(rows, digests, strict=True))

    def extend(self, row: int, token_id: int) -> int:
        """The name of the sequence's next token."""
        (name,), self._digests[row] = self.walk(self._digests[row], [token_id])
        return int(name)

    def walk(self, digest: bytes, token_ids: Sequence[int]) -> tuple[np.ndarray, bytes]:
        """(names [n] int32 of tokens behind a beginning with this digest, digest of all of it). The
        digest of nothing is empty."""
        named = np.empty(len(token_ids), np.int32)
        for i, token_id in enumerate(token_ids):
            data = digest + int(token_id).to_bytes(4, "little")
            digest = hashlib.blake2b(data, key=self._key, digest_size=16).digest()
            named[i] = int.from_bytes(digest[:4], "little") % NAMES
        return named, digest
