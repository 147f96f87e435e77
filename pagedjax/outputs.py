"""What a request gives back, in the shape that vLLM's users know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one place.

    Attributes:
      logprob: natural logarithm, of the model's own distribution (before temperature and filters).
      rank: 1 for the most likely token, and so on; None when it is not among the ones looked at.
      decoded_token: the token's text, "�" where it is not whole characters.
    """

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""The chosen token and the most likely ones at one place, by token id, the chosen one first."""


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: which of the prompt's completions it is, from 0.
      text: without the end-of-sequence token and, unless asked for, without the stop string.
      token_ids: every token, the one that ended the request included.
      cumulative_logprob: sum over the tokens; None unless logprobs were asked for.
      logprobs: one entry a token; None unless asked for.
      finish_reason: "stop", "length", "abort" or "error"; None while it runs.
      stop_reason: the stop string or the id (of `stop_token_ids`) that ended it; None otherwise,
        also when it was the model's own end-of-sequence token.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """A request and what came of it. `Engine.step` and `AsyncEngine.generate` give deltas: only
    what is new since the last one; `LLM.generate` gives the whole.

    Attributes:
      prompt: text of the prompt, None if it was given as token ids.
      outputs: by index. A delta has those of which there is something new.
      finished: nothing more will come of any output.
      num_cached_tokens: prompt tokens that were found in the prefix cache; None until the request
        has started.
      error: what went wrong, when `finish_reason` is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int | None = None
    error: str | None = None

    def add(self, delta: "RequestOutput") -> None:
        """Append a later delta of the same request to this one."""
        by_index = {mine.index: mine for mine in self.outputs}
        for new in delta.outputs:
            mine = by_index.get(new.index)
            if mine is None:
                mine = CompletionOutput(index=new.index)
                self.outputs.append(mine)
                self.outputs.sort(key=lambda output: output.index)
            mine.text += new.text
            mine.token_ids += new.token_ids
            if new.logprobs is not None:
                mine.logprobs = (mine.logprobs or []) + new.logprobs
            mine.cumulative_logprob = new.cumulative_logprob
            mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
        self.finished, self.error = delta.finished, delta.error or self.error
        self.num_cached_tokens = delta.num_cached_tokens


def describe_output(output: RequestOutput) -> dict[str, Any]:
    """The output as JSON can say it."""
    fields = dict(vars(output))
    fields["outputs"] = [dict(vars(completion)) for completion in output.outputs]
    for completion in fields["outputs"]:
        if completion["logprobs"] is not None:
            completion["logprobs"] = [
                [(i, e.logprob, e.rank, e.decoded_token) for i, e in places.items()]
                for places in completion["logprobs"]
            ]
    return fields


def restore_output(fields: Mapping[str, Any]) -> RequestOutput:
    """The inverse of `describe_output`."""
    completions = []
    for described in fields["outputs"]:
        logprobs = described["logprobs"]
        if logprobs is not None:
            logprobs = [{i: Logprob(*entry) for i, *entry in places} for places in logprobs]
        completions.append(CompletionOutput(**(described | {"logprobs": logprobs})))
    return RequestOutput(**(dict(fields) | {"outputs": completions}))
