"""Stop strings in a stream of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """What one push gives.

    Fields:
      text: text that may be shown now.
      stopped_at: None while no stop string was found; then the length in characters of the whole
        output (all texts together), which ends there.
    """

    text: str
    stopped_at: int | None


class StopChecker:
    """Finds stop strings in text that comes in pieces, and shows no part of one.

    A stop string is found wherever it is complete, however the pieces cut it. The one completed
    first wins; of several completed by the same character, the longest (it begins first). Both do
    not depend on the cuts. Text that may be the beginning of a stop string is held back until it is
    complete or impossible. What follows a stop string is dropped.

    `include_stop_str_in_output` keeps the stop string at the end of the output (in one piece).
    `min_tokens` as in vLLM: a stop string counts only if text of a token after the first
    `min_tokens` completes it; it may begin before.

    Cost: at most O(characters x stop strings), by one Knuth-Morris-Pratt automaton for each stop
    string; text without a first character of any is passed over at the speed of a regex search.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str):
            stop = [stop]
        for string in stop:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop: {string!r} is not a non-empty string")
        if min_tokens < 0:
            raise ValueError(f"min_tokens: {min_tokens} is not 0 or more")
        self._stop = tuple(dict.fromkeys(stop))
        self._borders = tuple(_borders(string) for string in self._stop)
        self._beginnings = re.compile("|".join({re.escape(string[0]) for string in self._stop}))
        self._matched = [0] * len(self._stop)  # characters of each stop string that now match
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._num_shown = 0  # characters
        self._stop_string: str | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._stop_string

    def push(self, text: str, num_tokens: int = 1) -> StopResult:
        """Takes the text of the next `num_tokens` tokens.

        Push tokens one at a time while `min_tokens` matters: the text of one push counts wholly as
        that of its last token. After a stop, everything pushed is dropped.
        """
        if self._stop_string is not None:
            return StopResult("", self._num_shown)
        self._num_tokens += num_tokens
        if not self._stop:
            return self._show(text, None)
        counts = self._num_tokens > self._min_tokens
        window = self._held + text
        end = len(self._held)
        while end < len(window):
            if not any(self._matched):  # nothing can happen before a first character of some stop
                begin = self._beginnings.search(window, end)
                if begin is None:
                    break
                end = begin.start()
            complete = self._advance(window[end])
            end += 1
            if complete and counts:
                self._stop_string, self._held = complete, ""
                return self._show(window[: end if self._include else end - len(complete)], complete)
        shown = len(window) - max(self._matched)
        self._held = window[shown:]
        return self._show(window[:shown], None)

    def flush(self) -> str:
        """The text still held back, when the output ends for another reason."""
        text, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return self._show(text, None).text

    def _show(self, text: str, stop_string: str | None) -> StopResult:
        self._num_shown += len(text)
        return StopResult(text, self._num_shown if stop_string is not None else None)

    def _advance(self, character: str) -> str:
        """Moves every automaton by a character; the longest stop string it completes, or ""."""
        complete = ""
        for place, (string, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[place]
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            if string[matched] == character:
                matched += 1
            if matched == len(string):
                complete = max(complete, string, key=len)
                matched = borders[matched - 1]
            self._matched[place] = matched
        return complete


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for end in range(1, len(string)):
        while length and string[end] != string[length]:
            length = borders[length - 1]
        if string[end] == string[length]:
            length += 1
        borders[end] = length
    return borders
