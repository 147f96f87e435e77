"""What a request may say: OpenAI's fields, and vLLM's for what OpenAI cannot express.

Every field of OpenAI's is known by name. One that this server does not implement is accepted only
with the value that means "off", since OpenAI clients send those; any other value, and any unknown
field, is refused.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pagedjax.beam_search import BeamSearchParams
from pagedjax.sampling_params import SamplingParams
from pagedjax.server.errors import UNKNOWN_FIELD, ApiError

# Values of fields that are not implemented, but mean what happens anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "metadata": ({},),
}


# What says how to choose one token at a time, with the values that choose nothing.
_NOT_IN_A_SEARCH: dict[str, tuple[Any, ...]] = {
    "best_of": (),
    "logprobs": (False,),
    "top_logprobs": (),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "skip_special_tokens": (True,),
}


# The first mistake is told, so the others need not be looked for: pydantic would collect each of a
# million in a long list, and hold up the event loop for seconds.


def _items(kind: type, name: str) -> BeforeValidator:
    """Refuse a list in which something is not exactly of this type."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and not set(map(type, value)) <= {kind}:
            raise PydanticCustomError("item_type", f"every item must be {name}")
        return value

    return BeforeValidator(check)


Texts = Annotated[list[str], _items(str, "text")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Integers = Annotated[list[int], _items(int, "an integer")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    shown = name.encode("utf-8", "backslashreplace").decode("utf-8")
                    raise PydanticCustomError(
                        UNKNOWN_FIELD, "unknown field {field}", {"field": shown}
                    )
        return data


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Request(_Strict):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | Texts | None = None
    seed: int | None = None
    # names of the caller's own; they change nothing
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Integers | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: RequestId | None = None
    priority: int | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # OpenAI's that are not implemented
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise `ApiError` for a field that asks for something this server does not do."""
        for name, harmless in _HARMLESS.items():
            value = getattr(self, name, None)
            if value is not None and value not in harmless:
                raise ApiError(
                    400, f"{name} is not supported by this server", param=name, code="unsupported"
                )
        if self.use_beam_search:
            self._check_search()
        elif self.length_penalty not in (None, 1):
            raise ApiError(
                400, "length_penalty needs use_beam_search: true", param="length_penalty"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

    def _check_search(self) -> None:
        for name, harmless in _NOT_IN_A_SEARCH.items():
            value = getattr(self, name, None)
            if value is not None and value not in harmless:
                raise ApiError(400, f"{name} cannot be used with use_beam_search", param=name)

    def search_params(self, max_tokens: int | None) -> BeamSearchParams:
        """Parameters of a beam search, as wide as the outputs that are asked for."""
        given = self._given(
            "ignore_eos temperature length_penalty include_stop_str_in_output cache_salt"
        )
        width = 1 if self.n is None else self.n
        try:
            return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **given)
        except ValueError as error:
            raise _refused(error, (*given, "max_tokens"), default="n") from error

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Sampling parameters; what is left out keeps OpenAI's default, which is ours."""
        given = self._given(
            "n temperature top_p seed stop top_k min_p min_tokens ignore_eos stop_token_ids "
            "skip_special_tokens include_stop_str_in_output priority cache_salt"
        )
        try:
            return SamplingParams(**given, **more)
        except (ValueError, TypeError) as error:
            raise _refused(error, (*given, *more)) from error

    def _given(self, names: str) -> dict[str, Any]:
        """Of the fields named, those that are there."""
        values = {name: getattr(self, name) for name in names.split()}
        return {name: value for name, value in values.items() if value is not None}


def _refused(error: Exception, names: Iterable[str], default: str | None = None) -> ApiError:
    """What parameters' own check says, as an error of the field that its message begins with."""
    fields = [name for name in names if str(error).startswith(name)]
    return ApiError(400, str(error), param=max(fields, key=len, default=default))


def _check_prompt(value: Any, _validate: Any) -> Any:
    """The types of a prompt. A union would try every element of a long list as every member."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {str} or kinds <= {int}:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise PydanticCustomError(
        "prompt_type", "must be text, a list of texts, token ids or a list of lists of token ids"
    )


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_check_prompt)]


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """See `_Request.check`."""
        super().check()
        n = 1 if self.n is None else self.n
        if self.stream and self.best_of is not None and self.best_of != n:
            raise ApiError(
                400,
                f"best_of must be {n} (n) when streaming, got {self.best_of}: which outputs are "
                "the best is known at the end",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400,
                "echo together with logprobs is not supported: no logprobs of the prompt",
                param="echo",
                code="unsupported",
            )

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt must have at least one entry", param="prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def to_params(self) -> SamplingParams | BeamSearchParams:
        """Sampling parameters; 16 tokens by default, as OpenAI does."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if self.use_beam_search:
            return self.search_params(max_tokens)
        return self.sampling_params(
            max_tokens=max_tokens, logprobs=self.logprobs, best_of=self.best_of
        )


class Message(BaseModel):
    """One message; other keys than these reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


def _check_messages(value: Any, _validate: Any) -> list[dict[str, Any]]:
    """Only that they are objects: the rest is the chat template's business, in a thread."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise PydanticCustomError("messages_type", "must be a list of objects")
    if not value:
        raise PydanticCustomError("too_short", "must have at least 1 message")
    return value


Messages = Annotated[list[Message], WrapValidator(_check_messages)]


class ChatCompletionRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Any] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    def check(self) -> None:
        """See `_Request.check`."""
        super().check()
        both = None not in (self.max_tokens, self.max_completion_tokens)
        if both and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400,
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) differ; give one",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as the chat template takes them."""
        return self.messages

    def to_params(self) -> SamplingParams | BeamSearchParams:
        """Sampling parameters; by default as many tokens as fit, as OpenAI does."""
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        if self.use_beam_search:
            return self.search_params(max_tokens)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs)
