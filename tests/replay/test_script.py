"""scripts/replay.py, and stepping by hand."""

import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedjax.eventlog.format import Kind
from pagedjax.replay import Player, read_log
from pagedjax.replay.interactive import Shell
from tests.replay.session import record, rewritten

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "replay.py"


@pytest.fixture
def script(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("replay_script", SCRIPT)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(program, "_keep_compiled", lambda: None)  # a setting of the process

    def run(*argv, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = program.main(list(map(str, argv)))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def path(folder):
    """A log of some steps."""
    path = folder / "of-the-script.log"
    record(path, num_steps=60)
    return path


def test_the_script(path, folder, script):
    status, out, _ = script(path, "diff", 1, 3)
    assert status == 0
    assert "step 2, " in out
    assert "from 1 to 3: " in out
    status, out, _ = script(path, "show", 40)
    assert status == 0
    assert "step 40, " in out
    status, _, err = script(path, "show", 9999)
    assert status == 2
    assert "step must be from 0 to" in err
    assert script(path, "diff", 3, 1)[0] == 2
    status, out, _ = script(path, "bisect", "step < 30")
    assert status == 1
    assert "first fails at step 30" in out
    assert script(path, "bisect", "step >= 0", "--linear")[:1] == (0,)
    assert script(path, "bisect", "1 +")[0] == 2
    assert script(folder / "none.log", "verify")[0] == 2
    assert script(path, "verify", "--model", "x")[0] == 2  # it has no text, or there is no such one


def test_the_script_verifies(folder, script):
    path = folder / "short.log"
    record(path, num_steps=20)
    status, out, _ = script(path, "verify")
    assert status == 0
    assert "states have checksums, and all are equal" in out

    def change(_, kind, arrays, values):
        if kind == Kind.RESULT and values["step"] == 9:
            arrays["sums"] = arrays["sums"] ^ np.eye(1, len(arrays["sums"]), 3, np.uint32)[0]

    rewritten(path, folder / "short-wrong.log", change)
    status, out, _ = script(folder / "short-wrong.log", "verify")
    assert status == 1
    assert "step 9: the state differs in rows.error" in out
    (folder / "short-cut.log").write_bytes(path.read_bytes()[:-3])
    status, out, _ = script(folder / "short-cut.log", "verify")
    assert status == 1
    assert "PROBLEM  the log is truncated" in out


def test_by_hand(path):
    player = Player(read_log(path))
    typed = "goto 10\nn\nb 2\nd 8 9\nfind step < 12\nc\nx\ngoto 9999\ngoto z\n\nq\n"
    out = io.StringIO()
    shell = Shell(player, stdin=io.StringIO(typed), stdout=out)
    shell.use_rawinput = False
    shell.cmdloop()
    text = out.getvalue()
    for words in (
        *("step 10, ", "from 10 to 11: ", "9/", "from 8 to 9: ", "step 12, ", "from 11 to 12: "),
        *("Unknown syntax: x", "error: step must be from 0 to", "error: invalid literal"),
    ):
        assert words in text
