"""A session of the tiny model to be recorded: mixed traffic, aborts, a pool that is too small."""

import random

from pagedjax.eventlog.format import LogWriter, pack, read_records, unpack
from pagedjax.replay import read_log
from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import make_engine

SHARED = "a beginning that some prompts share, "
KINDS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3},
    {"temperature": 0.8, "stop_token_ids": [101, 116, 32, 97], "min_tokens": 2},
    {"temperature": 0, "logprobs": 2},
]


def record(path, *, num_steps=500, seed=0, engine=None, on_step=lambda engine: None, **settings):
    """Run at least so many steps; -> the engine, which wrote its log to `path`."""
    if engine is None:
        engine = make_engine(event_log=str(path), **settings)
    rng = random.Random(seed)
    live, count, idle = {}, 0, 0
    while engine.stats().steps < num_steps:
        if len(live) < 9 and idle == 0 and rng.random() < 0.2:
            kind = rng.choice(KINDS) | {"max_tokens": rng.randint(1, 40), "ignore_eos": True}
            prompt = (SHARED if rng.random() < 0.5 else "") + "xyz"[: rng.randint(0, 3)] * 5 + "."
            live[str(count)] = engine.add_request(str(count), prompt, SamplingParams(**kind))
            count += 1
        if live and rng.random() < 0.02:
            engine.abort(rng.choice(list(live)))
        idle = max(idle - 1, 0) if rng.random() > 0.01 else 60  # now and then all come to an end
        for delta in engine.step():
            if delta.finished:
                live.pop(delta.request_id, None)
        on_step(engine)
    return engine


def rewritten(path, out, change):
    """A log whose records are changed, with right checksums of their own."""
    writer = LogWriter(out)
    for number, (_, kind, payload) in enumerate(list(read_records(path))):
        arrays, values = unpack(payload)
        arrays = dict(arrays)
        if change(number, kind, arrays, values) is not False:
            writer.append(kind, pack(arrays, **values))
    writer.close()
    return read_log(out)
