"""The HTTP server, over a real socket, with OpenAI's own client."""

import asyncio
import contextlib
import json
import re
import threading
import time

import httpx
import openai
import pytest
import uvicorn

from pagedjax.engine import AsyncEngine
from pagedjax.sampling_params import SamplingParams
from pagedjax.server.app import create_app
from tests.shell.tiny import ASSISTANT, make_engine, params, run

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def serving(engine, **options):
    """The address of a server around an engine, in a thread of its own."""
    async_engine = AsyncEngine(engine)
    app = create_app(async_engine, **options)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", async_engine
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(warm_engine):
    with serving(warm_engine) as (url, async_engine):
        yield url, async_engine


@pytest.fixture
def url(server):
    """Address of the server; after the test everything must have been given back."""
    yield server[0]
    wait_until_idle(server[1].engine)


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_until_idle(engine, seconds=20):
    deadline = time.monotonic() + seconds
    while engine.has_work():
        assert time.monotonic() < deadline, "the engine still holds rows"
        time.sleep(0.01)
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def expected():
    """What a prompt gives when nobody else is there (an engine of its own)."""
    engine, known = make_engine(), {}

    def answer(prompt, max_tokens):
        key = (tuple(prompt), max_tokens)
        if key not in known:
            sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
            known[key] = run(engine, [("x", prompt, sampling)])["x"].outputs[0]
        return known[key]

    return answer


def test_models(client, url):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4o")
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html")
    assert "tiny" in page.text


def test_completion(client, expected):
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=8, **GREEDY)
    (choice,) = answer.choices
    assert choice.text == expected(b"hello", 8).text
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == 13
    again = client.completions.create(model="tiny", prompt="hello", max_tokens=8, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == 4


def test_completion_of_several_prompts(client, expected):
    prompts = ["hello", "abc", "some longer prompt"]
    for given in (prompts, [list(p.encode()) for p in prompts]):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=6, **GREEDY)
        texts = [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]
        assert texts == [expected(p.encode(), 6).text for p in prompts]
        assert answer.usage.completion_tokens == 18
    pieces = {0: "", 1: "", 2: ""}
    stream = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=6, stream=True, echo=True, **GREEDY
    )
    reasons = {}
    for chunk in stream:
        (choice,) = chunk.choices
        pieces[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert list(pieces.values()) == [p + t for p, t in zip(prompts, texts, strict=True)]
    assert reasons == dict.fromkeys(range(3), "length")


def test_default_of_max_tokens(client):
    answer = client.completions.create(model="tiny", prompt="hello", **GREEDY)
    assert answer.usage.completion_tokens == 16
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], **GREEDY
    )
    assert chat.usage.total_tokens == 96  # the rest of max_model_len


def test_chat_streaming_and_not(client, expected):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ids = make_engine().encode("<user>hi<eos><assistant>")
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, **GREEDY
    )
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected(ids, 9).text
    assert whole.usage.prompt_tokens == len(ids)

    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content


def test_stop_string_in_a_stream(client, expected):
    text = expected(b"hello", 20).text
    stop = text[7:10]
    at = text.index(stop)
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=20, stop=[stop], stream=True, **GREEDY
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:at]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(client, expected):
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=4, logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == expected(b"hello", 4).text
    assert logprobs.text_offset == [0, 1, 2, 3]
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())
        assert len(top) == 2
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    data = bytes(b for entry in content for b in entry.bytes)
    assert data.decode("utf-8", "replace") == chat.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    streamed = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        **GREEDY,
    )
    got = [e for c in streamed for e in (c.choices[0].logprobs or _NONE).content]
    assert [e.logprob for e in got] == [e.logprob for e in content]


class _NONE:
    content = ()


