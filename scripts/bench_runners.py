"""The engines of the offline benchmark behind one interface (bench_workloads.Runner).

Each is imported when it is built, so a peer need not be installed unless it is asked for. All
decode greedily, ignore end-of-sequence and serve at most MAX_NUM_SEQS requests at once.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_workloads import MAX_MODEL_LEN, MAX_NUM_SEQS, Request

from pagedjax.config import EngineConfig

# The KV pool that each engine gets.
POOL_GIB = 2
MAX_NUM_BATCHED_TOKENS_OF_PEERS = 2048


class NotInstalledError(Exception):
    """The engine that was asked for is not in this environment, or cannot read this model."""


class PagedJAXRunner:
    """PagedJAX in process."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        import jax

        import pagedjax
        from pagedjax.engine import build_engine

        self.version = f"pagedjax {pagedjax.__version__} jax {jax.__version__}"
        self._engine = build_engine(model, config)
        self._count = 0

    def _add(self, prompt_ids: list[int], num_tokens: int) -> None:
        from pagedjax import SamplingParams

        self._count += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._count), prompt_ids, params)

    def _serve(self, on_token: Callable[[], None] = lambda: None) -> int:
        produced = 0
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                produced += len(output.outputs[0].token_ids)
                on_token()
        return produced

    def stream(self, prompt_ids: list[int], num_tokens: int) -> tuple[float, float, int]:
        """See bench_workloads.Runner."""
        times: list[float] = []
        start = time.perf_counter()
        self._add(prompt_ids, num_tokens)
        produced = self._serve(lambda: times.append(time.perf_counter()))
        return times[0] - start, time.perf_counter() - start, produced

    def batch(self, requests: Sequence[Request]) -> tuple[float, int]:
        """See bench_workloads.Runner."""
        start = time.perf_counter()
        for prompt_ids, num_tokens in requests:
            self._add(prompt_ids, num_tokens)
        produced = self._serve()
        return time.perf_counter() - start, produced


class TransformersRunner:
    """transformers' generate: left-padded batches in order of arrival, each run to its longest
    output; only the tokens that were asked for count. No prefix cache."""

    PAD = 2

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise NotInstalledError(f"transformers with torch is not installed: {error}") from error
        self._torch, self._streamer = torch, _first_token_streamer(transformers)
        torch.set_num_threads(threads)
        self.version = f"transformers {transformers.__version__} torch {torch.__version__}"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            _directory(model), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def _generate(self, rows: Sequence[list[int]], num_tokens: int, streamer: Any = None) -> Any:
        torch = self._torch
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.PAD)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row)
            mask[i, width - len(row) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=self.PAD,
                streamer=streamer,
            )
        return output.shape[1] - width

    def stream(self, prompt_ids: list[int], num_tokens: int) -> tuple[float, float, int]:
        """See bench_workloads.Runner."""
        streamer = self._streamer()
        start = time.perf_counter()
        produced = self._generate([prompt_ids], num_tokens, streamer)
        return streamer.first_time_s - start, time.perf_counter() - start, produced

    def batch(self, requests: Sequence[Request]) -> tuple[float, int]:
        """See bench_workloads.Runner."""
        start, produced = time.perf_counter(), 0
        for i in range(0, len(requests), MAX_NUM_SEQS):
            part = requests[i : i + MAX_NUM_SEQS]
            longest = max(count for _, count in part)
            if self._generate([ids for ids, _ in part], longest) != longest:
                raise RuntimeError("transformers stopped early")
            produced += sum(count for _, count in part)
        return time.perf_counter() - start, produced


def _first_token_streamer(transformers: Any) -> type:
    class FirstToken(transformers.generation.streamers.BaseStreamer):
        """Notes when the first output token comes; the prompt is put before it."""

        def __init__(self) -> None:
            self.puts, self.first_time_s = 0, 0.0

        def put(self, value: Any) -> None:
            self.puts += 1
            if self.puts == 2:
                self.first_time_s = time.perf_counter()

        def end(self) -> None:
            pass

    return FirstToken


class VLLMRunner:
    """vLLM in process, prefix caching and chunked prefill on."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise NotInstalledError(f"vllm is not installed: {error}") from error
        self.version = f"vllm {vllm.__version__}"
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            str(_directory(model)),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS_OF_PEERS,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine
        self._count = 0

    def _add(self, prompt_ids: list[int], num_tokens: int) -> None:
        self._count += 1
        params = self._params(
            temperature=0,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt_ids}, params)

    def _serve(self, on_token: Callable[[], None] = lambda: None) -> int:
        produced = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                on_token()
                if output.finished:
                    produced += len(output.outputs[0].token_ids)
        return produced

    stream = PagedJAXRunner.stream
    batch = PagedJAXRunner.batch


def build_runner(name: str, model: str, dtype: str, threads: int, config: EngineConfig) -> Any:
    """The engine called `name`. Raises `NotInstalledError` when it cannot be had here."""
    if name == "pagedjax":
        return PagedJAXRunner(model, config)
    return {"transformers": TransformersRunner, "vllm": VLLMRunner}[name](model, dtype, threads)


def _directory(model: str) -> Path:
    path = Path(model)
    if not (path / "config.json").is_file():
        raise NotInstalledError(
            f"peers read a Hugging Face directory with a config.json; --model is {model!r}"
        )
    return path
