"""A server that is stopped, or killed, and started again: nobody's answer is lost or changed."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from pagedjax import BeamSearchParams
from pagedjax.engine import AsyncEngine, InvalidRequestError, SnapshotError
from pagedjax.outputs import CompletionOutput, Logprob, RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.server.app import create_app
from pagedjax.server.results import Result, Results
from pagedjax.server.run import _end_requests_at_exit
from pagedjax.server.snapshots import ServerSnapshots
from tests.shell.tiny import make_engine, run

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import sys, time
from pathlib import Path
from pagedjax.server.run import address, bind, serve
from pagedjax.server.snapshots import ServerSnapshots
from tests.shell.tiny import make_engine
engine, step = make_engine(), None
snapshots = ServerSnapshots(Path(sys.argv[1]), log=lambda line: print(line, flush=True))
count = snapshots.resume(engine)
step = engine.step
def slow_step():
    time.sleep(float(sys.argv[2]))
    return step()
engine.step = slow_step
sock = bind("127.0.0.1", 0)
print(address(sock), count, flush=True)
serve(engine, sock, log=print, snapshots=snapshots)
"""
HTTP = httpx.Client(timeout=60)
PROMPTS = ["hello", "a shared beginning, 1", "a shared beginning, 2", "x" * 20, "abc", "yes"]
OPTIONS = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    HTTP.close()


@pytest.fixture(scope="module")
def expected():
    sampling = SamplingParams(**OPTIONS)
    outputs = run(make_engine(), [(str(i), p, sampling) for i, p in enumerate(PROMPTS)])
    return {int(i): output.outputs[0] for i, output in outputs.items()}


@contextlib.contextmanager
def serving(folder, engine=None, step_s=0.0, interval_s=None):
    """(address, engine, snapshots) of a server in a thread."""
    engine = make_engine() if engine is None else engine
    snapshots = ServerSnapshots(folder, interval_s=interval_s)
    snapshots.resume(engine)
    step = engine.step
    engine.step = lambda: time.sleep(step_s) or step()
    async_engine = AsyncEngine(engine, on_outputs=snapshots.record)
    app = create_app(async_engine, snapshots=snapshots)

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            at_exit = _end_requests_at_exit(self, async_engine, snapshots)
            self.tasks = [
                asyncio.create_task(at_exit),
                asyncio.create_task(snapshots.save_at_intervals()),
            ]

    server = Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", engine, snapshots
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        snapshots.close()
        engine.step = step


def post(url, index, **more):
    body = {"prompt": PROMPTS[index], "request_id": f"job-{index}", **OPTIONS, **more}
    return HTTP.post(f"{url}/v1/completions", json=body)


def wait_for_result(url, result_id, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        answer = HTTP.get(f"{url}/results/{result_id}").json()
        if answer.get("status") != "in_progress":
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check(answer, completion, *, status="completed"):
    assert answer["status"] == status
    (choice,) = answer["choices"]
    assert choice["text"] == completion.text
    assert choice["finish_reason"] == completion.finish_reason
    assert answer["usage"]["completion_tokens"] == len(completion.token_ids)
    logprobs = [places[i].logprob for i, places in
                zip(completion.token_ids, completion.logprobs, strict=True)]  # fmt: skip
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)


