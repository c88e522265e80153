"""Planted activations are the benchmarks' (``benchmarks/planted.py``) and these tests' own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
