"""Cache salts: a number for each text, the same one whenever the text comes again."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MOST = 65_536
"""Texts known at once. One that comes again after it was forgotten gets a new number, under which
nothing is cached yet."""


class Salts:
    """Numbers instead of hashes: no two texts ever share one, however they were chosen. Any thread.

    Args:
      most: texts to know at once; the one that was longest unused is forgotten first.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def number(self, text: str | None) -> int:
        """From 1 to 2**32 - 1; 0 for None."""
        if text is None:
            return 0
        # Of a long text, and of a secret, only the hash is kept.
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        with self._lock:
            found = self._numbers.get(key)
            if found is None:
                if self._last == 2**32 - 1:
                    raise RuntimeError("no number is left for another cache_salt; restart")
                self._last += 1
                found = self._numbers[key] = self._last
            self._numbers.move_to_end(key)
            if len(self._numbers) > self._most:
                self._numbers.popitem(last=False)
            return found

    def saved(self) -> dict[str, Any]:
        """For `restore`, as JSON can say it."""
        with self._lock:
            return {"last": self._last, "known": list(self._numbers.items())}

    def restore(self, last: int, known: Sequence[tuple[str, int]]) -> None:
        """Become what was saved."""
        with self._lock:
            self._last = last
            self._numbers = OrderedDict((key, number) for key, number in known)
