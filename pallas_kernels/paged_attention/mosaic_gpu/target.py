"""What the kernel being traced will run on: a chip, or the interpreter on the CPU."""

import dataclasses

import jax

from pallas_kernels.mosaic import require_mosaic_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A chip as the kernels see it.

    It decides how data is copied, how many thread blocks are started and which instruction
    multiplies: the same result but for the last bits, and the same for all steps on one chip.

    Attributes:
      interpret: the kernel runs in Pallas's interpreter on the CPU.
      tma: copies to shared memory are TMA transfers that arrive on barriers (Hopper and later);
        otherwise ``cp.async``.
      wgmma: the tensor cores multiply for whole warpgroups, from shared memory (Hopper only).
      num_sms: streaming multiprocessors.
      shared_bytes: shared memory of one of them.
    """

    interpret: bool = False
    tma: bool = True
    wgmma: bool = False
    num_sms: int = 132
    shared_bytes: int = 233472


_SHARED_BYTES = {(8, 0): 167936, (8, 6): 102400, (8, 9): 102400, (12, 0): 102400}
_NUM_SMS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}


def find_target() -> Target:
    """The target of a kernel traced now.

    Raises:
      NotImplementedError: there is no NVIDIA GPU of Ampere or later, and no interpret mode.
    """
    require_mosaic_gpu("paged_attention")
    from pallas_kernels.interpret import is_interpreted

    if is_interpreted():
        # Few thread blocks, so that each takes several pieces of work in turn.
        return Target(interpret=True, num_sms=1)
    device = jax.config.jax_default_device
    if not hasattr(device, "platform"):
        device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        raise NotImplementedError(
            f"paged_attention: implementation 'pallas' needs an NVIDIA GPU, not {device}; on a CPU "
            "it runs under pallas_kernels.interpret.interpret_mode()"
        )
    try:
        arch = tuple(int(part) for part in str(capability).split("."))
    except ValueError:
        arch = (0, 0)
    if arch < (8, 0):
        raise NotImplementedError(
            f"paged_attention: implementation 'pallas' needs compute capability 8.0 or later, not "
            f"{capability}"
        )
    return Target(
        tma=arch >= (9, 0),
        wgmma=arch == (9, 0),
        num_sms=getattr(device, "core_count", None) or _NUM_SMS.get(arch, 132),
        shared_bytes=_SHARED_BYTES.get(arch, 233472),
    )
