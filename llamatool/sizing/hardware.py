"""Accelerators: memory and bandwidth, with the source of each beside it; `--gpu 2xh100` read.

The memory is what the driver reports as total, which is what a program can get: an 80 GB H100 has
81,559 MiB, and a card with ECC in ordinary memory loses a sixteenth. The vendors' "GB" says less.
The bandwidth is the vendor's peak, so a speed derived from it is an upper bound.
"""

import re

from llamatool.errors import UsageError
from llamatool.records import record
from llamatool.units import format_bytes, parse_bytes

MAX_DEVICES = 4096

_MIB = 2**20
_GIB = 2**30


@record
class Gpu:
    """One accelerator, or the memory of one."""

    key: str  # as --gpu takes it: h100, rtx-4090, m4-max-128; empty for a bare amount of memory
    name: str
    memory_bytes: int
    bandwidth: int | None  # bytes per second, the vendor's peak
    memory_source: str
    bandwidth_source: str | None = None
    unified: bool = False  # memory shared with the CPU


@record
class Machine:
    """Some equal accelerators that hold one model together."""

    gpu: Gpu
    count: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.gpu.memory_bytes

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.name}" if self.count > 1 else self.gpu.name


def parse_machine(text: str) -> tuple[Machine, bool]:
    """The machine that `text` means, and whether it gives a count: `h100`, `2xh100`, `2x24GiB`.

    Raises: UsageError if the accelerator is unknown, the memory has no unit, or the count is 0.
    Example: `2x24GiB` -> two of 25769803776 bytes; `h100` -> one of 85520809984 (81559 MiB).
    """
    match = _COUNTED.fullmatch(text.strip())
    count, rest = (match[1], match[2]) if match else (None, text.strip())
    number = int(count) if count else 1
    if not 1 <= number <= MAX_DEVICES:
        raise UsageError(f"`{text}`: the number of devices must be 1 to {MAX_DEVICES}")
    return Machine(_gpu(rest), number), count is not None


def memory_only(memory_bytes: int) -> Gpu:
    """An accelerator of which only the memory is known.

    Raises: UsageError if it has no memory.
    """
    if memory_bytes < 1:
        raise UsageError("an accelerator without memory holds no model")
    return Gpu("", f"{format_bytes(memory_bytes)} device", memory_bytes, None, "as given")


def _gpu(text: str) -> Gpu:
    key = _key(text)
    found = _BY_KEY.get(_ALIASES.get(key, key))
    if found is not None:
        return found
    if text[:1].isdigit():
        return memory_only(parse_bytes(text))
    raise UsageError(
        f"`{text}` is no accelerator in the table",
        hint=f"known are {', '.join(KEYS)}; or give its memory, as 24GiB",
    )


def _key(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text.lower())


_COUNTED = re.compile(r"([0-9]{1,6})\s*[xX*]\s*(.+)", re.ASCII)


def _smi(key: str, name: str, mib: int, gb_per_second: float, datasheet: str) -> Gpu:
    return Gpu(
        key=key,
        name=name,
        memory_bytes=mib * _MIB,
        bandwidth=round(gb_per_second * 10**9),
        memory_source=f"nvidia-smi total: {mib:,} MiB",
        bandwidth_source=f"NVIDIA {datasheet}",
    )


def _amd(key: str, name: str, memory_bytes: int, source: str, gb_per_second: float) -> Gpu:
    return Gpu(
        key=key,
        name=name,
        memory_bytes=memory_bytes,
        bandwidth=round(gb_per_second * 10**9),
        memory_source=source,
        bandwidth_source=f"AMD Instinct {name} data sheet",
    )


def _apple(chip: str, gb_per_second: float, *sizes: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            key=f"{chip.lower().replace(' ', '-')}-{size}",
            name=f"Apple {chip} {size} GB",
            memory_bytes=size * _GIB,
            bandwidth=round(gb_per_second * 10**9),
            memory_source=f"Apple technical specifications, {chip}: {size} GB unified memory",
            bandwidth_source=f"Apple technical specifications, {chip}",
            unified=True,
        )
        for size in sizes
    )


# Memory: the total of nvidia-smi or rocm-smi on that card with its default ECC setting.
# Bandwidth: the vendor's data sheet or product page named in the last column, decimal GB/s.
GPUS: tuple[Gpu, ...] = (
    _smi("rtx-4060-ti-16gb", "RTX 4060 Ti 16GB", 16380, 288, "GeForce RTX 4060 Ti specifications"),
    _smi("rtx-4080", "RTX 4080", 16376, 716.8, "GeForce RTX 4080 specifications"),
    _smi("rtx-3090", "RTX 3090", 24576, 936.2, "GeForce RTX 3090 specifications"),
    _smi("rtx-4090", "RTX 4090", 24564, 1008, "GeForce RTX 4090 specifications"),
    _smi("rtx-5090", "RTX 5090", 32607, 1792, "GeForce RTX 5090 specifications"),
    _smi("rtx-a6000", "RTX A6000", 49140, 768, "RTX A6000 data sheet (ECC off)"),
    _smi("rtx-6000-ada", "RTX 6000 Ada", 49140, 960, "RTX 6000 Ada data sheet (ECC off)"),
    _smi("t4", "T4", 15360, 320, "T4 data sheet"),
    _smi("l4", "L4", 23034, 300, "L4 data sheet"),
    _smi("a10", "A10", 23028, 600, "A10 data sheet"),
    _smi("a40", "A40", 46068, 696, "A40 data sheet"),
    _smi("l40s", "L40S", 46068, 864, "L40S data sheet"),
    _smi("a100-40gb", "A100 40GB", 40960, 1555, "A100 data sheet, 40GB"),
    _smi("a100-80gb", "A100 80GB SXM", 81920, 2039, "A100 data sheet, 80GB SXM"),
    _smi("h100-pcie", "H100 PCIe", 81559, 2000, "H100 PCIe data sheet"),
    _smi("h100", "H100 SXM", 81559, 3350, "H100 data sheet, SXM"),
    _smi("h100-nvl", "H100 NVL", 95830, 3900, "H100 data sheet, NVL"),
    _smi("h200", "H200", 143771, 4800, "H200 data sheet"),
    _smi("b200", "B200", 183359, 8000, "DGX B200 data sheet (64 TB/s for eight)"),
    _amd("mi300x", "MI300X", 206_141_652_992, "rocm-smi total: 206,141,652,992 B", 5300),
    _amd("mi325x", "MI325X", 256 * 10**9, "AMD Instinct MI325X data sheet: 256 GB", 6000),
    *_apple("M2 Ultra", 800, 64, 128, 192),
    *_apple("M3 Ultra", 819, 96, 256, 512),
    *_apple("M4", 120, 16, 24, 32),
    *_apple("M4 Pro", 273, 24, 48, 64),
    *_apple("M4 Max", 546, 48, 64, 128),
)

KEYS: tuple[str, ...] = tuple(gpu.key for gpu in GPUS)

_BY_KEY = {_key(gpu.key): gpu for gpu in GPUS}
_ALIASES = {
    "3090": "rtx3090",
    "4080": "rtx4080",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "4060ti": "rtx4060ti16gb",
    "rtx4060ti": "rtx4060ti16gb",
    "a6000": "rtxa6000",
    "6000ada": "rtx6000ada",
    "a100": "a10080gb",
    "a10080": "a10080gb",
    "a10040": "a10040gb",
    "a10g": "a10",
    "h100sxm": "h100",
    "h10080gb": "h100",
    "h100pcie80gb": "h100pcie",
    "h200sxm": "h200",
}
