"""The GPUs that kernels are compiled for, as XLA wants them described, without having one.

Numbers are public: CUDA's occupancy limits by compute capability, and data sheets of the SXM
modules.
"""

import dataclasses

MAX_THREADS_PER_SM = 2048
MAX_BLOCKS_PER_SM = 32
REGISTERS_PER_SM = 65536
RESERVED_SHARED_BYTES = 1024
"""What CUDA keeps of shared memory for each thread block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU.

    Attributes:
      name: as the driver calls it.
      compute_capability: major, minor.
      architecture_features: compile for the architecture's own features (``sm_90a``, not
        ``sm_90``).
      num_sms: streaming multiprocessors.
      shared_bytes_per_sm, shared_bytes_per_block: the most shared memory.
      bandwidth: bytes a second of device memory.
      latency_s: of a load from device memory with the memory busy; published microbenchmarks
        have 500 to 800 ns.
      memory_bytes: of the card.
    """

    name: str
    compute_capability: tuple[int, int]
    architecture_features: bool
    num_sms: int
    fp32_lanes: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    latency_s: float = 700e-9

    @property
    def bytes_in_flight_needed(self) -> float:
        """Bytes that each SM must have under way to use the whole bandwidth (Little's law)."""
        return self.bandwidth * self.latency_s / self.num_sms


_HOPPER = dict(
    compute_capability=(9, 0),
    architecture_features=True,
    num_sms=132,
    fp32_lanes=128,
    shared_bytes_per_sm=233472,
    shared_bytes_per_block=232448,
    l2_bytes=52428800,
    clock_ghz=1.98,
)

CHIPS = {
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        architecture_features=False,
        num_sms=108,
        fp32_lanes=64,
        shared_bytes_per_sm=167936,
        shared_bytes_per_block=166912,
        bandwidth=2_039_040_000_000,
        l2_bytes=41943040,
        clock_ghz=1.41,
        memory_bytes=85_100_068_864,
    ),
    "h100": Chip(
        name="NVIDIA H100 80GB HBM3",
        bandwidth=3_352_320_000_000,
        memory_bytes=84_942_979_072,
        **_HOPPER,
    ),
    "h200": Chip(
        name="NVIDIA H200",
        bandwidth=4_800_000_000_000,
        memory_bytes=151_397_597_184,
        **_HOPPER,
    ),
    "b200": Chip(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        architecture_features=True,
        num_sms=148,
        fp32_lanes=128,
        shared_bytes_per_sm=233472,
        shared_bytes_per_block=232448,
        bandwidth=7_672_320_000_000,
        l2_bytes=132644864,
        clock_ghz=1.965,
        memory_bytes=191_514_411_008,
    ),
}

_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_bytes_per_sm}
  threads_per_core_limit: {threads_per_sm}
  core_count: {chip.num_sms}
  fpus_per_core: {chip.fp32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {chip.bandwidth}
  l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {chip.memory_bytes}
  shared_memory_per_block_optin: {chip.shared_bytes_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: {registers}
  registers_per_block_limit: {registers}
  device_address_bits: 64
  name: "{chip.name}"
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{chip.name}"
"""


def target_config(chip: Chip) -> str:
    """XLA's ``GpuTargetConfig`` as a text proto."""
    major, minor = chip.compute_capability
    return _TARGET_CONFIG.format(
        chip=chip,
        major=major,
        minor=minor,
        extension="ACCELERATED_FEATURES" if chip.architecture_features else "NONE",
        threads_per_sm=MAX_THREADS_PER_SM,
        registers=REGISTERS_PER_SM,
    )


def blocks_per_sm(chip: Chip, *, registers: int, shared_bytes: int, threads: int) -> int:
    """Thread blocks of one kernel that an SM holds at once (CUDA's occupancy rules)."""
    warps = -(-threads // 32)
    # Registers are handed out to warps in units of 256, warps in groups of 4.
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = REGISTERS_PER_SM // per_warp // 4 * 4 // warps
    by_shared = chip.shared_bytes_per_sm // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, MAX_THREADS_PER_SM // threads, MAX_BLOCKS_PER_SM)
