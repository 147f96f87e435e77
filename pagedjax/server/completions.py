"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pagedjax.engine import AsyncEngine
from pagedjax.engine.async_engine import OutputStream
from pagedjax.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from pagedjax.server.protocol import CompletionRequest
from pagedjax.server.results import Result, Results, opening
from pagedjax.server.streams import Usage, collect, finite, merge, submit


class CompletionHandler:
    """One request to complete one or more prompts.

    Args:
      results: where the answer is kept, too.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        body: CompletionRequest,
        model: str,
        results: Results | None = None,
    ) -> None:
        body.check()
        self._engine = engine
        self._body = body
        self._tokenizer = engine.engine.tokenizer
        self._head = {
            "id": f"cmpl-{body.request_id or uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._results = results
        self._offsets: dict[int, int] = {}
        self._prompts = body.prompts()
        self._params = body.to_params()
        self.streams: list[OutputStream] = []

    @property
    def id(self) -> str:
        """OpenAI's id of the answer."""
        return self._head["id"]

    async def start(self) -> None:
        """Queue its prompts."""
        count = len(self._prompts)
        created = self._head["created"]
        with opening(self._results, "text_completion", self.id, created, self._body, count):
            self.streams = await submit(
                self._engine, lambda: self._prompts, count, self._params, request_id=self.id
            )

    @classmethod
    def of_result(cls, engine: AsyncEngine, result: Result, result_id: str, model: str):
        """A handler that can `render` what was kept."""
        handler = cls(engine, CompletionRequest(**result.options, prompt=""), model)
        handler._head |= {"id": result_id, "created": result.created}
        return handler

    async def answer(self, request: Any) -> dict[str, Any]:
        """The whole answer."""
        return self.render(await collect(request, self.streams))

    def render(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that the engine's outputs amount to."""
        usage, choices = Usage(), []
        for place, output in enumerate(outputs):
            usage.add(place, output)
            for completion in output.outputs:
                choices.append(self._choice(place, output, completion, first=True))
        return {**self._head, "choices": choices, "usage": usage.body()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece."""
        usage, started = Usage(), set()
        extra = {"usage": None} if self._body.include_usage else {}
        async for place, delta in merge(self.streams):
            usage.add(place, delta)
            for completion in delta.outputs:
                first = (place, completion.index) not in started
                started.add((place, completion.index))
                if _is_news(completion) or (first and self._body.echo):
                    choice = self._choice(place, delta, completion, first=first)
                    yield {**self._head, "choices": [choice], **extra}
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body()}

    def _choice(
        self, place: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> dict[str, Any]:
        """One choice; they are numbered through, the first prompt's before the second's."""
        index = place * self._params.n + completion.index
        text = completion.text
        if self._body.echo and first:
            prompt = output.prompt
            if prompt is None:
                prompt = self._tokenizer.decode(output.prompt_token_ids)
            text = prompt + text
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self._logprobs(index, completion.token_ids, completion.logprobs)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        tokens = [places[i].decoded_token for i, places in zip(token_ids, logprobs, strict=True)]
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        most = self._body.logprobs
        return {
            "tokens": tokens,
            "token_logprobs": [
                finite(places[i].logprob) for i, places in zip(token_ids, logprobs, strict=True)
            ],
            "top_logprobs": [_top(places) if most else None for places in logprobs],
            "text_offset": offsets,
        }


def _top(places: TokenLogprobs) -> dict[str, float]:
    """By text, as OpenAI has it; of tokens with equal text the likeliest counts."""
    top: dict[str, float] = {}
    for entry in sorted(places.values(), key=lambda entry: -entry.logprob):
        top.setdefault(entry.decoded_token, finite(entry.logprob))
    return top


def _is_news(completion: CompletionOutput) -> bool:
    return bool(completion.text or completion.logprobs or completion.finish_reason)
