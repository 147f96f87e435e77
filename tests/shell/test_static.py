"""Static batches behind the engine: as large as they can be, same tokens, no compilation."""

import pytest

from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import drain, make_engine

STATIC = {"batching": "static", "enable_prefix_caching": False, "num_blocks": 96}


@pytest.fixture(scope="module")
def static():
    """Warmed up; every test leaves it idle."""
    engine = make_engine(**STATIC)
    engine.warm_up()
    return engine


def submit(engine):
    """Six prompts of 30 tokens; a step reads 16, and there are four places."""
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), f"{i}" * 30, params)


def serve(engine):
    """Step until idle; -> (id -> tokens, id -> number of the first and the last step in which it
    ran)."""
    tokens, spans = {}, {}
    while engine.has_work():
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)
        step = engine.stats().steps
        for request_id, state in engine.request_states().items():
            if state.status == "running":
                spans[request_id] = (spans.get(request_id, (step,))[0], step)
    return tokens, spans


def test_a_batch_is_filled_over_many_steps(static, engine):
    compiled, before = static.num_compiled(), static.stats().steps
    submit(static)
    tokens, spans = serve(static)
    ends = [spans[str(i)][1] for i in range(4)]
    # The first one still runs when the fourth joins, and the fifth waits for all of them.
    assert spans["3"][0] <= spans["0"][1]
    assert spans["4"][0] > max(ends)
    # Four prompts of 30 are read in steps of 16, then come 13 more tokens.
    assert max(ends) - before <= 4 * 30 // 16 + 1 + 13 + 2
    assert static.num_compiled() == compiled

    submit(engine)  # continuous batching
    assert serve(engine)[0] == tokens


def test_a_batch_that_is_being_filled_is_resumed_as_it_was(tmp_path, static):
    submit(static)
    for _ in range(4):
        static.step()
    static.save(tmp_path / "state")
    twin = make_engine(**STATIC)
    twin.load(tmp_path / "state")
    before = static.stats().steps
    rest, twins = (
        [(d.request_id, d.outputs[0].token_ids) for d in drain(e)] for e in (static, twin)
    )
    assert rest == twins
    assert static.stats().steps - before == twin.stats().steps


@pytest.mark.slow
def test_who_is_preempted_comes_back_to_its_batch(engine):
    """Four rows come to need 4 x 11 blocks of 4 tokens, and there are 36."""
    tight = make_engine(**STATIC | {"num_blocks": 36})
    submit(tight)
    tokens, spans = serve(tight)
    assert tight.stats().preemptions > 0
    assert spans["4"][0] > max(spans[str(i)][1] for i in range(4))
    submit(engine)
    assert serve(engine)[0] == tokens
