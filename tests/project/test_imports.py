"""The arrows between modules (docs/architecture.md): who may import what; what importing does."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a pure module may use of the standard library: nothing that does I/O, reads a clock, starts a
# thread or holds a lock.
PURE_STDLIB = {
    *("__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "functools"),
    *("itertools", "math", "numbers", "operator", "types", "typing"),
}

# Module prefix -> (third-party packages, modules of this project that it may import). The longest
# prefix that fits a module counts. None: anything.
CORE = ({"chex", "jax", "numpy"}, {"pagedjax.core", "pagedjax.sampling", "pallas_kernels"})
ARROWS = {
    "pallas_kernels": ({"jax"}, {"pallas_kernels"}),
    "pallas_kernels.tuning": ({"jax"}, {"pallas_kernels"}),  # reads its tables when tracing
    "pagedjax.core": CORE,
    "pagedjax.eventlog": ({"jax", "numpy"}, {"pagedjax.core", "pagedjax.eventlog"}),
    "pagedjax.replay": (
        {"jax", "numpy"},
        {
            *("pagedjax.core", "pagedjax.sampling", "pagedjax.eventlog", "pagedjax.replay"),
            "pagedjax.engine.device",
        },
    ),
    "pagedjax.sampling": ({"chex", "jax", "numpy"}, {"pagedjax.sampling"}),
    "pagedjax.sampling_params": (set(), set()),
    "pagedjax.config": ({"tyro"}, {"pagedjax.config_checks"}),
    "pagedjax.config_checks": (set(), set()),
    "pagedjax.memory": (set(), {"pagedjax.config"}),
    "pagedjax.lengths": (set(), set()),
    "pagedjax.planning": (set(), {"pagedjax.config", "pagedjax.lengths", "pagedjax.memory"}),
    "pagedjax.simulate": (
        {"jax", "numpy"},
        {"pagedjax.simulate", "pagedjax.core", "pagedjax.sampling"},
    ),
    "pagedjax.models": (
        {"flax", "gguf", "jax", "ml_dtypes", "numpy", "safetensors", "tqdm"},
        {"pagedjax.models", "pallas_kernels"},
    ),
    "pagedjax.tokenizers": (
        {"gguf", "jinja2", "numpy", "sentencepiece", "tokenizers"},
        {"pagedjax.tokenizers"},
    ),
    # The shell: may use everything below it, and the libraries of its trade; Flax it may not.
    "pagedjax": (
        {
            "fastapi",
            "jax",
            "numpy",
            "pydantic",
            "pydantic_core",
            "sse_starlette",
            "starlette",
            "tqdm",
            "uvicorn",
        },
        {"pagedjax"},
    ),
}
PURE = (
    *("pallas_kernels", "pagedjax.core", "pagedjax.sampling", "pagedjax.sampling_params"),
    "pagedjax.simulate",
)
# Modules that may read clocks, start threads and processes.
CLOCKS = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "signal", "socket"),
    *("subprocess", "threading", "time"),
}
MAY_USE_CLOCKS = (
    "pagedjax.engine",
    "pagedjax.llm",
    "pagedjax.server",
    "pagedjax.models.presets",  # runs the package index's client
)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in ("pagedjax", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def within(module, prefix):
    return module == prefix or module.startswith(prefix + ".")


def imports_of(module):
    """Every module that the file imports, at its top or inside a function: absolute names."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: imports are absolute here"
            # `from package import module` names a module; other names count as their package.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return found


def top(name):
    return name.partition(".")[0]


def is_ours(name):
    return top(name) in ("pagedjax", "pallas_kernels")


def test_the_tables_name_modules_that_exist():
    assert MODULES
    for prefix in [*ARROWS, *MAY_USE_CLOCKS]:
        assert any(within(module, prefix) for module in MODULES), prefix


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_place_allows(module):
    prefix = max((p for p in ARROWS if within(module, p)), key=len)
    third_party, ours = ARROWS[prefix]
    for name in imports_of(module):
        if is_ours(name):
            allowed = name == module or any(within(name, target) for target in ours)
        elif top(name) in sys.stdlib_module_names:
            allowed = prefix not in PURE or top(name) in PURE_STDLIB
            if top(name) in CLOCKS:
                allowed = any(within(module, place) for place in MAY_USE_CLOCKS)
        else:
            allowed = top(name) in third_party
        assert allowed, f"{module} may not import {name}"


def test_no_module_imports_in_a_circle():
    graph = {
        module: {name for name in imports_of(module) if name in MODULES and name != module}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def run_python(code):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


LIBRARIES = [
    *("fastapi", "flax", "gguf", "jinja2", "matplotlib", "optax", "safetensors"),
    *("sentencepiece", "tokenizers", "tqdm", "tyro", "uvicorn"),
]


def test_importing_the_package_loads_no_heavy_library():
    code = f"import pagedjax, sys; print(*(n for n in {LIBRARIES} if n in sys.modules))"
    assert run_python(code) == []


def test_importing_the_core_needs_no_flax_and_starts_no_backend():
    code = (
        "import sys, importlib\n"
        f"for name in {[m for m in MODULES if any(within(m, p) for p in PURE)]}:\n"
        "    importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        f"print(*(n for n in {LIBRARIES} if n in sys.modules))\n"
        "print('backend' if xla_bridge.backends_are_initialized() else '')\n"
    )
    assert run_python(code) == []


def test_importing_the_shell_and_the_models_starts_no_backend():
    names = [m for m in MODULES if not within(m, "pagedjax.server") and not m.endswith("__main__")]
    code = (
        "import importlib\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "print('backend' if xla_bridge.backends_are_initialized() else '')\n"
    )
    assert run_python(code) == []
