"""Choosing an implementation by name, or by platform."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def resolve(operation: str, implementations: Mapping[str, Callable], name: str | None) -> Callable:
    """The function for ``name``; ``None`` means ``"xla"``, which serves every platform.

    Raises ``NotImplementedError`` for ``"pallas"`` where the operation has no such kernel, and
    ``ValueError`` for a name that no operation has.
    """
    if name is None:
        name = "xla"
    if name in implementations:
        return implementations[name]
    if name == "pallas":
        raise NotImplementedError(
            f"{operation}: there is no implementation 'pallas'; use None or one of "
            f"{sorted(implementations)}"
        )
    raise ValueError(
        f"{operation}: implementation is {name!r}; it must be None, 'pallas' or one of "
        f"{sorted(implementations)}"
    )


def call(
    operation: str,
    implementations: Mapping[str, Callable],
    name: str | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Call the implementation ``name``; ``None`` means ``"pallas"`` on a GPU where it supports the
    arguments, otherwise ``"xla"``. Raises as ``resolve`` does.
    """
    if name is None and "pallas" in implementations and is_on_gpu():
        try:
            return implementations["pallas"](*args, **options)
        except NotImplementedError:
            pass
    return resolve(operation, implementations, name)(*args, **options)


def is_on_gpu() -> bool:
    """Whether what is traced now is meant for a GPU."""
    device = jax.config.jax_default_device
    return getattr(device, "platform", device or jax.default_backend()) in ("gpu", "cuda")
