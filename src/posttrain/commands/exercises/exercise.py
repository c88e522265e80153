"""Exercise definition, and a notation for cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from posttrain.types import Batch

ReturnValue: TypeAlias = Tensor | float | str | tuple[Tensor, ...] | None
Lists: TypeAlias = list[float] | list[list[float]]


@dataclass(frozen=True)
class Exercise:
    """A function to implement.

    ``chapter``: RLHF book chapter. ``library``: location of the equivalent library function, which ``reference``
    calls. ``task``: docstring for the template file. ``cases``: test arguments, keyed by description. ``mistakes``:
    incorrect implementations, keyed by explanation.
    """

    chapter: str
    about: str
    library: str
    signature: str
    task: str
    reference: Callable[..., ReturnValue]
    cases: Mapping[str, tuple[object, ...]]
    mistakes: Mapping[str, Callable[..., ReturnValue]]
    needs_torch: bool = True

    @property
    def stub(self) -> str:
        """Template file to fill in."""
        if self.needs_torch:
            imports = "import torch\n\n"
        else:
            imports = ""
        return f'"""{self.task}"""\n\n{imports}\ndef {self.signature}:\n    raise NotImplementedError\n'


def numbers(values: Lists) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def bits(*rows: str) -> Tensor:
    """Convert rows such as ``0110`` to a mask."""
    return torch.tensor([[char == "1" for char in row] for row in rows])


def batch_of(mask: Tensor, rows_per_unit: int = 1, **fields: Tensor) -> Batch:
    """Return a batch of this mask whose other fields are not read."""
    zeros = torch.zeros(len(mask), dtype=torch.long)
    return Batch(torch.zeros_like(mask, dtype=torch.long), zeros + mask.shape[1], mask, zeros, zeros, fields,
                 rows_per_unit=rows_per_unit)  # fmt: skip
