"""One process for the chips of one architecture: compile all, print a JSON line for each program.

``python -m gpu_gate.worker FOLDER h100 h200 [--only PART] [--attention pallas] [--no-steps]``

Mosaic GPU keeps the first chip's architecture, so another architecture needs another process. Chips
of one share what is compiled: code that comes out the same is compiled once.
"""

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path

from gpu_gate import aot
from gpu_gate.chips import CHIPS


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("chips", choices=CHIPS, nargs="+")
    parser.add_argument("--only", default="")
    parser.add_argument("--attention", default=None)
    parser.add_argument("--no-steps", action="store_true")
    args = parser.parse_args()
    dumps = aot.prepare(args.folder)  # before anything imports jax
    # Imported late for that reason.
    from gpu_gate import measure, programs

    warnings.simplefilter("ignore")

    def emit(chip: str, figures: measure.Figures) -> None:
        print(json.dumps({"chip": chip, "program": dataclasses.asdict(figures)}), flush=True)

    for name in args.chips:
        chip = CHIPS[name]
        for spec in programs.kernel_specs(name):
            if args.only in spec.name:
                emit(name, measure.measure_kernel(chip, spec, dumps))
        if args.no_steps:
            continue
        kernels = programs.step_kernels(args.attention, name)
        for step in programs.step_specs(attention=args.attention, only=args.only):
            emit(name, measure.measure_step(chip, step, dumps, kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
