"""Paged attention as Mosaic GPU kernels, for A100, H100, H200 and B200 from one source.

``entry`` has the two functions that the dispatcher calls. ``config`` chooses tile sizes, ``work``
makes the work list, ``decode`` handles rows with few queries (the context split over thread
blocks, joined again by ``combine``), ``prefill`` the others. The products are warp-level
``mma.sync``; keys and values come through shared memory by TMA, or by ``cp.async`` on A100.
"""
