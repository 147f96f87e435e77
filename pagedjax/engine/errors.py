"""Why a request is refused, or an engine does not answer."""


class InvalidRequestError(ValueError):
    """A request that can never be served. The message names the field, its value and the limit.

    Attributes:
      param: the field at fault.
      code: a short machine-readable reason, or None.
    """

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(RuntimeError):
    """More requests wait than `max_queue_size` allows; try again later."""


class EngineDeadError(RuntimeError):
    """The engine has failed, or was shut down, and takes no more requests."""


class EngineSavedError(EngineDeadError):
    """The engine was shut down, and this request is in the snapshot that it left."""
