"""GPUs by name: memory, bandwidth, dense compute and links, each as its maker states it.

Bytes and rates are decimal. Compute is dense (makers like to print twice that, with sparsity). `host_bytes_s` is what a
copy from pinned CPU memory reaches in practice, about 85 % of the PCIe generation's 32 or 64 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sizing.fields import Fields, shown

GB = 10**9
TERA = 10**12
PCIE_4, PCIE_5 = 27 * GB, 55 * GB  # bytes/s, one direction, 16 lanes
LIMIT = 1e9  # in the units of the flags: GB, GB/s, TFLOP/s


class Hardware(Struct, frozen=True, kw_only=True):
    """One GPU."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: int
    flops: int  # dense, 16-bit numbers (BF16, or FP16 where there is none)
    flops_8bit: int | None = None  # dense FP8 (INT8 is not meant); None where it has none
    link_bytes_s: int | None = None  # to the other GPUs, both directions together
    host_bytes_s: int = PCIE_5  # copies from CPU memory
    source: str = "given by the user"


def _gpu(
    name: str,
    memory: int,
    bandwidth: int,
    compute: tuple[float, float | None],
    link: int | None,
    host: int,
    source: str,
) -> Hardware:
    """Memory in GB, rates in GB/s, compute in TFLOP/s."""
    half, eight = compute
    return Hardware(
        name=name,
        memory_bytes=memory * GB,
        bandwidth_bytes_s=bandwidth * GB,
        flops=round(half * TERA),
        flops_8bit=None if eight is None else round(eight * TERA),
        link_bytes_s=None if link is None else link * GB,
        host_bytes_s=host,
        source=source,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 80, 3350, (989, 1979), 900, PCIE_5, "NVIDIA H100 data sheet, SXM"),
        _gpu("h100-pcie", 80, 2000, (756, 1513), 600, PCIE_5, "NVIDIA H100 data sheet, PCIe"),
        _gpu("h100-nvl", 94, 3900, (835, 1671), 600, PCIE_5, "NVIDIA H100 data sheet, NVL"),
        _gpu("h200", 141, 4800, (989, 1979), 900, PCIE_5, "NVIDIA H200 data sheet, SXM"),
        _gpu("h20", 96, 4000, (148, 296), 900, PCIE_5, "NVIDIA H20 data sheet"),
        _gpu("b200", 180, 8000, (2250, 4500), 1800, PCIE_5, "NVIDIA DGX B200 data sheet"),
        _gpu("a100-80gb", 80, 2039, (312, None), 600, PCIE_4, "NVIDIA A100 data sheet, SXM 80 GB"),
        _gpu("a100-40gb", 40, 1555, (312, None), 600, PCIE_4, "NVIDIA A100 data sheet, SXM 40 GB"),
        _gpu("l40s", 48, 864, (362, 733), None, PCIE_4, "NVIDIA L40S data sheet"),
        _gpu("l4", 24, 300, (121, 242), None, PCIE_4, "NVIDIA L4 data sheet"),
        _gpu("a10", 24, 600, (125, None), None, PCIE_4, "NVIDIA A10 data sheet"),
        _gpu("t4", 16, 320, (65, None), None, PCIE_4 // 2, "NVIDIA T4 data sheet, FP16"),
        _gpu("rtx-4090", 24, 1008, (165, 330), None, PCIE_4, "NVIDIA Ada architecture white paper"),
        _gpu("rtx-5090", 32, 1792, (209, 419), None, PCIE_5, "NVIDIA RTX Blackwell architecture white paper"),
        _gpu("mi300x", 192, 5300, (1307, 2615), 896, PCIE_5, "AMD Instinct MI300X data sheet"),
        _gpu("mi325x", 256, 6000, (1307, 2615), 896, PCIE_5, "AMD Instinct MI325X data sheet"),
    )
}

FIELDS = ("name", "memory_gb", "bandwidth_gb_s", "tflops", "tflops_8bit", "link_gb_s", "host_gb_s")


def gpu(name: str) -> Hardware:
    """Return a GPU by name, in any case.

    Raises:
        ConfigError: it is not known; the message lists the known ones.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"no GPU is named {name!r}; known are {', '.join(GPUS)}")
    return found


def hardware_of(data: Mapping[str, Any]) -> Hardware:
    """Describe custom hardware: `memory_gb` is needed, the others of FIELDS narrow the speed figures.

    Raises:
        ConfigError: an unknown field, or a value that is not a positive number.
    """
    for name in data:
        if name not in FIELDS:
            raise ConfigError(f"hardware.{shown(name)} is not known; known are {', '.join(FIELDS)}")
    fields = Fields(data, "hardware.")
    memory = _number(data, "memory_gb")
    if memory is None:
        raise ConfigError("hardware.memory_gb is missing: the memory of one GPU in GB (10^9 bytes)")
    eight, link = _number(data, "tflops_8bit"), _number(data, "link_gb_s")
    return Hardware(
        name=fields.word("name") or "custom",
        memory_bytes=round(memory * GB),
        bandwidth_bytes_s=round((_number(data, "bandwidth_gb_s") or 0) * GB),
        flops=round((_number(data, "tflops") or 0) * TERA),
        flops_8bit=None if eight is None else round(eight * TERA),
        link_bytes_s=None if link is None else round(link * GB),
        host_bytes_s=round((_number(data, "host_gb_s") or PCIE_5 / GB) * GB),
    )


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LIMIT:
        raise ConfigError(f"hardware.{name} must be a number above 0 and at most {LIMIT:,.0f}, not {shown(value)}")
    return float(value)
