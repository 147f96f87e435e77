"""Choosing an implementation by name, or by platform."""

from collections.abc import Callable, Mapping


def resolve(operation: str, implementations: Mapping[str, Callable], name: str | None) -> Callable:
    """The function for ``name``; ``None`` means the best one for the platform.

    Raises ``NotImplementedError`` for ``"pallas"`` where the operation has no such kernel, and
    ``ValueError`` for a name that no operation has.
    """
    if name is None:
        # Until there are GPU kernels, XLA serves every platform.
        name = "xla"
    if name in implementations:
        return implementations[name]
    if name == "pallas":
        raise NotImplementedError(
            f"{operation}: implementation 'pallas' does not exist yet (the Mosaic GPU kernels are "
            f"not written); use None or one of {sorted(implementations)}"
        )
    raise ValueError(
        f"{operation}: implementation is {name!r}; it must be None, 'pallas' or one of "
        f"{sorted(implementations)}"
    )
