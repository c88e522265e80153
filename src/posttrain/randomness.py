"""Counter-based randomness: every draw is a function of (seed, purpose, step, row, ...).

There is no generator state to save, so a resumed run draws what the uninterrupted run would have
drawn, and a row's draws do not depend on which rows stand next to it.
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
    """Return a 64-bit key from a seed, a purpose and any number of counters (step, row, ...).

    Distinct arguments give independent keys: the key is a BLAKE2b digest of an unambiguous
    encoding of them (each counter as a signed 64-bit integer, the purpose last).
    """
    if not -(1 << 63) <= seed < 1 << 63:  # any whole number may be a seed
        seed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little", signed=True)
    encoded = struct.pack(f"<{1 + len(counters)}q", seed, *counters) + purpose.encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return a NumPy generator (Philox) that is a function of its arguments alone."""
    return np.random.Generator(np.random.Philox(key=derive_key(seed, purpose, *counters)))


def uniforms(keys: Sequence[int], count: int, start: int = 0) -> np.ndarray:
    """Return uniform numbers in [0, 1): ``float64 [len(keys), count]``.

    Entry (r, t) is the (start + t)-th output of SplitMix64 (Steele, Lea & Flood 2014) seeded with
    ``keys[r]``, so it depends on that key and on ``start + t`` alone.
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
    """Return the order of ``size`` items in one epoch: a function of (seed, purpose, epoch, size)."""
    return generator(seed, purpose, epoch).permutation(size)
