"""How close two computations are: every comparison of floats in the tests goes through these three functions.

They are pytest's ``approx`` and torch's ``allclose`` and ``assert_close`` with the same arguments and the same answers.
`make test-noise` also asks them to write down each comparison that holds (``POSTTRAIN_NOISE_RECORD``, a folder), so
that it sees how far a difference moves on another CPU, and whether the bound has room for that (``tools/noise.py``).

A bound is derived, not measured: ``rounding`` says how.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from torch import Tensor

_FOLDER = os.environ.get("POSTTRAIN_NOISE_RECORD")
NUM_KEPT = 256  # numbers of a large tensor that are written down, spread evenly
_FREE = {"rel": 1e-6, "abs": 1e-12}  # what approx allows if it is not told


def rounding(dtype: torch.dtype, *, size: float = 1.0, terms: int = 1, condition: float = 1.0) -> float:
    """Return how far two computations of one number may be apart: ``8 · u · √terms · size · condition``.

    ``u`` is the unit of rounding of ``dtype``. A sum of ``terms`` roundings of either sign, each of numbers of
    ``size``, grows as their root; 8 is four standard deviations of it on both sides of the comparison. What a later
    step amplifies, it multiplies by its ``condition`` (Lipschitz) number.
    """
    unit = torch.finfo(dtype).eps / 2
    return 8 * unit * math.sqrt(terms) * size * condition


def logprob_rounding(
    num_layers: int, *, size: float, largest_score: float = 1.0, dtype: torch.dtype = torch.float32
) -> float:
    """Return ``rounding`` of a log-probability of a model whose largest logit is of ``size``.

    A layer rounds ten times one behind the other (two norms, four products with their residual sums, scores, softmax),
    and so does what follows the last one: norm, head, exponents and their sum. Where attention is sharp, its softmax
    multiplies what rounds its scores by the largest of them, which is at most ``√head_dim · w²`` for norms of weight w.
    """
    return rounding(dtype, size=size, terms=10 * (num_layers + 1), condition=largest_score)


# Log-probabilities of the models that tests share, computed in two orders: of two layers, down to -12 (tiny_random.py);
# the embedded one, of which one layer gives logits up to 44 and all four up to 20.
OF_TINY_RANDOM = logprob_rounding(2, size=12.0)
OF_EMBEDDED = max(logprob_rounding(1, size=44.0), logprob_rounding(4, size=20.0))


def approx(expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> Any:
    """``pytest.approx``: equal to numbers within ``rel`` of the expected or ``abs``, whichever is larger."""
    plain = pytest.approx(expected, rel=rel, abs=abs, nan_ok=nan_ok)
    if _FOLDER is None:
        return plain
    return _Approx(plain, expected, rel, abs, _site())


def allclose(left: Tensor, right: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """``torch.allclose``: every number is within ``atol + rtol · |right|``."""
    is_close = torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=equal_nan)
    if _FOLDER is not None and is_close:
        _write_tensors(left, right, rtol, atol)
    return is_close


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    """``torch.testing.assert_close``: tensors of one shape and type, within ``atol + rtol · |expected|``."""
    torch.testing.assert_close(actual, expected, **options)
    if _FOLDER is None:
        return
    left, right = torch.as_tensor(actual), torch.as_tensor(expected)
    rtol, atol = options.get("rtol"), options.get("atol")
    if rtol is None or atol is None:
        rtol, atol = torch.testing._comparison.default_tolerances(left, right)
    _write_tensors(left, right, rtol, atol)


class _Approx:
    """``pytest.approx`` that writes down what it was compared with."""

    __array_ufunc__ = None
    __array_priority__ = 100

    def __init__(self, plain: Any, expected: Any, rel: float | None, absolute: float | None, site: str) -> None:
        self.plain = plain
        self.expected = expected
        self.rel = rel
        self.absolute = absolute
        self.site = site

    def __eq__(self, actual: object) -> bool:
        is_close = bool(self.plain == actual)
        if is_close:
            pairs = list(_pairs(actual, self.expected))
            differences = [float(one) - float(other) for one, other in pairs]
            _write(self.site, differences, [self._bound(float(other)) for _, other in pairs])
        return is_close

    def __ne__(self, actual: object) -> bool:
        return bool(self.plain != actual)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.plain)

    def _bound(self, expected: float) -> float:
        absolute = _FREE["abs"] if self.absolute is None else self.absolute
        if self.rel is None and self.absolute is not None:
            return absolute  # approx takes no relative bound where it is told an absolute one
        rel = _FREE["rel"] if self.rel is None else self.rel
        return max(absolute, rel * math.fabs(expected))


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[float, float]]:
    """The finite floats of both sides, in order."""
    if isinstance(expected, Mapping):
        for key in expected:
            yield from _pairs(actual[key], expected[key])
    elif isinstance(expected, np.ndarray) or isinstance(actual, np.ndarray):
        left, right = np.broadcast_arrays(actual, expected)
        for one, other in zip(left.ravel(), right.ravel(), strict=True):
            yield from _pairs(one.item(), other.item())
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        for one, other in zip(actual, expected, strict=True):
            yield from _pairs(one, other)
    elif isinstance(expected, float | int | np.floating) and math.isfinite(expected):
        yield actual, expected


def _write_tensors(left: Tensor, right: Tensor, rtol: float, atol: float) -> None:
    if not left.is_floating_point():
        return
    expected = right.detach().double().cpu()
    difference = left.detach().double().cpu() - expected
    bound = (atol + rtol * expected.abs()).broadcast_to(difference.shape)
    finite = difference.isfinite()
    _write(_site(), difference[finite].tolist(), bound[finite].tolist())


def _site() -> str:
    """File and line of the test that compares: the first frame outside of this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename, Path(__file__).parent.parent)}:{frame.f_lineno}"


_times: Counter[tuple[str, str]] = Counter()


def _write(site: str, differences: list[float], bounds: list[float]) -> None:
    """One line: which test, which line of it for the how-manieth time, and differences with their bounds."""
    if not differences:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    _times[test, site] += 1
    worst = max(math.fabs(x) / max(b, 5e-324) for x, b in zip(differences, bounds, strict=True))
    step = math.ceil(len(differences) / NUM_KEPT)
    row = {
        "test": test,
        "site": site,
        "time": _times[test, site],
        "worst": worst,
        "differences": differences[::step],
        "bounds": bounds[::step],
    }
    _file().write(json.dumps(row) + "\n")


@cache
def _file() -> TextIO:
    assert _FOLDER is not None
    folder = Path(_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)
    atexit.register(file.close)
    return file
