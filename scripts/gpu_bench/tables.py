"""Kernels with other parameters than their tuning tables or heuristics give."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from pallas_kernels import tuning

Use = dict[str, Any]


@contextlib.contextmanager
def using(kernel: str, use: Use | None) -> Iterator[None]:
    """Kernels traced inside take ``use`` as what ``kernel``'s table says; None: no table."""

    def lookup(name: str, chip: str | None, shape: Mapping[str, Any], **_: Any) -> Use:
        return dict(use or {}) if name == kernel else {}

    with mock.patch.object(tuning, "lookup", lookup):
        yield
