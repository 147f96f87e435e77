"""How much of a prompt the prefix cache probably holds.

The cache lives on the device and is asked there, within a step. Without an estimate the host would
launch the largest bucket for the long prompt of every next turn of a chat, of which only the last
lines are new. The estimate decides the size of a step and nothing else.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixForecast:
    """The chains of blocks computed lately, the most recent ones, by hash.

    Args:
      num_blocks: how many to remember; the cache cannot hold more.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._known: OrderedDict[int, None] = OrderedDict()

    def chain(self, token_ids: Sequence[int]) -> list[int]:
        """One hash for each full block, of all tokens up to its end."""
        b, hashes, parent = self._block_size, [], 0
        for start in range(0, len(token_ids) - b + 1, b):
            parent = hash((parent, *token_ids[start : start + b]))
            hashes.append(parent)
        return hashes

    def remember(self, chain: Sequence[int]) -> None:
        """These blocks have been computed. Heads count as more recent than tails."""
        for block in reversed(chain):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._num_blocks:
            self._known.popitem(last=False)

    def known(self) -> list[int]:
        """What it remembers, the oldest first."""
        return list(self._known)

    def num_cached_tokens(self, chain: Sequence[int], num_tokens: int) -> int:
        """Leading tokens, of `num_tokens`, that are probably cached; at least one never is."""
        count = 0
        while count < len(chain) and chain[count] in self._known:
            count += 1
        return min(count * self._block_size, num_tokens - 1)
