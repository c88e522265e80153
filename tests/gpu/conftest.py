"""No TF32: parity is asked for in fp32; and where all tests compute on what stands in for a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fake_gpu import nvidia_gpu

if os.environ.get("POSTTRAIN_GPU_TESTS_ON") == "fake":  # from now on: modules ask for a GPU as they are imported
    _fake = nvidia_gpu()
    _fake.__enter__()


@pytest.fixture
def full_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