class Process:
    """A server of its own, to be killed."""

    def __init__(self, folder, step_s):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(step_s)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        line = self.process.stdout.readline().split()
        assert line, self.process.stderr.read()
        self.url, self.resumed = line
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                HTTP.get(f"{self.url}/health")
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_killed_and_stopped_and_resumed(tmp_path, expected):
    """kill -9 after a snapshot, then SIGTERM in the middle, then on to the end: as if nothing."""
    first = Process(tmp_path, 0.05)
    pool = ThreadPoolExecutor(len(PROMPTS))
    try:
        waiting = [pool.submit(post, first.url, i) for i in range(len(PROMPTS))]
        while HTTP.get(f"{first.url}/results/job-5").status_code == 404:
            partial = HTTP.get(f"{first.url}/results/cmpl-job-0").json()
            if partial.get("usage", {}).get("completion_tokens", 0) >= 5:
                break
            time.sleep(0.02)
        saved = HTTP.post(f"{first.url}/snapshot").json()
        assert saved["requests"] == len(PROMPTS)
        tokens = HTTP.get(f"{first.url}/results/cmpl-job-0").json()["usage"]["completion_tokens"]
        while tokens < 25:  # it goes on after the snapshot
            time.sleep(0.02)
            answer = HTTP.get(f"{first.url}/results/cmpl-job-0").json()
            tokens = answer["usage"]["completion_tokens"]
    finally:
        first.kill()
    for one in waiting:
        assert isinstance(one.exception(30), httpx.TransportError)

    second = Process(tmp_path, 0.05)
    try:
        assert second.resumed == str(len(PROMPTS))
        again = post(second.url, 0)
        assert again.status_code == 400
        assert again.json()["error"]["code"] == "request_id_in_use"
        new = pool.submit(post, second.url, 0, request_id="new", max_tokens=70)
        while HTTP.get(f"{second.url}/results/cmpl-new").status_code == 404:
            time.sleep(0.01)
        time.sleep(0.3)
        second.process.send_signal(signal.SIGTERM)
        answer = new.result(30)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "saved"
        assert "GET /results/cmpl-new" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        out, err = second.process.communicate(timeout=30)
        assert second.process.returncode == 0
        assert "Traceback" not in err
        assert "requests in progress" in out
    finally:
        second.kill()

    third = Process(tmp_path, 0.0)
    try:
        for i in range(len(PROMPTS)):
            check(wait_for_result(third.url, f"cmpl-job-{i}"), expected[i])
        assert len(wait_for_result(third.url, "cmpl-new")["choices"][0]["text"]) > 0
    finally:
        third.kill()


def test_stopped_and_resumed(tmp_path, expected):
    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        with serving(tmp_path, step_s=0.03) as (url, engine, _):
            waiting = [pool.submit(post, url, i) for i in range(len(PROMPTS))]
            stream = pool.submit(
                lambda: [
                    line.removeprefix("data: ")
                    for line in HTTP.post(
                        f"{url}/v1/chat/completions",
                        json={"messages": [{"role": "user", "content": "hi"}], "stream": True,
                              "temperature": 0, "ignore_eos": True, "max_tokens": 70,
                              "request_id": "talk"}
                    ).text.split("\n") if line
                ]
            )  # fmt: skip
            deadline = time.monotonic() + 60
            ids = ["chatcmpl-talk-0", *(f"cmpl-job-{i}-0" for i in range(len(PROMPTS)))]
            while not all(map(engine.is_in_use, ids)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        for one in waiting:
            assert one.result().json()["error"]["code"] == "saved"
        *_, error, done = stream.result()
        assert done == "[DONE]"
        assert "GET /results/chatcmpl-talk" in json.loads(error)["error"]["message"]
    with serving(tmp_path) as (url, engine, _):
        for i in range(len(PROMPTS)):
            check(wait_for_result(url, f"cmpl-job-{i}"), expected[i])
        talk = wait_for_result(url, "chatcmpl-talk")
        assert talk["object"] == "chat.completion"
        whole = run(make_engine(), [("x", engine.encode("<user>hi<eos><assistant>"),
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=70))])["x"]  # fmt: skip
        assert talk["choices"][0]["message"]["content"] == whole.outputs[0].text
        assert HTTP.delete(f"{url}/results/chatcmpl-talk").json()["deleted"]
        gone = HTTP.get(f"{url}/results/chatcmpl-talk")
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "result_not_found"
        # New requests beside resumed ones; OpenAI's client gets at the id.
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(
                model="tiny", prompt="hello", max_tokens=4, temperature=0,
                extra_body={"request_id": "mine"},
            )  # fmt: skip
            assert answer.id == "cmpl-mine"
        kept = HTTP.get(f"{url}/results/cmpl-mine").json()
        assert kept["choices"][0]["text"] == answer.choices[0].text
    with serving(tmp_path) as (url, *_):  # finished answers come along
        assert HTTP.get(f"{url}/results/cmpl-mine").json() == kept


