"""Compiles block kernels and the wgmma prefill with planted faults for an H100; prints what the
gate says, as JSON.

Run by test_gpu_gate.py in a process of its own, as compiling needs.
"""

import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from unittest import mock

from gpu_gate import aot, budgets, measure
from gpu_gate.chips import CHIPS

CHIP = "h100"
TWO_LOOPS = """        for item in (copy, zero):
            _for_each_item(item, count * num_layers, num_elements, chunk)
"""
TWO_BRANCHES = """        def item(row, part):
            copy(row, part)
            zero(row, part)

        _for_each_item(item, count * num_layers, num_elements, chunk)
"""
MERGED = """            @pl.when(jnp.logical_not(_within(block, num_blocks)))
            def _():
                zeros = plgpu.layout_cast(jnp.zeros((chunk,), k_pool.dtype), layout)
                for buffer in buffers:
                    store(buffer.at[i, layer, part], zeros)
"""
COPIED = """kernel(src, dst, *refs))(pools)
    return tuple(x.reshape(k_pool.shape) for x in pools)
"""
# Fault: spec, edits of the source, settings of the planted module.
FAULTS = {
    "none": ("copy_blocks.llama", (), {}),
    # Blocks so large that one chunk takes 512 registers.
    "spills": ("scatter_blocks.llama", (("or 4\n", "or 64\n"),), {}),
    "too much shared memory": (
        "copy_blocks.llama",
        (("(groups * COPIES_IN_FLIGHT, chunk)", "(groups * COPIES_IN_FLIGHT + 1, chunk)"),),
        {},
    ),
    "shared memory beyond the chip's": (
        "copy_blocks.llama",
        (("(groups * COPIES_IN_FLIGHT, chunk)", "(4 * groups * COPIES_IN_FLIGHT, chunk)"),),
        {},
    ),
    "one thread block on an SM": (
        "copy_blocks.llama",
        (("(groups * COPIES_IN_FLIGHT, chunk)", "(2 * groups * COPIES_IN_FLIGHT, chunk)"),),
        {},
    ),
    "stores of 2 bytes": (
        "gather_blocks.llama",
        (
            (TWO_LOOPS, "        _for_each_item(copy, count * num_layers, num_elements, chunk)\n"),
            (
                "                for buffer, x in zip(buffers, loaded, strict=True):\n"
                "                    store(buffer.at[i, layer, part], x)\n",
                "                for buffer, x in zip(buffers, loaded, strict=True):\n"
                "                    store(buffer.at[i, layer, part], x)\n\n" + MERGED,
            ),
        ),
        {},
    ),
    "the pool is copied": (
        "copy_blocks.llama",
        # What was in the pool before is wanted after.
        ((COPIED, COPIED.replace("for x", "+ k_pool for x")),),
        {},
    ),
    "another name": ("copy_blocks.llama", (("kernel_name=COPY_NAME", 'kernel_name="other"'),), {}),
    "few bytes in flight": ("copy_blocks.llama", (), dict(COPIES_IN_FLIGHT=1)),
}

# Fault of the wgmma prefill: edits of its source, what its tuning table says.
WGMMA_FAULTS = {
    "wgmma: spills": ((), {"chunk": 128, "stages": 2}),
    "wgmma: too much shared memory": ((), {"stages": 5}),
    # Weights are rounded into the registers of those that the product under way reads.
    "wgmma: products wait": (
        (
            ("return new, high, total", "return new.astype(dtype), high, total"),
            ("(blank, high, total, total)", "(weight, high, total, total)"),
            ("lax.optimization_barrier(new).astype(dtype)", "new"),
        ),
        {},
    ),
    "wgmma: mma.sync instead": ((), {"instruction": "mma_sync"}),
}


def wgmma_problems(dumps: aot.Dumps, pinned: dict) -> dict[str, list[str]]:
    """What the gate says of each fault of the wgmma prefill."""
    from planted import planted

    from pallas_kernels import tuning
    from pallas_kernels.paged_attention.mosaic_gpu import entry, prefill_wgmma, specs

    sound = next(x for x in specs.specs(CHIP) if x.name == "paged_attention.llama_prefill")
    found = {}
    for fault, (edits, use) in WGMMA_FAULTS.items():

        def lookup(kernel, *_, use=use, **__):
            return dict(use) if kernel == "paged_attention_prefill" else {}

        module = planted(prefill_wgmma, *edits)
        with (
            mock.patch.object(tuning, "lookup", lookup),
            mock.patch.object(entry, "prefill_wgmma", module.prefill_wgmma),
        ):
            figures = measure.measure_kernel(CHIPS[CHIP], sound, dumps)
        found[fault] = budgets.judge(CHIPS[CHIP], figures, pinned)
    return found


def main() -> None:
    dumps = aot.prepare(Path(tempfile.mkdtemp()))
    warnings.simplefilter("ignore")
    # Imported late: they import jax.
    from planted import planted

    from pallas_kernels.block_copy import mosaic_gpu, specs

    pinned = budgets.load()[CHIP]
    found = {}
    for fault, (name, edits, settings) in FAULTS.items():
        module = planted(mosaic_gpu, *edits)
        vars(module).update(settings)
        larger = (("llama, smollm2 = (16, ", "llama, smollm2 = (128, "),)
        copy = planted(specs, *(larger if fault == "spills" else ()))
        copy.mosaic_gpu = module
        spec = next(x for x in copy.specs(CHIP) if x.name == name)
        wanted = (mosaic_gpu.COPY_NAME,) if name.startswith("copy") else spec.kernels
        spec = dataclasses.replace(spec, kernels=wanted)
        figures = measure.measure_kernel(CHIPS[CHIP], spec, dumps)
        found[fault] = budgets.judge(CHIPS[CHIP], figures, pinned)
    print(json.dumps(found | wgmma_problems(dumps, pinned)))


if __name__ == "__main__":
    main()
