"""Compiling GPU programs on a machine with no GPU, and judging what came out.

``scripts/check_gpu_kernels.py`` is the command. ``chips`` describes the GPUs, ``aot`` compiles for
one, ``ptx`` reads what the compiler made, ``programs`` lists what is compiled, ``measure`` does one
program, ``budgets`` compares with ``budgets.json``, ``report`` writes the tables.
"""
