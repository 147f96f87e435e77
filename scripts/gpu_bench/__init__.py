"""Numerics and speed of the GPU kernels on a GPU (``scripts/bench_kernels.py``), and their tuning
(``scripts/tune_kernels.py``).

``cases`` makes the inputs, ``numerics`` compares with float64, ``rivals`` are other ways to do the
same, ``timing`` measures, ``limits`` measures what the chip can do.
"""
