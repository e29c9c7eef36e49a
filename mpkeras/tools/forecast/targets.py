"""Accelerators that a compiler can be asked for without having one: their memory, their rates, and how JAX names them.

Rates of matrix products are dense ones, and of a maker's data sheet. Sources:

- T4: NVIDIA T4 data sheet (DS-09117) and NVIDIA Turing architecture whitepaper (WP-09183).
- A100: NVIDIA A100 80GB data sheet (PN 1758950), SXM; NVIDIA A100 architecture whitepaper.
- L4: NVIDIA L4 data sheet (PN 2700900), half of the figures with sparsity; NVIDIA Ada architecture whitepaper.
- H100, H200: NVIDIA H100 and H200 data sheets, SXM, half of the figures with sparsity; Hopper architecture whitepaper.
- B200: NVIDIA DGX B200 data sheet, one eighth of it, half of the figures with sparsity.
- TPU v5e, v5p, v6e: Google Cloud TPU documentation, "System architecture" of each.

The facts of a GPU that the compiler itself asks for, beside that, are in the CUDA programming guide ("Compute
capabilities"), and, for some, in XLA's own descriptions (openxla/xla, `xla/backends/gpu/target_config/specs`).
"""

import dataclasses
import difflib
import math
import os

_GIB = 2**30
_TERA = 10**12


