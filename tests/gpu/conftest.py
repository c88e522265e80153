"""No TF32: parity is asked for in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def full_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
