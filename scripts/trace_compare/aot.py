"""Operation counts of the programs that a GPU would run, compiled on a machine without one.

``compile_for_chips`` starts ``python -m trace_compare.aot FOLDER CHIP JSON`` once a chip: the
compiler must be set up before jax is imported, and keeps the first chip's architecture.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_gate import aot as gate
from gpu_gate.chips import CHIPS

TIMEOUT_S = 1800


class CannotCompile(RuntimeError):
    """The compiler is not installed, or ended early; the message says which."""


def check() -> None:
    """Raise ``CannotCompile`` where the compiler is not installed."""
    try:
        gate.check_wheels()
    except gate.MissingWheels as error:
        raise CannotCompile(f"--aot: {error}") from None


def compile_for_chips(
    chips: list[str], model: str, requests: list[Any], sizes: Any, names: tuple[str, ...]
) -> dict[str, Any]:
    """chip -> bucket -> implementation -> ``counting.Operations`` as plain data.

    Raises ``CannotCompile``.
    """
    check()
    job = {
        "model": model,
        "names": names,
        "sizes": dataclasses.asdict(sizes),
        "requests": [dataclasses.asdict(request) for request in requests],
    }
    found = {}
    for chip in chips:
        with tempfile.TemporaryDirectory(prefix="trace_compare_") as folder:
            found[chip] = _run_worker(folder, chip, json.dumps(job))
    return found


def _run_worker(folder: str, chip: str, job: str) -> dict[str, Any]:
    scripts = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(scripts), str(scripts.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "trace_compare.aot", folder, chip],
        input=job,
        env=dict(os.environ, PYTHONPATH=path),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-5:]
        raise CannotCompile(f"--aot {chip}: status {done.returncode}: " + "\n".join(last))
    return json.loads(done.stdout.splitlines()[-1])


def worker(folder: Path, chip: str, job: dict[str, Any]) -> dict[str, Any]:
    """bucket -> implementation -> operations, in a fresh process."""
    gate.prepare(folder)  # before anything imports jax
    import jax
    import jax.numpy as jnp

    from pagedjax.core.step import init_state, step
    from pagedjax.models.params import init_params
    from trace_compare import counting, workload

    sizes = workload.Sizes(**job["sizes"] | {"dtype": "bfloat16"})
    requests = [workload.Request(**request) for request in job["requests"]]
    model = workload.model_config(job["model"])
    params = jax.eval_shape(
        functools.partial(init_params, model, dtype=jnp.bfloat16, stacked=True), jax.random.key(0)
    )
    found: dict[str, dict[str, Any]] = {}
    for bucket in sizes.buckets:
        for name in job["names"]:
            config = workload.step_config(model, requests, sizes, attention=name)
            # As on a GPU: one straight line of kernels.
            scheduler = dataclasses.replace(config.scheduler, use_cond=False)
            config = dataclasses.replace(config, scheduler=scheduler)
            state = jax.eval_shape(functools.partial(init_state, config, kv_dtype=jnp.bfloat16))
            # Traced on a CPU, init_state chooses the CPU's storage type.
            pool = jax.ShapeDtypeStruct(state.k_pool.shape, jnp.bfloat16)
            state = dataclasses.replace(state, k_pool=pool, v_pool=pool)
            whole = functools.partial(step, config=config, num_tokens=bucket)
            compiled, jaxpr = _compile(CHIPS[chip], whole, (params, state))
            operations = counting.count_program(jaxpr, compiled)
            found.setdefault(str(bucket), {})[name] = dataclasses.asdict(operations)
    return found


def _compile(chip: Any, function: Any, args: tuple) -> tuple[Any, Any]:
    """The compiled program, and its jaxpr as traced for the chip."""
    import jax

    seen = []

    def traced(*arrays: Any) -> Any:
        seen.append(jax.make_jaxpr(function)(*arrays))
        return function(*arrays)

    compiled = gate.compile_for(chip, traced, args, donate=(1,))
    return compiled, seen[0]


if __name__ == "__main__":
    json.dump(worker(Path(sys.argv[1]), sys.argv[2], json.load(sys.stdin)), sys.stdout)