def test_seed(client):
    ask = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 1.0}
    one = client.completions.create(**ask, seed=3).choices[0].text
    assert client.completions.create(**ask, seed=3).choices[0].text == one
    assert client.completions.create(**ask, seed=4).choices[0].text != one


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"model": "gpt-4o"}, 404, "model", "does not exist"),
        ({"n": 9}, 400, "n", "at most 8 (num_rows)"),
        ({"n": 0}, 400, "n", "integer in [1"),
        ({"logit_bias": {"5": 1.0}}, 400, "logit_bias", "not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 6}, 400, "logprobs", "at most 5"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, 400, "max_tokens", "differ"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens", "max_tokens"),
        ({"max_tokens": 5000}, 400, "max_tokens", "max_model_len"),
        ({"temperature": -1}, 400, "temperature", "temperature"),
        ({"top_p": 0}, 400, "top_p", "top_p"),
        ({"no_such_field": 1}, 400, "no_such_field", "unknown"),
        ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options", "stream_options.x"),
        ({"stop": ["a"] * 65}, 400, "stop", "at most 64"),
        ({"stop": ["a", 1]}, 400, "stop", "stop"),
        ({"messages": "hi"}, 400, "messages", "list of objects"),
        ({"messages": ["hi"]}, 400, "messages", "list of objects"),
        ({"messages": [{"content": "hi"}]}, 400, "messages", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "prompt", "surrogate"),
        ({"\ud800": 1}, 400, "\\ud800", "unknown"),
        ({"model": "m" * 5000}, 404, "model", "characters"),
        ({"temperature": 1e308 * 10}, 400, "temperature", "temperature"),
        ({"seed": 2**64}, 400, "seed", "seed"),
        ({"max_tokens": 10**40}, 400, "max_tokens", "max_tokens"),
        ({"top_k": 2**31}, 400, "top_k", "top_k"),
        ({"priority": 1}, 400, "priority", "scheduling_policy fcfs"),
        ({"use_beam_search": True, "priority": 1}, 400, "priority", "use_beam_search"),
        ({"cache_salt": ""}, 400, "cache_salt", "non-empty string"),
        ({"use_beam_search": True, "cache_salt": ""}, 400, "cache_salt", "non-empty string"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, 400, "prompt", "at most 95"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "text",
        ),
    ],
)
def test_errors_have_openais_shape(url, change, status, param, words):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | change
    for stream in (False, True):
        if stream and "stream_options" in change:
            continue
        content = json.dumps(body | {"stream": stream})  # with what JSON has no words for
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert words in error["message"]


def test_bodies_that_are_no_request(url):
    for content, words in (
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"", "object"),
        (b"[" * 100_000, "nested"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "digits"),
    ):
        answer = httpx.post(
            f"{url}/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    plain = httpx.post(f"{url}/v1/completions", content=b'{"prompt": "a"}')
    assert plain.status_code == 400
    assert "Content-Type: application/json" in plain.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    assert "error" in httpx.get(f"{url}/v1/completions").json()


@pytest.fixture(scope="module")
def small_bodies(warm_engine, server):
    """A server that takes small bodies only, around the same engine."""
    with serving(warm_engine, max_body_bytes=1000) as (url, _):
        yield url


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_are_too_large(small_bodies, chunked):
    def post(size):
        body = json.dumps({"prompt": "hello", "max_tokens": 2, "user": ""}).encode()
        body = body[:-2] + b"x" * (size - len(body)) + body[-2:]
        pieces = (body[i : i + 300] for i in range(0, size, 300))
        headers = {"content-type": "application/json"}
        return httpx.post(
            f"{small_bodies}/v1/completions", content=pieces if chunked else body, headers=headers
        )

    assert post(1000).status_code == 200
    for size in (1001, 2_000_000):
        answer = post(size)
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert error["code"] == "body_too_large"
        assert error["type"] == "invalid_request_error"
        assert "at most 1000 (max_body_bytes)" in error["message"]
    assert httpx.get(f"{small_bodies}/health").status_code == 200


@pytest.mark.parametrize(
    "prompt", [[1] * 10**6 + ["x"], [1.5] * 10**6, [[1]] * 10**5 + [None], [["x"]] * 10**5]
)
def test_a_million_mistakes_are_one_error(url, prompt):
    """Without delay: each mistake would be looked for, and told, several times over."""
    began = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert len(answer.text) < 500
    assert time.monotonic() - began < 5


def test_prompts_and_templates_are_made_outside_the_event_loop(url, server, monkeypatch):
    """A slow one of either kind holds nobody up: another request comes and goes meanwhile."""
    from pagedjax import tokenizers

    engine, done = server[1].engine, []

    def slow(function):
        def call(*args, **options):
            if "slow" in str(args):
                time.sleep(1)
            return function(*args, **options)

        return call

    monkeypatch.setattr(tokenizers, "apply_chat_template", slow(tokenizers.apply_chat_template))
    monkeypatch.setattr(engine.tokenizer, "encode", slow(engine.tokenizer.encode))

    async def ask(client, path, body):
        answer = await client.post(f"{url}/v1/{path}", json=body | {"max_tokens": 2})
        assert answer.status_code == 200
        done.append(path)

    async def main():
        async with httpx.AsyncClient(timeout=60) as client:
            messages = [{"role": "user", "content": "slow"}]
            jobs = [
                asyncio.create_task(ask(client, "chat/completions", {"messages": messages})),
                asyncio.create_task(ask(client, "completions", {"prompt": "slow"})),
            ]
            await asyncio.sleep(0.2)
            began = time.monotonic()
            assert (await client.get(f"{url}/health")).status_code == 200
            await client.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 2})
            assert time.monotonic() - began < 0.7
            assert done == []
            await asyncio.gather(*jobs)

    asyncio.run(main())


