"""The GPUs that can be planned for, one table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.errors import UsageError
from posttrain.registry import suggest

MAX_COUNT = 100_000
_FORM = re.compile(r"(?:(\d{1,9})\s*[x×*])?\s*([A-Za-z][\w .-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind. ``memory``: GiB as the driver reports it; ``bandwidth``: GB/s of that memory.

    ``bf16``, ``fp32``: dense TFLOP/s, those of the tensor cores without sparsity and those outside of them. ``link``:
    GB/s that one GPU sends to another of its node (NVLink counted in one direction, else PCIe).
    """

    name: str
    memory: float
    bandwidth: float
    bf16: float
    fp32: float
    link: float


# From NVIDIA's data sheets of each product (peak rates, dense: half of what stands there with sparsity; links in one
# direction, half of the sum that stands there). V100 has no bfloat16; its float16 rate stands in.
GPUS: tuple[Gpu, ...] = (
    Gpu("V100-32GB", 31.7, 900, 125, 15.7, 150),  # Tesla V100 SXM2 data sheet, 2020
    Gpu("T4", 15.0, 320, 65, 8.1, 16),  # Tesla T4 data sheet, 2018 (float16)
    Gpu("A10", 22.5, 600, 125, 31.2, 32),  # A10 data sheet, 2021
    Gpu("A100-40GB", 39.4, 1555, 312, 19.5, 300),  # A100 data sheet, 2021
    Gpu("A100", 79.2, 2039, 312, 19.5, 300),  # A100 80 GB SXM, same sheet
    Gpu("A6000", 47.5, 768, 155, 38.7, 32),  # RTX A6000 data sheet, 2021
    Gpu("RTX-3090", 23.7, 936, 71, 35.6, 32),  # Ampere GA102 white paper, 2021 (fp32 accumulation)
    Gpu("RTX-4090", 23.5, 1008, 165, 82.6, 32),  # Ada white paper, 2023 (fp32 accumulation)
    Gpu("L4", 22.5, 300, 121, 30.3, 32),  # L4 data sheet, 2023
    Gpu("L40S", 44.5, 864, 362, 91.6, 32),  # L40S data sheet, 2023
    Gpu("H20", 95.6, 4000, 148, 44, 450),  # HGX H20, published specification, 2023
    Gpu("H100-PCIe", 79.2, 2000, 756, 51, 64),  # H100 data sheet, 2023
    Gpu("H100", 79.2, 3350, 989, 67, 450),  # H100 SXM5, same sheet
    Gpu("H200", 139.8, 4800, 989, 67, 450),  # H200 SXM data sheet, 2024
    Gpu("B200", 178.0, 8000, 2250, 75, 900),  # HGX B200 data sheet, 2025, per GPU
)
_KNOWN = {gpu.name.lower(): gpu for gpu in GPUS}


def read_gpus(text: str) -> tuple[int, Gpu]:
    """``8xH100`` as a number and a kind; ``H100`` is one.

    Raises:
        UsageError: it is not of that form, or a kind that is not in the table.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--gpus {text[:40]!r}: give a number and a kind, such as 8xH100")
    count, name = int(match[1] or 1), match[2].strip().replace(" ", "-")
    if not 1 <= count <= MAX_COUNT:
        raise UsageError(f"--gpus {text[:40]!r}: from 1 to {MAX_COUNT:,} can be planned for")
    gpu = _KNOWN.get(name.lower()) or _KNOWN.get(name.lower().removesuffix("-80gb").removesuffix("-sxm"))
    if gpu is None:
        names = [gpu.name for gpu in GPUS]
        raise UsageError(
            f"--gpus: there is no {name[:40]!r} in the table.{suggest(name, names)} Known: {', '.join(names)}"
        )
    return count, gpu
