"""Stepping through a log by hand, forwards and backwards."""

import cmd
from typing import Any

from pagedjax.replay.describe import describe_changes, describe_state
from pagedjax.replay.player import Player
from pagedjax.replay.search import compiled_predicate, first_failure


class Shell(cmd.Cmd):
    """A prompt over a player.

    Args:
      options: of `cmd.Cmd`: other streams than the terminal's.
    """

    intro = "next, back, goto N, show, changes, diff A B, find EXPRESSION, quit; help COMMAND tells"

    def __init__(self, player: Player, **options: Any) -> None:
        super().__init__(**options)
        self._player = player
        self._number = 0
        self._set_prompt()

    def do_next(self, text: str) -> None:
        """next [N]: N steps forward, and what they changed."""
        self._move(self._number + self._count(text), changes=True)

    def do_back(self, text: str) -> None:
        """back [N]: N steps back."""
        self._move(self._number - self._count(text))

    def do_goto(self, text: str) -> None:
        """goto N: to the state after step N."""
        self._move(int(text))

    def do_show(self, text: str) -> None:
        """show: the state here."""
        step = self._player.log.steps[self._number - 1] if self._number else None
        num_tokens = step.num_tokens if step else None
        self._print(describe_state(self._player.state(self._number), self._number, num_tokens))

    def do_changes(self, text: str) -> None:
        """changes: what the step that led here changed."""
        self._print(describe_changes(self._player, max(self._number - 1, 0), self._number))

    def do_diff(self, text: str) -> None:
        """diff A B: what happened between two steps."""
        first, last = sorted(map(int, text.split()))
        self._print(describe_changes(self._player, self._checked(first), self._checked(last)))

    def do_find(self, text: str) -> None:
        """find EXPRESSION: on to the next step after which it fails; see replay.py bisect."""
        holds = compiled_predicate(text, self._player)
        found = first_failure(self._player, holds, first=self._number + 1, linear=True)
        if found is None:
            self._print(["it holds from here to the end"])
        else:
            self._move(found)

    def do_quit(self, text: str) -> bool:
        """quit: leave."""
        return True

    do_n, do_b, do_g, do_s, do_c, do_d, do_q = (
        *(do_next, do_back, do_goto, do_show, do_changes, do_diff, do_quit),
    )
    do_EOF = do_quit

    def onecmd(self, line: str) -> bool:
        """A mistake is told and does not end it."""
        try:
            return bool(super().onecmd(line))
        except (ValueError, IndexError) as error:
            self._print([f"error: {error}"])
            return False

    def emptyline(self) -> bool:
        """Nothing typed: nothing done."""
        return False

    def _move(self, number: int, *, changes: bool = False) -> None:
        before = self._number
        self._number = self._checked(number)
        if changes:
            self._print(describe_changes(self._player, before, self._number))
        self.do_show("")
        self._set_prompt()

    def _checked(self, number: int) -> int:
        if not 0 <= number <= self._player.num_steps:
            raise IndexError(f"step must be from 0 to {self._player.num_steps} (got {number})")
        return number

    def _count(self, text: str) -> int:
        return int(text) if text else 1

    def _set_prompt(self) -> None:
        self.prompt = f"{self._number}/{self._player.num_steps}> "

    def _print(self, lines: Any) -> None:
        for line in lines:
            print(line, file=self.stdout)
