"""What compare_batching.py makes of a run: the states of a request, the figures, the picture."""

import json

import pytest
from batching_runs import ARTICLE, Run, _spans, make_requests, table
from PIL import Image


def make_run(mode="continuous paged", **changes):
    fields = {
        "mode": mode,
        "seconds": 2.0,
        "num_places": 2,
        "num_blocks": 10,
        "spans": {
            "A": [("waiting", 1, 1), ("running", 2, 4)],
            "B": [("running", 1, 2), ("preempted", 3, 3), ("running", 4, 4), ("done", 5, 6)],
        },
        "tokens": {"A": [1, 2, 3], "B": [4, 5, 6]},
        "running": [1, 2, 1, 2],
        "held": [2, 4, 2, 4],
        "filled": [1.0, 0.5, 1.0, 0.5],
        "first_s": [1.0, 0.5],
        "preemptions": 1,
        "computed_tokens": 8,
    }
    return Run(**(fields | changes))


def test_spans_of_a_request_that_is_preempted():
    history = ["queued", "waiting", "running", "waiting", "running", "ended", "ended"]
    assert _spans({"A": history}, static=False)["A"] == [
        ("waiting", 1, 2),
        ("running", 3, 3),
        ("preempted", 4, 4),
        ("running", 5, 5),
    ]


def test_in_a_static_batch_what_has_ended_waits_for_the_others():
    states = {
        "A": ["running", "ended", "ended", "ended", "ended"],
        "B": ["running", "running", "running", "ended", "ended"],
        "C": ["queued", "waiting", "waiting", "running", "running"],
        "D": ["queued", "waiting", "waiting", "running", "ended"],
    }
    spans = _spans(states, static=True)
    assert spans["A"] == [("running", 1, 1), ("done", 2, 3)]
    assert spans["B"] == [("running", 1, 3)]
    assert spans["C"] == [("waiting", 1, 3), ("running", 4, 5)]
    assert spans["D"] == [("waiting", 1, 3), ("running", 4, 4), ("done", 5, 5)]
    assert _spans(states, static=False)["A"] == [("running", 1, 1)]


def test_who_starts_while_the_batch_goes_on_belongs_to_it():
    """A ends while the batch is still being filled: its bar goes on to the end of B's and C's."""
    states = {
        "A": ["running", "ended", "ended", "ended", "ended"],
        "B": ["running", "running", "running", "ended", "ended"],
        "C": ["waiting", "waiting", "running", "running", "ended"],
        "D": ["waiting", "waiting", "waiting", "waiting", "running"],
    }
    spans = _spans(states, static=True)
    assert spans["A"] == [("running", 1, 1), ("done", 2, 4)]
    assert spans["B"] == [("running", 1, 3), ("done", 4, 4)]
    assert spans["C"] == [("waiting", 1, 2), ("running", 3, 4)]
    assert spans["D"] == [("waiting", 1, 4), ("running", 5, 5)]


def test_figures_by_hand():
    figures = make_run().figures()
    assert figures["tokens_per_s"] == 3.0
    assert figures["mean_running"] == 1.5
    assert figures["most_running"] == 2
    assert figures["empty_places"] == pytest.approx(0.25)  # 6 of 8 places
    assert figures["pool_held"] == pytest.approx(0.3)
    assert figures["held_but_empty"] == pytest.approx(0.25)
    assert make_run(filled=[None] * 4).figures()["held_but_empty"] is None


def test_ratios_are_to_the_first_mode():
    lines = table([make_run(seconds=4.0), make_run("static paged", seconds=2.0)]).splitlines()
    assert "| continuous paged | 1.5 | 1.00 |" in lines[2]
    assert "| static paged | 3.0 | 2.00 |" in lines[3]


def test_workloads():
    article = make_requests("article")
    assert {r.name: r.num_tokens for r in article} == ARTICLE
    one, other = make_requests("shared", 3, repeat=0), make_requests("shared", 3, repeat=1)
    assert len(one) == 3
    assert one[0].prompt_ids[:512] == one[1].prompt_ids[:512]
    assert one[0].prompt_ids[:8] != other[0].prompt_ids[:8]
    assert [r.num_tokens for r in one] == [r.num_tokens for r in other]


def test_the_picture(tmp_path):
    from batching_plot import COLOURS, draw

    png, svg = draw([make_run(), make_run("static paged")], tmp_path / "a.b", title="mixed")
    assert (png.name, svg.name) == ("a.b.png", "a.b.svg")
    seen = {rgb for _, rgb in Image.open(png).convert("RGB").getcolors(1 << 20)}
    for colour in COLOURS.values():
        assert tuple(bytes.fromhex(colour[1:])) in seen, colour
    json.dumps(make_run().as_dict())
