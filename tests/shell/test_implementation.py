"""A model's `attention` names the implementation of all that is done to the KV pool."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.step import step
from pagedjax.engine.build import scheduler_config
from pagedjax.engine.device import Device
from pallas_kernels import dispatch
from pallas_kernels.block_copy import api as blocks
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.paged_attention import api as attention
from tests.shell.tiny import MODEL, SETTINGS, params

TABLES = {
    "paged_attention": attention._IMPLEMENTATIONS,
    "write_kv": kv_write._IMPLEMENTATIONS,
    "copy_blocks": blocks._COPY,
    "gather_blocks": blocks._GATHER,
    "scatter_blocks": blocks._SCATTER,
}


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_one_choice_for_steps_and_snapshots(name, monkeypatch):
    """Even where the platform's choice would be the kernels."""
    called = set()
    for operation, table in TABLES.items():
        for implementation, function in table.items():

            def spy(*args, entry=(operation, implementation), function=function, **options):
                called.add(entry)
                return function(*args, **options)

            monkeypatch.setitem(table, implementation, spy)
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda: True)
    sizes = scheduler_config(EngineConfig(**SETTINGS), platform="cpu")
    config = StepConfig(scheduler=sizes, model=replace(MODEL, attention=name))
    device = Device(params(), config, kv_dtype=jnp.float32, buckets=())
    jax.eval_shape(
        functools.partial(step, config=config, num_tokens=4), device.params, device.state
    )
    ids = np.arange(3, dtype=np.int32)
    device.restore(device.state.scheduler, [(ids, *device.gather(ids))])
    assert called == {(operation, name) for operation in TABLES}
