"""The HTTP application."""

import contextlib
import dataclasses
import html
import time
from typing import Any

from pagedjax.engine import AsyncEngine, EngineSavedError
from pagedjax.server import errors
from pagedjax.server.body_limit import MAX_BODY_BYTES, BodyLimit
from pagedjax.server.chat import ChatHandler
from pagedjax.server.completions import CompletionHandler
from pagedjax.server.errors import ApiError
from pagedjax.server.metrics import render_metrics
from pagedjax.server.protocol import ChatCompletionRequest, CompletionRequest
from pagedjax.server.results import KEEP_S, MAX_RESULTS
from pagedjax.server.snapshots import ServerSnapshots
from pagedjax.server.streams import ClientGoneError, close, events

CLIENT_GONE = 499
"""nginx's status for a client that went away; nobody reads it but the access log."""


def create_app(
    engine: AsyncEngine,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    snapshots: ServerSnapshots | None = None,
) -> Any:
    """A FastAPI app in front of an engine. The app starts the engine's thread and stops it.

    Args:
      max_body_bytes: a request with a larger body is refused (HTTP 413).
      snapshots: of this very engine; its end is to save it, then.
    """
    import fastapi
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

    @contextlib.asynccontextmanager
    async def lifespan(_app: Any):
        engine.start()
        yield
        await (engine.stop() if snapshots is None else snapshots.save_and_stop())

    results = None if snapshots is None else snapshots.results
    app = fastapi.FastAPI(title="PagedJAX", lifespan=lifespan)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    name, started = engine.engine.model_name, int(time.time())
    model_card = {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "pagedjax",
        "max_model_len": engine.engine.max_model_len,
    }

    def check_model(given: str | None) -> None:
        if given is not None and given != name:
            raise ApiError(
                404,
                f"the model {given!r} does not exist; this server has {name!r}",
                param="model",
                code="model_not_found",
            )

    async def respond(request: fastapi.Request, handler: Any, stream: bool) -> Any:
        await handler.start()
        if stream:
            return _event_stream(handler)
        try:
            return JSONResponse(await handler.answer(request))
        except EngineSavedError as error:
            raise errors.as_api_error(error, handler.id) from error
        except ClientGoneError:
            return PlainTextResponse("", status_code=CLIENT_GONE)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card]}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        check_model(model_id)
        return model_card

    @app.post("/v1/completions")
    async def completions(request: fastapi.Request, body: CompletionRequest) -> Any:
        check_model(body.model)
        handler = CompletionHandler(engine, body, name, results)
        return await respond(request, handler, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: fastapi.Request, body: ChatCompletionRequest) -> Any:
        check_model(body.model)
        handler = ChatHandler(engine, body, name, results)
        return await respond(request, handler, bool(body.stream))

    @app.get("/health")
    async def health() -> Any:
        if engine.is_healthy:
            return {"status": "ok"}
        reason = "shutting down" if engine.error is None else str(engine.error)
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    @app.get("/metrics")
    async def metrics() -> Any:
        text = render_metrics(engine.stats(), name)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def index(request: fastapi.Request) -> Any:
        return HTMLResponse(_page(name, engine.engine.max_model_len, str(request.base_url)))

    if snapshots is not None:
        snapshots.start(engine)
        _add_snapshot_routes(app, engine, snapshots, name)
    return app


def _add_snapshot_routes(
    app: Any, engine: AsyncEngine, snapshots: ServerSnapshots, model: str
) -> None:
    """What a server has that saves its state: docs/replay.md describes it."""

    @app.post("/snapshot")
    async def save_snapshot() -> dict[str, Any]:
        try:
            saved = await snapshots.save()
        except OSError as error:
            raise ApiError(500, f"no snapshot could be saved: {error}", code="io_error") from error
        return {"object": "snapshot", **dataclasses.asdict(saved)}

    @app.get("/results/{result_id}")
    async def get_result(result_id: str) -> dict[str, Any]:
        result = snapshots.results.get(result_id)
        if result is None:
            raise _no_result(result_id)
        kind = ChatHandler if result.kind == "chat.completion" else CompletionHandler
        answer = kind.of_result(engine, result, result_id, model).render(result.whole())
        status, error = "in_progress", result.error()
        if result.finished_s is not None:
            status = "completed" if error is None else "failed"
        return {**answer, "status": status, "error": error}

    @app.delete("/results/{result_id}")
    async def delete_result(result_id: str) -> dict[str, Any]:
        if snapshots.results.get(result_id) is None:
            raise _no_result(result_id)
        for request_id in snapshots.results.drop(result_id):
            engine.abort(request_id)
        return {"id": result_id, "object": "result.deleted", "deleted": True}


def _no_result(result_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no result {result_id!r}: it never was, it was deleted, its client left while it "
        f"ran, or it is one that is no longer kept ({MAX_RESULTS} finished ones are, for "
        f"{KEEP_S:.0f} seconds)",
        code="result_not_found",
    )


def _event_stream(handler: Any) -> Any:
    from sse_starlette import EventSourceResponse

    async def body():
        try:
            async for event in events(handler.chunks(), handler.id):
                yield event
        finally:
            close(handler.streams)

    # At shutdown the engine ends every request by itself; the grace lets the last chunks out.
    return EventSourceResponse(body(), sep="\n", shutdown_grace_period=5)


def _page(model: str, max_model_len: int, address: str) -> str:
    model, address = html.escape(model), html.escape(address.rstrip("/"))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>PagedJAX: {model}</title>
<body style="font:16px/1.5 sans-serif;max-width:44em;margin:3em auto;padding:0 1em">
<h1>PagedJAX serves {model}</h1>
<p>Up to {max_model_len} tokens a request, prompt and output together.
The interface is OpenAI's: point a client at <code>{address}/v1</code>.</p>
<pre style="background:#f4f4f4;padding:1em;overflow:auto">curl {address}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'</pre>
<ul><li><a href="/v1/models">/v1/models</a></li><li>/v1/completions</li>
<li>/v1/chat/completions</li><li><a href="/health">/health</a></li>
<li><a href="/metrics">/metrics</a></li><li><a href="/docs">/docs</a></li></ul>
</body></html>
"""
