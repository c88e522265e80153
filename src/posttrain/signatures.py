"""Annotations of a component's arguments: the range of a number, the shape of a tensor.

Neither pydantic nor jaxtyping has to be installed to call such a function. pydantic reads ``Range`` where a recipe is
read; shapes are jaxtyping's where it is there, else the plain tensor type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number, in ``Annotated[float, Range(ge=0)]``: at least, more than, at most, less than."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    # The sign by which pydantic knows that iterating gives the constraints.
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
