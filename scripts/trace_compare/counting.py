"""Operations of a program: primitives of its jaxpr, instructions of its optimised HLO, and what
XLA says of its cost and its memory.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

KERNELS = frozenset({"mpmd_map", "core_map", "pallas_call"})
"""Primitives that hold a Pallas kernel, over the versions of jax that have these kernels."""

NO_WORK = frozenset({"parameter", "constant", "get-tuple-element", "tuple", "bitcast"})
"""HLO instructions that only name values."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*)$", re.MULTILINE)
_OPCODE = re.compile(r"(?:^|[\s}\])])([a-z][a-z0-9\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """Static counts: what is inside a loop or one of several branches counts once.

    Attributes:
      jaxpr: primitive to count, outside of kernels.
      kernels: kernel to count of its launches; in_kernels: primitive to count inside of them.
      hlo: opcode to count in all computations, without ``NO_WORK``.
      custom_calls: target to count.
      cost: ``flops``, ``bytes``, as XLA's cost analysis gives them.
      memory: ``argument``, ``output``, ``alias`` and ``temp`` bytes.
    """

    jaxpr: dict[str, int]
    kernels: dict[str, int]
    in_kernels: dict[str, int]
    hlo: dict[str, int]
    custom_calls: dict[str, int]
    cost: dict[str, float]
    memory: dict[str, int]


def count_program(jaxpr: Any, compiled: jax.stages.Compiled) -> Operations:
    """All counts of one compiled program; ``jaxpr`` is its closed jaxpr."""
    outside, kernels, inside = count_jaxpr(jaxpr)
    hlo, custom_calls = count_hlo(compiled.as_text())
    return Operations(
        jaxpr=dict(outside),
        kernels=dict(kernels),
        in_kernels=dict(inside),
        hlo=dict(hlo),
        custom_calls=dict(custom_calls),
        cost=cost_of(compiled),
        memory=memory_of(compiled),
    )


def count_jaxpr(jaxpr: Any) -> tuple[Counter, Counter, Counter]:
    """(primitives outside of kernels, kernels by name, primitives inside of kernels) of a jaxpr,
    closed or not, and all that it calls.
    """
    outside, kernels, inside = Counter(), Counter(), Counter()

    def visit(jaxpr: Any, counts: Counter) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            counts[eqn.primitive.name] += 1
            nested = counts
            if eqn.primitive.name in KERNELS:
                kernels[kernel_name(eqn.params)] += 1
                nested = inside
            for child in _jaxprs(list(eqn.params.values())):
                visit(child, nested)

    visit(jaxpr, outside)
    return outside, kernels, inside


def kernel_name(params: dict[str, Any]) -> str:
    """Of a kernel's equation."""
    name = params.get("name") or getattr(params.get("name_and_src_info"), "name", None)
    return str(name or "unnamed")


def _jaxprs(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value
        elif isinstance(value, list | tuple):
            yield from _jaxprs(value)


def count_hlo(text: str) -> tuple[Counter, Counter]:
    """(opcodes but ``NO_WORK``, targets of custom calls) over all computations of a module."""
    opcodes, targets = Counter(), Counter()
    for right_side in _INSTRUCTION.findall(text):
        found = _OPCODE.search(right_side)
        if found is None or found[1] in NO_WORK:
            continue
        opcodes[found[1]] += 1
        if found[1] == "custom-call" and (target := _TARGET.search(right_side)):
            targets[target[1]] += 1
    return opcodes, targets


def cost_of(compiled: jax.stages.Compiled) -> dict[str, float]:
    """``flops`` and ``bytes`` of XLA's cost analysis; empty where it has none."""
    analysis = compiled.cost_analysis() or {}
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else {}
    names = {"flops": "flops", "bytes accessed": "bytes"}
    return {ours: float(analysis[name]) for name, ours in names.items() if name in analysis}


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """XLA's memory plan in bytes; empty where it has none."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    return {
        name: int(getattr(plan, f"{name}_size_in_bytes"))
        for name in ("argument", "output", "alias", "temp")
    }