def test_several_outputs_and_searches_go_on(tmp_path):
    """Stopped in the middle of three requests that are more than one row each."""
    sampled = {"max_tokens": 30, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    asked = {
        "several": {**sampled, "n": 3},
        "best": {**sampled, "n": 1, "best_of": 3, "logprobs": 1},
        "search": {"max_tokens": 30, "n": 2, "use_beam_search": True, "ignore_eos": True},
    }
    search = BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True)
    params = [SamplingParams(**asked["several"]), SamplingParams(**asked["best"]), search]
    alone = [(name, name, one) for name, one in zip(asked, params, strict=True)]
    whole = run(make_engine(), alone)
    with ThreadPoolExecutor(len(asked)) as pool:
        with serving(tmp_path, step_s=0.05) as (url, engine, snapshots):
            waiting = [
                pool.submit(
                    HTTP.post,
                    f"{url}/v1/completions",
                    json={"prompt": name, "request_id": name, **body},
                )
                for name, body in asked.items()
            ]
            deadline = time.monotonic() + 60
            while not all(engine.is_in_use(f"cmpl-{name}-0") for name in asked):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            some = snapshots.results.get
            while some("cmpl-several") is None or None in some("cmpl-several").outputs.values():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            partial = HTTP.get(f"{url}/results/cmpl-several").json()
            assert partial["status"] == "in_progress"
            assert HTTP.get(f"{url}/results/cmpl-best").json()["choices"][0]["text"] == ""
            assert HTTP.get(f"{url}/results/cmpl-search").json()["status"] == "in_progress"
        for one in waiting:
            assert one.result().json()["error"]["code"] == "saved"
    with serving(tmp_path) as (url, *_):
        for name in asked:
            answer = wait_for_result(url, f"cmpl-{name}")
            assert answer["status"] == "completed"
            assert [c["text"] for c in answer["choices"]] == [o.text for o in whole[name].outputs]
            assert [c["index"] for c in answer["choices"]] == list(range(len(answer["choices"])))
            assert len(answer["choices"]) == asked[name]["n"]


