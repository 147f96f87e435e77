"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from pagedjax.engine import AsyncEngine
from pagedjax.engine.async_engine import OutputStream
from pagedjax.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from pagedjax.server.errors import ApiError
from pagedjax.server.protocol import ChatCompletionRequest
from pagedjax.server.results import Result, Results, opening
from pagedjax.server.streams import Usage, collect, finite, merge, submit


class ChatHandler:
    """One request to answer a conversation.

    Args:
      results: where the answer is kept, too.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        body: ChatCompletionRequest,
        model: str,
        results: Results | None = None,
    ) -> None:
        body.check()
        self._engine = engine
        self._body = body
        self._tokenizer = engine.engine.tokenizer
        self._model = model
        self.id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._results = results
        self._params = body.to_params()
        self.streams: list[OutputStream] = []

    async def start(self) -> None:
        """Queue it."""
        with opening(self._results, "chat.completion", self.id, self._created, self._body, 1):
            self.streams = await submit(
                self._engine,
                lambda: [self._prompt()],
                1,
                self._params,
                request_id=self.id,
                add_special_tokens=False,
            )

    @classmethod
    def of_result(cls, engine: AsyncEngine, result: Result, result_id: str, model: str):
        """A handler that can `render` what was kept."""
        body = ChatCompletionRequest(**result.options, messages=[{"role": "user"}])
        handler = cls(engine, body, model)
        handler.id, handler._created = result_id, result.created
        return handler

    def _prompt(self) -> str:
        from pagedjax.tokenizers import apply_chat_template

        try:
            return apply_chat_template(self._tokenizer, self._body.template_messages())
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error

    async def answer(self, request: Any) -> dict[str, Any]:
        """The whole answer."""
        return self.render(await collect(request, self.streams))

    def render(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that the engine's output amounts to."""
        (output,) = outputs
        usage = Usage()
        usage.add(0, output)
        choices = [
            {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ]
        return self._envelope("chat.completion", choices, usage.body())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece: the role, the text, the reason why it ended."""
        for index in range(self._params.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        usage = Usage()
        async for place, delta in merge(self.streams):
            usage.add(place, delta)
            for completion in delta.outputs:
                for chunk in self._news(completion):
                    yield chunk
        if self._body.include_usage:
            yield self._envelope("chat.completion.chunk", [], usage.body())

    def _news(self, completion: CompletionOutput) -> Iterator[dict[str, Any]]:
        """What is new of one choice: text, then the reason why it ended."""
        if completion.text or completion.logprobs:
            logprobs = self._logprobs(completion.token_ids, completion.logprobs)
            yield self._chunk(completion.index, {"content": completion.text}, logprobs=logprobs)
        if completion.finish_reason:
            yield self._chunk(
                completion.index,
                {},
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason:
            choice["stop_reason"] = stop_reason
        chunk = self._envelope("chat.completion.chunk", [choice], None)
        if not self._body.include_usage:
            del chunk["usage"]
        return chunk

    def _envelope(self, kind: str, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        most = self._body.top_logprobs or 0
        content = []
        for chosen, places in zip(token_ids, logprobs, strict=True):
            ranked = sorted(places.items(), key=lambda item: -item[1].logprob)[:most]
            content.append(
                {
                    **self._entry(chosen, places[chosen]),
                    "top_logprobs": [self._entry(i, entry) for i, entry in ranked],
                }
            )
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        data = self._tokenizer.vocabulary.token_bytes[token_id]
        return {
            "token": entry.decoded_token,
            "logprob": finite(entry.logprob),
            "bytes": list(data),
        }
