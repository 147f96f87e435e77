"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from pagedjax.engine.errors import (
    EngineDeadError,
    EngineSavedError,
    InvalidRequestError,
    QueueFullError,
)

MAX_MESSAGE = 1000
"""Characters of a message."""

UNKNOWN_FIELD = "unknown_field"
"""Type of the validation error for a field that no model has."""

_PARSING = {
    "There was an error parsing the body": "the body is not JSON that can be read: it must be "
    "UTF-8, not nested too deeply, and without numbers of thousands of digits"
}
"""FastAPI's words -> ours."""

_TYPES = {404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object that clients expect."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {
            "message": _plain(str(self)),
            "type": kind,
            "param": None if self.param is None else _plain(self.param),
            "code": self.code,
        }
        return {"error": error}


def _plain(text: str) -> str:
    """Text that may quote the request: not all of a huge value, and nothing UTF-8 cannot say."""
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}... ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_api_error(error: Exception, request_id: str = "") -> ApiError:
    """The answer that an exception amounts to; `request_id` is that of OpenAI's answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineSavedError):
        message = (
            "the server is shutting down; this request was saved, and goes on when the server is "
            f"started again: GET /results/{request_id} returns what comes of it"
        )
        return ApiError(503, message, code="saved")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, f"internal error: {type(error).__name__}: {error}", code="internal_error")


def install(app: Any) -> None:
    """Let every error of a FastAPI app, its own ones too, have OpenAI's shape."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    def answer(error: ApiError) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        if error.code == "saved":  # to send it again would be to have it computed twice
            headers = {"x-should-retry": "false"}
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    async def on_api_error(_request: Any, error: Exception) -> JSONResponse:
        return answer(as_api_error(error))

    async def on_validation(_request: Any, error: RequestValidationError) -> JSONResponse:
        return answer(_validation_error(error.errors()))

    async def on_http(request: Any, error: HTTPException) -> JSONResponse:
        message = _PARSING.get(str(error.detail), str(error.detail))
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        code = "body_too_large" if error.status_code == 413 else None
        return answer(ApiError(error.status_code, message, code=code))

    for kind in (ApiError, InvalidRequestError, QueueFullError, EngineDeadError, Exception):
        app.add_exception_handler(kind, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


def _validation_error(errors: list[dict[str, Any]]) -> ApiError:
    first = errors[0]
    if first["type"] == UNKNOWN_FIELD:
        place = [*first["loc"][1:], first["ctx"]["field"]]  # without "body"
        message = f"unknown field {'.'.join(map(str, place))!r}"
        return ApiError(400, message, param=str(place[0]), code="unknown_field")
    # ("body", "messages", 0, "role"); a union adds the names of its members, which say nothing.
    place = [part for part in first["loc"] if part != "body"]
    field = str(place[0]) if place and first["type"] != "json_invalid" else None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    if field is None:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message)
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    return ApiError(400, f"{path}: {first['msg']}", param=field)
