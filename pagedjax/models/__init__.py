"""Llama-family models: configuration, the NNX definition, forward passes, checkpoints, presets.

Import what you need from its module: ``config``, ``forward``, ``params``, ``weights``, ``presets``.
"""
