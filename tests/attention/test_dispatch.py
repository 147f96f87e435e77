"""Which implementation is called."""

import pytest

from pallas_kernels import dispatch


def implementations(*, supported=True):
    def pallas(x):
        if not supported:
            raise NotImplementedError("pallas: not this shape")
        return "pallas", x

    return {"xla": lambda x: ("xla", x), "pallas": pallas}


@pytest.mark.parametrize(
    ("name", "on_gpu", "supported", "expected"),
    [
        (None, False, True, "xla"),
        (None, True, True, "pallas"),
        (None, True, False, "xla"),
        ("xla", True, True, "xla"),
        ("pallas", False, True, "pallas"),
    ],
)
def test_none_takes_the_kernel_on_a_gpu_that_supports_the_call(
    monkeypatch, name, on_gpu, supported, expected
):
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda: on_gpu)
    found = implementations(supported=supported)
    assert dispatch.call("operation", found, name, 3) == (expected, 3)


def test_a_named_one_that_cannot_run_says_why():
    with pytest.raises(NotImplementedError, match="not this shape"):
        dispatch.call("operation", implementations(supported=False), "pallas", 3)
    with pytest.raises(NotImplementedError, match="no implementation 'pallas'"):
        dispatch.call("operation", {"xla": print}, "pallas", 3)
    with pytest.raises(ValueError, match="'triton'"):
        dispatch.call("operation", implementations(), "triton", 3)


def test_this_test_does_not_run_on_a_gpu_platform_by_mistake(monkeypatch):
    import jax

    assert dispatch.is_on_gpu() == (jax.default_backend() in ("gpu", "cuda"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dispatch.is_on_gpu()
