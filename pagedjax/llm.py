"""`LLM`: a model in one object, for scripts and notebooks."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagedjax.config import EngineConfig, load_config
from pagedjax.engine import Engine, build_engine
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """Generates text in batches; the interface is vLLM's.

        llm = LLM("smollm2-135m", max_num_seqs=8)
        outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
        print(outputs[0].outputs[0].text)

    Args:
      model: a preset's name, a Hugging Face directory or a GGUF file.
      config: a TOML file of settings, or an `EngineConfig`.
      use_tqdm: show progress while loading.
      engine: use this one instead of building one.
      settings: fields of `EngineConfig`; they override the file.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        config: str | Path | EngineConfig | None = None,
        use_tqdm: bool = True,
        engine: Engine | None = None,
        **settings: Any,
    ) -> None:
        if engine is None:
            if isinstance(config, EngineConfig):
                if settings:
                    raise ValueError(
                        f"settings beside an EngineConfig: {', '.join(settings)}; put them into it"
                    )
                engine_config = config
            else:
                engine_config = load_config(config, settings)
            engine = build_engine(model, engine_config, progress=use_tqdm)
        elif config is not None or settings:
            raise ValueError("config and settings cannot be given beside an engine")
        self.engine = engine
        self._num_requests = 0

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; -> one `RequestOutput` for each, in their order.

        Args:
          prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of
            these (a list of integers is one prompt).
          sampling_params: one for all prompts, or one for each.
          priority: one for each prompt, in place of the parameters' own; lower is more urgent.

        Raises:
          ValueError: a prompt can never be served; nothing is generated then.
        """
        requests = [_parse(prompt) for prompt in _as_list(prompts)]
        if priority is not None:
            sampling_params = _with_priority(sampling_params, priority, len(requests))
        return self._run(requests, sampling_params, use_tqdm, add_special_tokens=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of {"role": ..., "content": ...}; -> as `generate`."""
        from pagedjax.tokenizers import apply_chat_template

        if not messages:
            raise ValueError("messages must hold at least one message")
        many = not isinstance(messages[0], Mapping)
        prompts = [
            apply_chat_template(
                self.engine.tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
            )
            for conversation in (messages if many else [messages])
        ]
        return self._run(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The most likely completions of prompts; -> one `BeamSearchOutput` for each, in their
        order.

        Args:
          prompts: as for `generate`.
          params: one for all prompts, or one for each.

        Raises:
          ValueError: a prompt can never be served; nothing is generated then.
          RuntimeError: the engine could not finish a search.
        """
        parsed = [_parse(prompt) for prompt in _as_list(prompts)]
        results = self._run(parsed, params, use_tqdm, add_special_tokens=True)
        return [self._sequences(result) for result in results]

    def _sequences(self, result: RequestOutput) -> BeamSearchOutput:
        if result.error is not None:
            raise RuntimeError(result.error)
        decode = self.engine.tokenizer.decode
        sequences = []
        for output in result.outputs:
            tokens = [*result.prompt_token_ids, *output.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    cum_logprob=output.cumulative_logprob,
                    text=decode(tokens),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        return BeamSearchOutput(sequences=sequences)

    def _run(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | BeamSearchParams | Sequence[Any] | None,
        use_tqdm: bool,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        params = _as_params(sampling_params, len(prompts))
        engine = self.engine
        if engine.has_work():
            raise RuntimeError("another generate is running on this engine")
        token_ids = [engine.encode(p, add_special_tokens=add_special_tokens) for p in prompts]
        for i, (ids, one) in enumerate(zip(token_ids, params, strict=True)):
            try:
                engine.check(ids, one)
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from error
        first = self._num_requests
        self._num_requests += len(prompts)
        waiting = [
            (str(first + i), prompt, ids, one)
            for i, (prompt, ids, one) in enumerate(zip(prompts, token_ids, params, strict=True))
        ]
        bar = _Progress(len(prompts), use_tqdm)
        try:
            results = self._drive(waiting, bar)
        except BaseException:
            self._abandon([request_id for request_id, *_ in waiting])
            raise
        finally:
            bar.close()
        return [results[str(first + i)] for i in range(len(prompts))]

    def _drive(self, waiting: list[tuple], bar: "_Progress") -> dict[str, RequestOutput]:
        engine, results, added = self.engine, {}, 0
        while added < len(waiting) or engine.has_work():
            while added < len(waiting):
                request_id, prompt, ids, params = waiting[added]
                if engine.num_free_places() < params.num_samples and engine.has_work():
                    break
                text = prompt if isinstance(prompt, str) else None
                results[request_id] = RequestOutput(
                    request_id=request_id,
                    prompt=text,
                    prompt_token_ids=ids,
                    outputs=[],
                )
                engine.add_request(request_id, ids, params, prompt_text=text)
                added += 1
            for delta in engine.step():
                results[delta.request_id].add(delta)
                bar.add(results[delta.request_id])
        return results

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """After Ctrl-C or a failure: leave the engine idle, so that it can be used again."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        while self.engine.has_work():
            self.engine.step()


class _Progress:
    """A bar of finished prompts, with the speed so far."""

    def __init__(self, total: int, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="prompts", unit="prompt", disable=not shown)
        self._num_prompt_tokens = self._num_output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count a request if it has finished."""
        if not output.finished:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        seconds = self._bar.format_dict["elapsed"]
        if seconds > 0:
            self._bar.postfix = (
                f"input {self._num_prompt_tokens / seconds:.1f} tok/s, "
                f"output {self._num_output_tokens / seconds:.1f} tok/s"
            )
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], int | np.integer):
        return [prompts]
    return prompts


def _parse(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    keys = set(prompt)
    if keys == {"prompt_token_ids"}:
        return list(prompt["prompt_token_ids"])
    if keys == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    raise ValueError(
        f'a prompt must be text, token ids, {{"prompt": text}} or {{"prompt_token_ids": ids}}, '
        f"got an object with {sorted(keys)}"
    )


def _as_params(
    params: SamplingParams | BeamSearchParams | Sequence[Any] | None, count: int
) -> list[Any]:
    if params is None or isinstance(params, SamplingParams | BeamSearchParams):
        return [params or SamplingParams()] * count
    params = list(params)
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one, or one for each of the {count} prompts, "
            f"got {len(params)}"
        )
    return params


def _with_priority(
    params: SamplingParams | Sequence[SamplingParams] | None, priority: Sequence[int], count: int
) -> list[SamplingParams]:
    priority = list(priority)
    if len(priority) != count:
        raise ValueError(
            f"priority must be one number for each of the {count} prompts, got {len(priority)}"
        )
    pairs = zip(_as_params(params, count), priority, strict=True)
    return [dataclasses.replace(one, priority=value) for one, value in pairs]
