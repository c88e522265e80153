"""Counter-based randomness: every draw is determined by (seed, purpose, step, row, ...).

No generator state needs saving: resumed runs draw exactly like uninterrupted runs, and a row's draws never depend on
neighboring rows.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)


def derive_key(seed: int, purpose: str, *counters: int) -> int:
    """Derive a 64-bit key from seed, purpose and any counters (step, row, ...).

    Distinct arguments give independent keys: BLAKE2b digests over an unambiguous encoding (counters as signed 64-bit
    integers, purpose last).
    """
    if not -(1 << 63) <= seed < 1 << 63:  # any whole number may be a seed
        seed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little", signed=True)
    encoded = struct.pack(f"<{1 + len(counters)}q", seed, *counters) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Create a NumPy generator (Philox) determined by its arguments."""
    return np.random.Generator(np.random.Philox(key=derive_key(seed, purpose, *counters)))


def uniforms(keys: Sequence[int], count: int, start: int = 0) -> np.ndarray:
    """Draw uniform numbers in [0, 1): ``float64 [len(keys), count]``.

    Entry (r, t) is SplitMix64 output number start + t (Steele, Lea & Flood 2014), seeded by ``keys[r]``. It depends
    only on that key and ``start + t``.
    """
    base = np.asarray(list(keys), dtype=np.uint64)[:, None]
    position = np.arange(start + 1, start + count + 1, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        z = base + position * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * MIX1
        z = (z ^ (z >> np.uint64(27))) * MIX2
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))


def permutation(seed: int, purpose: str, epoch: int, size: int) -> np.ndarray:
    """Shuffle ``size`` items for an epoch, determined by (seed, purpose, epoch, size)."""
    return generator(seed, purpose, epoch).permutation(size)