def test_logprobs_of_minus_infinity_are_json():
    from pagedjax.server.streams import finite

    assert json.loads(json.dumps(finite(float("-inf")))) == -9999.0
    assert finite(-1.5) == -1.5


def test_thirty_two_at_once_some_of_whom_leave(url, expected):
    """Every one that stays gets what it would get alone; blocks of the others come back."""
    prompts = [f"prompt number {i} " + "xyz" * (i % 5) for i in range(32)]

    async def ask(client, i):
        stream = await client.completions.create(
            model="tiny", prompt=prompts[i], max_tokens=30, stream=True, **GREEDY
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if i % 4 == 1 and len(text) > 3:
                await stream.close()  # closes the connection
                return None
        return text

    async def ask_whole(client, i):
        call = client.completions.create(model="tiny", prompt=prompts[i], max_tokens=30, **GREEDY)
        if i % 8 == 6:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.05)
            return None
        return (await call).choices[0].text

    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            jobs = [(ask_whole if i % 2 == 0 else ask)(client, i) for i in range(32)]
            return await asyncio.gather(*jobs)

    texts = asyncio.run(main())
    assert sum(text is None for text in texts) == 12
    for prompt, text in zip(prompts, texts, strict=True):
        if text is not None:
            assert text == expected(prompt.encode(), 30).text


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_aborts_the_request(server, url, monkeypatch, stream):
    """The connection closes in the middle: the request does not run to its end."""
    engine = server[1].engine
    step = engine.step

    def slow_step():
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    before = engine.stats()
    body = {"prompt": ["abc", "def"], "max_tokens": 90, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
    wait_until_idle(engine)
    after = engine.stats()
    assert after.finished["abort"] - before.finished.get("abort", 0) == 2
    assert after.output_tokens - before.output_tokens < 2 * 80


def test_queue_full_is_429():
    engine = make_engine(max_queue_size=0)
    with serving(engine) as (url, async_engine):
        body = {"prompt": ["hello"] * 8, "max_tokens": 80, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()
            next(lines)
            one = body | {"prompt": "hello", "stream": False}
            refused = httpx.post(f"{url}/v1/completions", json=one, timeout=60)
            assert refused.status_code == 429
            assert "max_queue_size" in refused.json()["error"]["message"]
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"]
        wait_until_idle(engine)
        ok = httpx.post(f"{url}/v1/completions", json={"prompt": "hello"}, timeout=60)
        assert ok.status_code == 200
        assert async_engine.stats().refused == 1


def test_nan_logits_are_an_error_of_one_request():
    trunk = dict(params()["trunk"])
    table = trunk["embed_tokens"]["weight"].at[ASSISTANT].set(float("nan"))
    trunk["embed_tokens"] = {"weight": table}
    with serving(make_engine({**params(), "trunk": trunk})) as (url, _):
        messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        whole = httpx.post(f"{url}/v1/chat/completions", json=messages, timeout=60)
        assert whole.status_code == 500
        assert "NaN" in whole.json()["error"]["message"]
        text = httpx.post(f"{url}/v1/chat/completions", json=messages | {"stream": True}).text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert "NaN" in json.loads(events[-2])["error"]["message"]
        assert events[-1] == "[DONE]"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_engine_crash_reaches_everybody(monkeypatch):
    """A step that raises: waiting requests get an error, /health says 503, nothing hangs."""
    engine = make_engine()
    with serving(engine) as (url, async_engine):
        body = {"prompt": "hello", "max_tokens": 80, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)

            def broken(_size):
                raise RuntimeError("the device is on fire")

            monkeypatch.setattr(engine._device, "launch", broken)
            rest = [line for line in lines if line]
        assert "on fire" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert not async_engine.is_healthy
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "on fire" in health.json()["reason"]
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert "on fire" in refused.json()["error"]["message"]


def test_metrics(url):
    """Prometheus' text format: help and type of every family, cumulative histogram buckets."""
    httpx.post(f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 3, "ignore_eos": True})
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    samples = {}
    for line in lines:
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
            family = name if name in types else re.sub(r"_(bucket|sum|count)$", "", name)
            assert family in types, line
            samples[name, labels] = float(value)
    tiny = 'model="tiny"'
    assert samples["pagedjax_output_tokens_total", tiny] >= 3
    assert samples["pagedjax_requests_finished_total", f'{tiny},reason="length"'] >= 1
    name = "pagedjax_time_to_first_token_seconds"
    assert types[name] == "histogram"
    buckets = [v for (n, _), v in samples.items() if n == f"{name}_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == samples[f"{name}_count", tiny] >= 1
