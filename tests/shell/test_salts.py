"""`cache_salt`: who shares the prefix cache with whom."""

import pytest

from pagedjax.beam_search import BeamSearchParams
from pagedjax.engine.salts import Salts
from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import make_engine, run

PROMPT = "what this tenant asks again and again"


def found(engine, salt, **options):
    """Prompt tokens found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=2, cache_salt=salt, **options)
    return run(engine, [("a", PROMPT, params)])["a"].num_cached_tokens


def test_only_equal_salts_share(engine):
    most = len(PROMPT) - 1
    for salt in (None, "red", "blue"):
        assert found(engine, salt) == 0
        assert found(engine, salt) >= most - 4
    assert found(engine, "red", n=2) >= most - 4
    assert found(engine, "red " + "r" * 4000, n=2) == 0


def test_output_is_the_same_under_any_salt(engine):
    params = [SamplingParams(temperature=0, max_tokens=8, cache_salt=s) for s in (None, "x", "y")]
    got = run(engine, [(str(i), PROMPT, one) for i, one in enumerate(params)])
    assert len({tuple(output.outputs[0].token_ids) for output in got.values()}) == 1


def test_snapshots_know_it(tmp_path):
    first = make_engine()
    for salt in ("red", "blue"):
        assert found(first, salt) == 0
    params = SamplingParams(temperature=0, max_tokens=6, cache_salt="red")
    first.add_request("going on", PROMPT[:-1], params)
    first.step()
    first.save(tmp_path / "state")
    second = make_engine()
    (request,) = second.load(tmp_path / "state")
    assert request.salt == 1
    while second.has_work():
        second.step()
    assert found(second, "green") == 0  # a number that nobody has had
    assert found(second, "blue") > 0
    assert found(second, "red") > 0
    assert found(second, None) == 0


def test_numbers():
    salts = Salts(most=2)
    assert salts.number(None) == 0
    assert [salts.number(x) for x in ("a", "b", "a", "b")] == [1, 2, 1, 2]
    assert salts.number("c") == 3  # "a" was longest unused
    assert salts.number("b") == 2
    assert salts.number("a") == 4  # never a number that another text has had
    other = Salts(most=2)
    other.restore(**salts.saved())
    assert [other.number(x) for x in ("b", "a", "d")] == [2, 4, 5]
    assert salts.number("\ud800") == 5


@pytest.mark.parametrize("salt", ["", 5, b"x"])
def test_what_is_no_salt_is_refused(salt):
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string or None"):
        SamplingParams(cache_salt=salt)
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string or None"):
        BeamSearchParams(beam_width=2, max_tokens=2, cache_salt=salt)