def test_a_running_request_is_seen_and_ended(tmp_path):
    with ThreadPoolExecutor(1) as pool, serving(tmp_path, step_s=0.02) as (url, engine, _):
        waiting = pool.submit(post, url, 0)
        while True:
            answer = HTTP.get(f"{url}/results/cmpl-job-0").json()
            if answer.get("usage", {}).get("completion_tokens", 0) > 3:
                break
            time.sleep(0.02)
        assert answer["status"] == "in_progress"
        assert answer["choices"][0]["finish_reason"] is None
        assert HTTP.delete(f"{url}/results/cmpl-job-0").status_code == 200
        assert waiting.result().status_code == 503
        deadline = time.monotonic() + 20
        while engine.has_work():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_failing_snapshot_is_said_and_the_old_one_stays(tmp_path, monkeypatch):
    with serving(tmp_path) as (url, _, snapshots):
        assert HTTP.post(f"{url}/snapshot").json()["object"] == "snapshot"
        before = snapshots.path.read_bytes()

        def full(_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            answer = HTTP.post(f"{url}/snapshot")
            assert answer.status_code == 500
            assert "No space left" in answer.json()["error"]["message"]
        assert snapshots.path.read_bytes() == before
        assert post(url, 0).status_code == 200  # the engine goes on
        assert HTTP.post(f"{url}/snapshot").status_code == 200


def test_saved_at_intervals_while_there_is_something_new(tmp_path):
    with serving(tmp_path, interval_s=0.1) as (url, _, snapshots):
        assert post(url, 0).status_code == 200
        deadline = time.monotonic() + 30
        while not snapshots.path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        before = None
        while before != (before := snapshots.path.stat().st_mtime_ns):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert post(url, 1).status_code == 200
        while snapshots.path.stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_without_a_folder_there_are_no_such_paths(engine):
    app = create_app(AsyncEngine(engine))
    assert not {"/snapshot", "/results/{result_id}"} & {getattr(r, "path", "") for r in app.routes}


def test_a_damaged_snapshot_is_left_alone(tmp_path):
    snapshots = ServerSnapshots(tmp_path)
    with pytest.raises(OSError, match="in use by another server"):
        ServerSnapshots(tmp_path)
    make_engine().save(snapshots.path)
    data = snapshots.path.read_bytes()
    snapshots.path.write_bytes(data[:-9])
    for use in (snapshots.check, lambda: snapshots.resume(make_engine())):
        with pytest.raises(SnapshotError, match="truncated or damaged"):
            use()
    assert snapshots.path.read_bytes() == data[:-9]
    snapshots.close()
    (tmp_path / ".engine.state.123.part").write_bytes(b"half")
    ServerSnapshots(tmp_path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.state", "lock"]


def test_the_server_does_not_start_on_a_damaged_snapshot(tmp_path, monkeypatch, capsys):
    import serve_local

    (tmp_path / "engine.state").write_bytes(b"what is this?")
    argv = ["serve_local.py", "--port", "0", "--snapshot-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert serve_local.main() == 1
    err = capsys.readouterr().err
    assert "is not a PagedJAX snapshot" in err
    assert "move it away to start without it" in err
    assert (tmp_path / "engine.state").read_bytes() == b"what is this?"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--snapshot-interval-s", "5"], "snapshot_interval_s needs snapshot_dir"),
        (["--snapshot-dir", "x", "--snapshot-interval-s", "0"], "must be from 0.1 to"),
    ],
)
def test_bad_options(monkeypatch, capsys, argv, words):
    import serve_local

    monkeypatch.setattr(sys, "argv", ["serve_local.py", *argv])
    with pytest.raises(SystemExit) as stopped:
        serve_local.main()
    assert stopped.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def output(request_id, text, reason=None, logprobs=None):
    return RequestOutput(
        request_id=request_id, prompt="p", prompt_token_ids=[1],
        outputs=[CompletionOutput(text=text, token_ids=[7], finish_reason=reason,
                                  logprobs=logprobs)],
        finished=reason is not None,
    )  # fmt: skip


def test_results_are_kept_for_a_while_and_not_too_many():
    now = [0.0]
    results = Results(max_count=2, keep_s=10, clock=lambda: now[0])
    for i in range(4):
        with results.opening(f"r{i}", Result("text_completion", 1, {}), [f"r{i}-0"]):
            pass
        now[0] += 1
    for i in range(3):
        results.record([output(f"r{i}-0", "a"), output(f"r{i}-0", "b", "length")])
        now[0] += 1
    results.record([output("r3-0", "x", logprobs=[{7: Logprob(-0.5, 1, "x")}])])
    assert results.get("r0") is None  # two finished ones are kept; those that run do not count
    assert results.get("r1").whole()[0].outputs[0].text == "ab"
    assert results.num_unfinished() == 1
    with pytest.raises(InvalidRequestError, match="r1"), results.opening("r1", None, []):
        pass

    other = Results(max_count=2, keep_s=10, clock=lambda: now[0] + 100)
    saved = json.loads(json.dumps(results.saved()))
    other.restore(saved, ["r3-0"])
    assert other.saved() == results.saved()
    assert other.get("r3") == results.get("r3")
    other.record([output("r3-0", "y", "stop")])
    assert other.get("r3").whole()[0].outputs[0].text == "xy"
    now[0] += 9
    assert other.get("r1") is None
    assert other.get("r3") is not None
    # One whose request was not taken in is not waited for.
    fresh = Results()
    fresh.restore(saved, [])
    assert fresh.get("r3") is None
    assert fresh.get("r1") is not None


def test_an_aborted_or_refused_request_leaves_nothing():
    results = Results()
    with results.opening("a", Result("text_completion", 1, {}), ["a-0", "a-1"]):
        pass
    results.record([output("a-0", "x"), output("a-1", "", "abort"), output("a-0", "y")])
    assert results.get("a") is None
    with pytest.raises(KeyError), results.opening("b", Result("text_completion", 1, {}), ["b-0"]):
        raise KeyError
    assert results.get("b") is None
    assert results.num_unfinished() == 0
