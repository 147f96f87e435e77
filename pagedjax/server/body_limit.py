"""A limit on the size of request bodies, before anything reads them into memory."""

from typing import Any

MAX_BODY_BYTES = 4 << 20
"""The default. Several times the longest prompt of the usual models."""


class BodyLimit:
    """ASGI middleware: reading a body of more than `max_bytes` ends in HTTP 413.

    Where the Content-Length says so, nothing of it is read; otherwise it is counted as it comes.
    """

    def __init__(self, app: Any, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        num_bytes = 0

        async def limited() -> Any:
            nonlocal num_bytes
            if declared.isdigit():
                self._check(int(declared))
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, limited, send)

    def _check(self, num_bytes: int) -> None:
        from starlette.exceptions import HTTPException

        # FastAPI makes a plain 400 of any other exception that comes while it reads.
        if num_bytes > self._max_bytes:
            raise HTTPException(
                413,
                f"the body is too large: {num_bytes} bytes or more, and this server takes at most "
                f"{self._max_bytes} (max_body_bytes)",
            )
