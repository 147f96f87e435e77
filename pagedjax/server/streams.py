"""Reading several requests at once, and noticing that the client has gone."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pagedjax.beam_search import BeamSearchParams
from pagedjax.engine import AsyncEngine
from pagedjax.engine.async_engine import OutputStream
from pagedjax.engine.request import Request
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.server.errors import ApiError, as_api_error


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def submit(
    engine: AsyncEngine,
    make_prompts: Callable[[], Sequence[str | list[int]]],
    count: int,
    params: SamplingParams | BeamSearchParams,
    *,
    request_id: str,
    **options: Any,
) -> list[OutputStream]:
    """Queue all prompts of one HTTP request, or none.

    More outputs than could ever wait at once are refused for good; more than there is room for now
    are not.

    Args:
      make_prompts: gives `count` prompts; called in a thread, so it may take long.
      request_id: of the HTTP request; `engine_ids` are the engine's.
    """
    config = engine.engine.config
    most = config.max_queue_size + config.table_rows
    num_samples = count * params.num_samples
    if num_samples > most:
        what = f"{count} prompts"
        if params.num_samples > 1:
            what += f", and {params.num_samples} outputs are to be generated for each"
        raise ApiError(
            400,
            f"prompt holds {what}; one request may hold at most {most} "
            "(max_queue_size and the rows of the request table)",
            param="prompt" if count > most else "n",
        )

    def prepare() -> list[Request]:
        return [
            engine.engine.prepare(name, prompt, params, **options)
            for name, prompt in zip(engine_ids(request_id, count), make_prompts(), strict=True)
        ]

    return await engine.generate_many(prepare, count=num_samples)


def engine_ids(request_id: str, count: int) -> list[str]:
    """The engine's ids of the prompts of an HTTP request."""
    return [f"{request_id}-{index}" for index in range(count)]


def close(streams: Sequence[OutputStream]) -> None:
    """Abort what still runs."""
    for stream in streams:
        stream.close()


async def merge(streams: Sequence[OutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Deltas of all streams as they come, with the place of their stream.

    Raises `ApiError` when a request fails or is aborted from elsewhere. However it ends, whatever
    still runs is aborted.
    """
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, _checked(delta)
            return
        async for item in _merge_many(streams):
            yield item
    finally:
        close(streams)


async def _merge_many(streams):
    queue: asyncio.Queue = asyncio.Queue()

    async def pump(index: int, stream: OutputStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            index, delta = await queue.get()
            if isinstance(delta, Exception):
                raise delta
            running -= delta.finished
            yield index, _checked(delta)
    finally:
        for task in tasks:
            task.cancel()


def _checked(delta: RequestOutput) -> RequestOutput:
    reasons = {output.finish_reason for output in delta.outputs}
    if "error" in reasons:
        raise ApiError(500, delta.error or "the request failed", code="generation_error")
    if "abort" in reasons:
        raise ApiError(503, "the request was aborted by the server", code="aborted")
    return delta


async def collect(request: Any, streams: Sequence[OutputStream]) -> list[RequestOutput]:
    """The whole output of every stream, in order.

    Raises `ClientGoneError`, with everything aborted, when the client disconnects meanwhile.
    """
    work = asyncio.create_task(_gather(streams))
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        close(streams)


async def _gather(streams: Sequence[OutputStream]) -> list[RequestOutput]:
    results: list[RequestOutput | None] = [None] * len(streams)
    async for index, delta in merge(streams):
        if results[index] is None:
            results[index] = RequestOutput(
                request_id=delta.request_id,
                prompt=delta.prompt,
                prompt_token_ids=delta.prompt_token_ids,
                outputs=[],
            )
        results[index].add(delta)
    return results


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(chunks: AsyncIterator[dict[str, Any]], request_id: str) -> AsyncIterator[Any]:
    """Chunks as server-sent events, an error as the last chunk, then [DONE]."""
    from sse_starlette import ServerSentEvent

    def event(data: str) -> ServerSentEvent:
        return ServerSentEvent(data=data, sep="\n")

    try:
        async for chunk in chunks:
            yield event(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
    except Exception as error:
        # The status has been sent; OpenAI's client raises when a chunk holds an error.
        yield event(json.dumps(as_api_error(error, request_id).body()))
    yield event("[DONE]")


def finite(logprob: float) -> float:
    """A log-probability as JSON can say it: minus infinity is -9999, as OpenAI has it."""
    return max(logprob, -9999.0)


class Usage:
    """Token counts of one HTTP request."""

    def __init__(self) -> None:
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._output = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Count a delta, or a whole output, of the prompt at this place."""
        self._prompt[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens or 0
        self._output += sum(len(completion.token_ids) for completion in output.outputs)

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(self._prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._output,
            "total_tokens": prompt + self._output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
