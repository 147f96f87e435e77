"""Stop strings in a stream, against a reference that looks at the whole text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.tokenizers import StopChecker


def brute_force(pieces, stop, include, min_tokens):
    """(output, stop string): the first match by its end, then the longest, that may count."""
    text = "".join(pieces)
    uncounted = len("".join(pieces[:min_tokens]))
    for end in range(uncounted + 1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            string = max(found, key=len)
            return text[: end if include else end - len(string)], string
    return text, None


def run(pieces, stop, **options):
    """(texts shown, stopped_at, checker) with one token for each piece."""
    checker = StopChecker(stop, **options)
    shown, stopped_at = [], None
    for piece in pieces:
        result = checker.push(piece)
        shown.append(result.text)
        if result.stopped_at is not None:
            stopped_at = result.stopped_at
            break
    if stopped_at is None:
        shown.append(checker.flush())
    return shown, stopped_at, checker


SMALL = st.text(alphabet="ab\n", max_size=6)


@given(
    pieces=st.lists(SMALL, max_size=12),
    stop=st.lists(SMALL.filter(bool), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
@example(["aab"], ["aab", "b"], False, 0)
@example(["aa", "ab"], ["aab"], False, 0)  # a false start that overlaps the match
@example(
    ["aba", "ba"], ["aba"], False, 1
)  # a match that does not count, and overlaps one that does
@example(["ab", "ab"], ["ab"], False, 1)
@example(["a", "b"], ["ab"], False, 1)
@settings(max_examples=500)
def test_like_the_reference(pieces, stop, include, min_tokens):
    options = {"include_stop_str_in_output": include, "min_tokens": min_tokens}
    shown, stopped_at, checker = run(pieces, stop, **options)
    output, string = brute_force(pieces, stop, include, min_tokens)
    assert "".join(shown) == output
    assert checker.stop_string == string
    assert stopped_at == (None if string is None else len(output))


@given(
    pieces=st.lists(SMALL, max_size=12),
    stop=st.lists(SMALL.filter(bool), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=200)
def test_held_back_is_exactly_what_may_begin_a_stop_string(pieces, stop, include):
    checker = StopChecker(stop, include_stop_str_in_output=include)
    text = shown = ""
    for piece in pieces:
        result = checker.push(piece)
        text, shown = text + piece, shown + result.text
        if result.stopped_at is not None:
            break
        held = max(
            (n for string in stop for n in range(len(string)) if text.endswith(string[:n])),
            default=0,
        )
        assert shown == text[: len(text) - held]


@given(text=st.text(alphabet="ab", max_size=20), cuts=st.lists(st.integers(0, 20), max_size=6))
def test_cuts_change_nothing(text, cuts):
    stop = ["abba", "bb", "aaa"]
    ends = sorted({place % (len(text) + 1) for place in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    whole, cut = run([text], stop), run(pieces, stop)
    assert "".join(whole[0]) == "".join(cut[0])
    assert whole[1] == cut[1]


def test_across_tokens():
    shown, stopped_at, checker = run(["The end", " is <", "/an", "swer> never"], ["</answer>"])
    assert shown == ["The end", " is ", "", ""]
    assert stopped_at == len("The end is ")
    assert checker.stop_string == "</answer>"


def test_false_alarm_is_released():
    shown, stopped_at, _ = run(["a\n", "\n", "b", "\n"], ["\n\nUser:"])
    assert shown == ["a", "", "\n\nb", "", "\n"]
    assert stopped_at is None


def test_included_stop_string_comes_in_one_piece():
    shown, stopped_at, _ = run(["a ST", "O", "P b"], ["STOP"], include_stop_str_in_output=True)
    assert shown == ["a ", "", "STOP"]
    assert stopped_at == len("a STOP")


def test_nothing_follows_a_stop():
    checker = StopChecker(["x"])
    assert checker.push("ax b") == ("a", 1)
    assert checker.push("more x") == ("", 1)
    assert checker.flush() == ""


def test_min_tokens_as_in_vllm():
    stop = ["x"]
    assert run(["x", "x", "x"], stop, min_tokens=2)[1] == 2
    assert run(["x", "x"], stop, min_tokens=2)[1] is None
    # It may begin in a token that does not count, as long as a later one completes it.
    assert run(["a x", "y"], ["xy"], min_tokens=1)[1] == 2
    checker = StopChecker(stop, min_tokens=3)
    assert checker.push("xx", 3).stopped_at is None
    assert checker.push("x", 1).stopped_at == 2


def test_no_stop_strings():
    checker = StopChecker()
    assert checker.push("anything") == ("anything", None)
    assert checker.flush() == ""
    assert run(["x"], "x")[1] == 0  # one string alone


@pytest.mark.parametrize("stop", [[""], ["a", ""], [None], [3]])
def test_faulty_stop_strings(stop):
    with pytest.raises(ValueError, match=r"stop: .* is not a non-empty string"):
        StopChecker(stop)


def test_faulty_min_tokens():
    with pytest.raises(ValueError, match="min_tokens: -1 is not 0 or more"):
        StopChecker(["a"], min_tokens=-1)
