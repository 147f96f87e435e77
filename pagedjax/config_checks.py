"""Checks of single settings. Each raises `ValueError` with name, value and what is accepted."""

import math
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal


def matches(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(matches(item, int) for item in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    return isinstance(value, hint)


def check_type(name: str, value: Any, hint: Any) -> None:
    if matches(value, hint):
        return
    options = [h for h in typing.get_args(hint) if h is not type(None)] or [hint]
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(hint) is Literal:
        accepted = "one of " + ", ".join(typing.get_args(hint))
    else:
        accepted = words.get(options[0], "a list of integers")
    raise ValueError(f"{name} must be {accepted} (got {value!r})")


def check_range(name: str, value: int | None, low: int, high: int, why: str = "") -> None:
    if value is not None and not low <= value <= high:
        reason = f"; the least is {why}" if why else ""
        raise ValueError(f"{name} must be from {low} to {high} (got {value}){reason}")


def check_policy(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is None or value in known:
        return
    module, colon, function = value.partition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    if not (colon and dotted and function.isidentifier()):
        raise ValueError(
            f"{name} must be one of {', '.join(known)}, or module:function (got {value!r})"
        )
