"""The engine behind asyncio: nothing holds up the event loop, nobody is forgotten."""

import asyncio
import gc
import threading
import time

import pytest

from pagedjax.engine import (
    AsyncEngine,
    EngineDeadError,
    EngineSavedError,
    InvalidRequestError,
    QueueFullError,
)
from pagedjax.engine.async_engine import _Mailbox
from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import drain, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


@pytest.fixture
def async_engine(engine):
    async_engine = AsyncEngine(engine)
    yield async_engine
    async_engine.shutdown()
    drain(engine)


async def collect(stream):
    return [output async for output in stream]


async def longest_pause(work):
    """Runs `work`; -> (its result, the longest time in seconds that the event loop stood still)."""
    task, worst = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        worst = max(worst, time.monotonic() - before)
    return await task, worst


def test_encoding_does_not_hold_up_the_event_loop(async_engine, monkeypatch):
    engine, threads = async_engine.engine, []
    encode = engine.tokenizer.encode

    def slow(*args, **options):
        threads.append(threading.current_thread().name)
        time.sleep(0.5)
        return encode(*args, **options)

    async def main():
        stream = await async_engine.generate("hello", GREEDY)
        monkeypatch.setattr(engine.tokenizer, "encode", slow)
        both = asyncio.gather(async_engine.generate("slow", GREEDY), collect(stream))
        (slow_stream, outputs), pause = await longest_pause(both)
        return outputs, await collect(slow_stream), pause

    outputs, slow_outputs, pause = asyncio.run(main())
    assert len(outputs) == len(slow_outputs) == 8
    assert pause < 0.4
    assert threads[0].startswith("pagedjax-prepare")


def test_stopping_does_not_hold_up_the_event_loop(async_engine, monkeypatch):
    step, begun = async_engine.engine.step, threading.Event()

    def slow_step():
        begun.set()
        time.sleep(0.6)
        return step()

    monkeypatch.setattr(async_engine.engine, "step", slow_step)

    async def main():
        stream = await async_engine.generate("hello", LONG)
        await asyncio.to_thread(begun.wait, 20)
        _, pause = await longest_pause(async_engine.stop())
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await async_engine.generate("hello", GREEDY)
        return pause

    assert asyncio.run(main()) < 0.4
    async_engine.engine.abort("request-0")


def test_who_leaves_while_it_is_saved_ends_nothing(async_engine, monkeypatch, tmp_path):
    """At its end a server closes connections; the requests behind them must be in the snapshot."""
    engine, saving, go = async_engine.engine, threading.Event(), threading.Event()
    save = engine.save

    def slow_save(*args, **options):
        saving.set()
        go.wait(20)
        return save(*args, **options)

    monkeypatch.setattr(engine, "save", slow_save)

    async def main():
        gone, stays = [await async_engine.generate("hello", LONG) for _ in range(2)]
        future = async_engine.save_and_stop(tmp_path / "state", extra=lambda: {"x": 1})
        await asyncio.to_thread(saving.wait, 20)
        gone.close()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await async_engine.generate("hello", GREEDY)
        go.set()
        with pytest.raises(EngineSavedError):
            await collect(stays)
        await asyncio.wrap_future(future)

    asyncio.run(main())
    other = make_engine()
    requests, extra = other.resume(tmp_path / "state")
    assert [r.request_id for r in requests] == ["request-0", "request-1"]
    assert extra == {"x": 1}
    resumed = AsyncEngine(other)
    assert resumed.new_id() == "request-2"
    for request_id in ("request-0", "request-1"):
        engine.abort(request_id)


def test_saving_fails_when_the_engine_has_failed(async_engine, monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("no device")

    monkeypatch.setattr(async_engine.engine, "settle", broken)
    future = async_engine.save(tmp_path / "state")
    with pytest.raises(RuntimeError, match="no device"):
        future.result(20)
    async_engine._thread.join(20)
    with pytest.raises(EngineDeadError, match="no device"):
        async_engine.save(tmp_path / "state")


def test_an_id_in_use_is_refused_and_free_again_afterwards(async_engine):
    async def main():
        stream = await async_engine.generate("hello", GREEDY, request_id="x")
        with pytest.raises(InvalidRequestError, match="'x' is already in use"):
            await async_engine.generate("hello", GREEDY, request_id="x")
        first = await collect(stream)
        again = await async_engine.generate("hello", GREEDY, request_id="x")
        stream.close()  # late, and of the request that has ended
        stream._open = True  # as if it had been on its way when the request ended
        stream.close()
        return first, await collect(again)

    first, second = asyncio.run(main())
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    assert second[-1].outputs[0].finish_reason == "length"


def test_requests_being_prepared_count_for_the_queue(async_engine, monkeypatch):
    engine, go = async_engine.engine, threading.Event()
    encode = engine.tokenizer.encode
    monkeypatch.setattr(
        engine.tokenizer, "encode", lambda *a, **o: (go.wait(20), encode(*a, **o))[1]
    )

    async def main():
        most = engine.num_free_places()
        waiting = [
            asyncio.ensure_future(async_engine.generate("hello", GREEDY)) for _ in range(most)
        ]
        await asyncio.sleep(0)
        try:
            with pytest.raises(QueueFullError):
                await asyncio.wait_for(async_engine.generate("hello", GREEDY), 2)
        except BaseException:
            go.set()
            raise
        for task in waiting[2:]:
            task.cancel()
        await asyncio.sleep(0)
        go.set()
        streams = await asyncio.gather(*waiting[:2])
        # Those that were given up never reach the engine, and take no place any more.
        assert async_engine._num_preparing == 0
        return [len(await collect(stream)) for stream in streams]

    assert asyncio.run(main()) == [8, 8]


class NotHere:
    """A lock that this thread must not ask for."""

    def __init__(self, lock):
        self._lock, self._thread = lock, threading.get_ident()

    def __enter__(self):
        assert threading.get_ident() != self._thread, "it would wait for itself"
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def test_a_stream_that_is_dropped_aborts_its_request_without_a_lock(async_engine, monkeypatch):
    """The collector may run its finalizer anywhere, even where this thread holds the lock."""
    engine = async_engine.engine

    async def main():
        stream = await async_engine.generate("hello", LONG)
        await anext(stream)
        intake = engine._intake
        monkeypatch.setattr(intake, "_lock", NotHere(intake._lock))
        del stream
        gc.collect()
        monkeypatch.undo()

    asyncio.run(main())
    deadline = time.monotonic() + 20
    while async_engine.engine.has_work():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert async_engine.stats().finished["abort"] >= 1


class SlowDict(dict):
    """Between looking whether something is there and taking it, others get their turn."""

    def __len__(self):
        count = super().__len__()
        time.sleep(0.001)
        return count


def test_failing_everybody_from_several_threads_tells_each_once(async_engine):
    """The engine's thread dies while somebody shuts it down: no race, no one left waiting."""
    errors, barrier = [], threading.Barrier(4)

    def fail():
        try:
            barrier.wait(20)
            async_engine._fail_all("over")
        except BaseException as error:
            errors.append(error)

    async def main():
        loop = asyncio.get_running_loop()
        queues = [asyncio.Queue() for _ in range(50)]
        async_engine._mailboxes = SlowDict(
            {str(i): _Mailbox(loop, queue) for i, queue in enumerate(queues)}
        )
        threads = [threading.Thread(target=fail) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, 20)
        await asyncio.sleep(0)
        return [queue.qsize() for queue in queues]

    sizes = asyncio.run(main())
    assert errors == []
    assert sizes == [1] * 50
