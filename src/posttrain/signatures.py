"""Annotations for component arguments: number ranges, tensor shapes.

Calling such functions needs neither pydantic nor jaxtyping. pydantic enforces ``Range`` while reading recipes; shapes
use jaxtyping if installed, else plain tensor types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar


@dataclass(frozen=True, slots=True)
class Range:
    """Number range for ``Annotated[float, Range(ge=0)]``: at least, more than, at most, less than."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    # pydantic uses this flag to iterate over constraints.
    __is_annotated_types_grouped_metadata__: ClassVar[bool] = True

    def __iter__(self) -> Iterator[object]:
        from annotated_types import Ge, Gt, Le, Lt  # comes with pydantic

        if self.ge is not None:
            yield Ge(self.ge)
        if self.gt is not None:
            yield Gt(self.gt)
        if self.le is not None:
            yield Le(self.le)
        if self.lt is not None:
            yield Lt(self.lt)


class _Unshaped:
    """``Float[Tensor, "B T"]`` without jaxtyping: the tensor type."""

    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        return item[0]


if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64
else:
    try:
        from jaxtyping import Bool, Float, Float64
    except ImportError:
        Bool = Float = Float64 = _Unshaped

__all__ = ["Bool", "Float", "Float64", "Range"]
