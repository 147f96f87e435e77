"""Limits of a simulation that are out of range: an error where they are known, data where not."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.policies import newest, one_of
from pagedjax.simulate import Refusal, make_limits, make_trace, measure, simulate
from pagedjax.simulate.trace import checked
from tests.core.test_simulate import QUICK, at, make_config

ONE = make_config(num_steps=12, num_blocks=14, use_cond=False)
SEVERAL = dataclasses.replace(
    ONE, scheduling_policies=("fcfs", "priority"), preemption_policies=(newest, "most_tokens")
)
TRACE = make_trace([0, 0, 3], [4, 5, 6], [3, 3, 3], priority=[2, 1, 0])


def test_policies_are_chosen_by_name_by_function_or_by_number():
    limits = make_limits(SEVERAL, num_blocks=9, scheduling_policy="priority", preemption_policy=1)
    assert [int(x) for x in jax.tree.leaves(limits)] == [9, 8, 1, 1]
    limits = make_limits(SEVERAL, scheduling_policy=np.int64(0), preemption_policy=newest)
    assert (int(limits.scheduling_policy), int(limits.preemption_policy)) == (0, 0)
    assert int(make_limits(ONE.scheduler, num_rows=3).num_rows) == 3


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (SEVERAL, {"scheduling_policy": 2}, r"scheduling_policy must be from 0 to 1, .*\(got 2\)"),
        (SEVERAL, {"preemption_policy": -1}, r"preemption_policy must be from 0 to 1, .*got -1"),
        (SEVERAL, {"scheduling_policy": 0.0}, r"scheduling_policy must be from 0 to 1"),
        (SEVERAL, {"scheduling_policy": True}, r"scheduling_policy must be from 0 to 1"),
        (
            SEVERAL,
            {"scheduling_policy": "longest_prefix"},
            r"scheduling_policy must be one of config.scheduling_policies: fcfs, priority \(got",
        ),
        (
            SEVERAL,
            {"preemption_policy": "newest"},
            r"preemption_policy must be one of config.preemption_policies: newest, most_tokens",
        ),
        (ONE, {"scheduling_policy": 0}, r"no SimulationConfig.scheduling_policies .*\(got 0\)"),
        (ONE, {"preemption_policy": "newest"}, r"no SimulationConfig.preemption_policies are"),
        (ONE.scheduler, {"scheduling_policy": 0}, r"scheduling_policy must be left out"),
        (SEVERAL, {"num_blocks": 15}, r"num_blocks must be from 1 to 14, .*\(got 15\)"),
        (ONE, {"num_rows": 0}, r"num_rows must be from 1 to 8, .*\(got 0\)"),
        (ONE, {"num_blocks": 2.5}, r"num_blocks must be from 1 to 14, .*\(got 2.5\)"),
        (ONE, {"num_blocks": True}, r"num_blocks must be from 1 to 14, .*\(got True\)"),
        (ONE, {"num_rows": "3"}, r"num_rows must be from 1 to 8, .*\(got 3\)"),
        (ONE, {"num_blocks": np.int32([3, 4])}, r"num_blocks must be from 1 to 14"),
        (SEVERAL, {"scheduling_policy": np.int32([0, 1])}, r"scheduling_policy must be from 0 to"),
    ],
)
def test_numbers_out_of_range_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        make_limits(config, **options)


def test_a_number_of_no_policy_is_refused_where_it_is_known():
    one_of(("fcfs", "priority"), 1)
    for which in (2, -1):
        with pytest.raises(ValueError, match=f"which must be from 0 to 1, got {which}"):
            one_of(("fcfs", "priority"), which)


def test_types_that_are_no_integers_are_refused():
    limits = dataclasses.replace(make_limits(ONE), num_blocks=jnp.float32(3.5))
    with pytest.raises(ValueError, match=r"num_blocks of the limits must be of an integer type"):
        simulate(TRACE, limits, config=ONE)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (
            SEVERAL,
            [
                {"scheduling_policy": 2},
                {"preemption_policy": 2},
                {"scheduling_policy": -1},
                {"num_blocks": 15},
                {"num_blocks": 0},
                {"num_rows": 9},
            ],
        ),
        pytest.param(
            ONE, [{"scheduling_policy": 1}, {"preemption_policy": -1}], marks=pytest.mark.slow
        ),
    ],
)
def test_limits_out_of_range_are_data_inside_jit(config, changes):
    """Every request is refused and says why; beside it in the same batch, others are served."""
    limits = [
        make_limits(config),
        *[dataclasses.replace(make_limits(config), **c) for c in changes],
    ]
    limits = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *limits)
    run = jax.jit(jax.vmap(partial(simulate, config=config), (None, 0)), **QUICK)
    results = run(TRACE, limits)
    assert at(results, 0).requests.refused.tolist() == [Refusal.NONE] * 3
    assert (at(results, 0).requests.finish_step > 0).all()
    metrics = jax.vmap(measure, (None, 0, 0))(TRACE, limits, results)
    assert metrics.num_finished.tolist() == [3] + [0] * len(changes)
    for i, change in enumerate(changes, 1):
        requests, steps = at(results, i).requests, at(results, i).steps
        assert (requests.refused == Refusal.INVALID_LIMITS).all(), change
        assert (requests.admission_step == -1).all()
        assert not steps.num_scheduled_tokens.any()
        assert np.isnan(at(metrics, i).preemption_rate)


def test_a_policy_where_there_are_none_to_choose_among_is_out_of_range():
    run = jax.jit(partial(checked, ONE))
    assert run(make_limits(ONE))[0]
    for change in ({"scheduling_policy": 1}, {"preemption_policy": -1}):
        valid, instead = run(dataclasses.replace(make_limits(ONE), **change))
        assert not valid, change
        assert [int(x) for x in jax.tree.leaves(instead)] == [14, 8, 0, 0]


def test_the_example_of_the_documentation(capsys):
    text = (Path(__file__).parents[2] / "docs/simulation.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", text, re.S).groups()
    exec(compile(code, "docs/simulation.md", "exec"), {})
    assert capsys.readouterr().out == printed