@dataclasses.dataclass(frozen=True)
class Multiprocessors:
    """What XLA asks of an NVIDIA GPU to compile for it. Sizes in bytes, each for one multiprocessor unless said."""

    capability: tuple[int, int]
    count: int
    float32_units: int
    threads: int
    shared_bytes: int
    l2_bytes: int  # of the device
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    Args:
        name: What `forecast` calls it.
        title: What its maker calls it.
        platform: `"cuda"`, `"tpu"` or `"cpu"`.
        memory_bytes: The memory that a program can have: as the driver reports it, or the runtime of a TPU.
        reserved_bytes: What the CUDA context and the workspaces of cuBLAS and cuDNN take of that.
        bandwidth: Bytes a second to and from memory.
        matrix_rates: `{dtype of the operands: FLOP/s}`. float32 at the precision that JAX has by default:
            TensorFloat-32 where a GPU has it, one bfloat16 pass on a TPU.
        multiprocessors: Of a GPU.
        topologies: Of a TPU, those that its compiler knows, the smallest first.
    """

    name: str
    title: str
    platform: str
    memory_bytes: int
    reserved_bytes: int = 0
    bandwidth: float = 0.0
    matrix_rates: dict = dataclasses.field(default_factory=dict)
    multiprocessors: Multiprocessors | None = None
    topologies: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """The memory that a program can have."""
        return self.memory_bytes - self.reserved_bytes

    def environment(self, devices: int) -> dict:
        """Returns the environment variables with which a JAX process can compile for it."""
        variables = {
            "JAX_PLATFORMS": "cpu,cuda" if self.platform == "cuda" else "cpu",
            # The plugin asks for CUDA's libraries, which compiling does not need.
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            # Without a device nothing can be tried out.
            "XLA_FLAGS": "--xla_gpu_autotune_level=0" if self.platform == "cuda" else "",
            # libtpu would ask the network which TPU this machine is.
            "TPU_SKIP_MDS_QUERY": "1",
            # It lets one process in at a time, as they would share a TPU: here there is none.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if self.platform == "cpu":
            variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        return variables

    def topology(self, devices: int) -> str:
        """Returns JAX's name of the smallest arrangement of so many devices; raises `ValueError` without one."""
        if self.platform == "cuda":
            return f"1x1x{devices}"
        for sizes in self.topologies:
            if math.prod(map(int, sizes.split("x"))) >= devices:
                return f"{self.name}:{sizes}"
        largest = math.prod(map(int, self.topologies[-1].split("x")))
        raise ValueError(f"Expected at most {largest} devices of {self.title}. Received: {devices}. Ask for fewer.")

    def description(self) -> str:
        """Returns what JAX takes as `target_config`: XLA's `GpuTargetConfigProto`, as text. Of GPUs alone."""
        of = self.multiprocessors
        assert of is not None, self.name
        major, minor = of.capability
        # Programs for Hopper and later use instructions of that very generation ("9.0a").
        feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {of.shared_bytes}
  threads_per_core_limit: {of.threads}
  core_count: {of.count}
  fpus_per_core: {of.float32_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {round(self.bandwidth)}
  l2_cache_size: {of.l2_bytes}
  clock_rate_ghz: {of.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {of.shared_bytes - (0 if major == 7 else 1024)}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.title}"
"""


def _gpu(name, title, memory_bytes, bandwidth, rates, multiprocessors):
    rates = {dtype: rate * _TERA for dtype, rate in rates.items()}
    return Target(name, title, "cuda", memory_bytes, _GIB, bandwidth, rates, multiprocessors)


def _tpu(name, title, memory_gib, bandwidth, bfloat16, topologies):
    # Matrix units multiply bfloat16; float16 is widened, and float32 at JAX' default precision is rounded to it.
    rates = dict.fromkeys(("bfloat16", "float32", "float16"), bfloat16 * _TERA)
    return Target(name, title, "tpu", round(memory_gib * _GIB), 0, bandwidth, rates, topologies=topologies)


_HOPPER = Multiprocessors((9, 0), 132, 128, 2048, 233472, 52428800, 1.98)
_HOPPER_RATES = {"float64": 67, "float32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9}

# A host has 2x2 chips, or 2x2x1.
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

#: The devices that `forecast` knows, by name.
TARGETS = {
    target.name: target
    for target in (
        _gpu(
            "t4",
            "Tesla T4",
            15_655_829_504,
            320e9,
            {"float64": 0.25, "float32": 8.1, "float16": 65, "bfloat16": 8.1},
            Multiprocessors((7, 5), 40, 64, 1024, 65536, 4194304, 1.59),
        ),
        _gpu(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            85_100_068_864,
            2039e9,
            {"float64": 19.5, "float32": 156, "float16": 312, "bfloat16": 312},
            Multiprocessors((8, 0), 108, 64, 2048, 167936, 41943040, 1.41),
        ),
        _gpu(
            "l4",
            "NVIDIA L4",
            23_580_639_232,
            300e9,
            {"float64": 0.47, "float32": 60, "float16": 121, "bfloat16": 121, "float8": 242.5},
            Multiprocessors((8, 9), 58, 128, 1536, 102400, 50331648, 2.04),
        ),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3352e9, _HOPPER_RATES, _HOPPER),
        _gpu("h200", "NVIDIA H200 141GB HBM3e", 151_397_597_184, 4800e9, _HOPPER_RATES, _HOPPER),
        _gpu(
            "b200",
            "NVIDIA B200",
            191_514_411_008,
            8000e9,
            {"float64": 40, "float32": 1125, "float16": 2250, "bfloat16": 2250, "float8": 4500},
            Multiprocessors((10, 0), 148, 128, 2048, 233472, 132644864, 1.965),
        ),
        _tpu("v5e", "TPU v5e", 15.75, 819e9, 197, _SQUARES),
        _tpu("v5p", "TPU v5p", 95.0, 2765e9, 459, _CUBES),
        _tpu("v6e", "TPU v6e", 31.25, 1640e9, 918, _SQUARES),
    )
}
NAMES = (*TARGETS, "cpu")


def find_target(name: str) -> Target:
    """Returns the `Target` of that name, in small or capital letters, with or without "tpu-" or "tpu_" before it."""
    if not isinstance(name, str):
        raise TypeError(
            f"Expected `device` to be the name of a device. Received: {name!r} of type {type(name).__name__}. "
            f"Pass one of {', '.join(NAMES)}."
        )
    plain = name.lower().removeprefix("tpu").lstrip("-_ ")
    if plain == "cpu":
        return Target("cpu", "this machine's CPU", "cpu", _memory_bytes())
    if plain in TARGETS:
        return TARGETS[plain]
    nearest = difflib.get_close_matches(plain, NAMES, 1, cutoff=0.4)
    meant = f"Did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"Expected `device` to be one that can be compiled for. Received: {name!r}. {meant}Pass one of "
        f"{', '.join(NAMES)}."
    )


def _memory_bytes() -> int:
    """Returns the memory of this machine in bytes; 0 where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):
        return 0
