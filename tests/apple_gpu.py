"""A stand-in for an Apple GPU, for machines without one: its tensors say that they are on ``mps``, and refuse what one
refuses as far as torch says it in advance: float64, operations that have no kernel there, tensors of the CPU beside
its own, being read as numpy. What they compute is computed by the CPU, so that results can be compared bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS = torch.device("mps")
_INSIDE = torch.device(
    "meta", 1
)  # what C++ takes it for: the one device that any build of torch knows and has no kernels on
aten = torch.ops.aten
# Between devices, or with indices of the CPU's, torch takes tensors of both.
_BETWEEN = {aten._to_copy, aten.copy_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OnApple(torch.Tensor):
    """A tensor on the stand-in; ``inner`` has its numbers."""

    inner: Tensor
    device: torch.device = property(lambda self: MPS)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnApple:
        if inner.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=_INSIDE, **layout)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = OnApple(self.inner.detach().clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the CPU first")

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


class _Factories(TorchDispatchMode):
    """Tensors that are made on ``mps``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        is_there = any(isinstance(x, OnApple) for x in tree_leaves((args, kwargs)))
        return _compute(func, args, kwargs) if is_there or asked == _INSIDE else func(*args, **kwargs)


class _Devices(TorchFunctionMode):
    """Whoever says ``mps`` in Python means the stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_inside, (args, kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _INSIDE:  # past every dispatch
            return func(*args, **{**kwargs, "device": "cpu"}).to(_INSIDE)
        return func(*args, **kwargs)


def _inside(x: Any) -> Any:
    return _INSIDE if isinstance(x, torch.device) and x == MPS else x


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    own = {id(x.inner): x for x in tensors if isinstance(x, OnApple)}
    strange = [x for x in tensors if not isinstance(x, OnApple) and x.ndim]
    if own and strange and func.overloadpacket not in _BETWEEN:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found at least two, mps and cpu"
        )
    if not has_kernel(func):
        raise NotImplementedError(f"The operator '{func}' is not currently implemented for the MPS device")
    device = kwargs.get("device")
    goes_there = device == _INSIDE if device is not None else bool(own)
    if func.overloadpacket is aten.copy_:
        goes_there = isinstance(args[0], OnApple)
    arguments, options = tree_map(lambda x: x.inner if isinstance(x, OnApple) else x, (args, dict(kwargs)))
    if device == _INSIDE:
        options["device"] = torch.device("cpu")
    if goes_there and options.get("dtype") is torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    out = func(*arguments, **options)
    if not goes_there:
        return out
    return tree_map(lambda x: own.get(id(x), OnApple(x)) if isinstance(x, Tensor) else x, out)


@cache
def _stated() -> dict[str, dict[str, Any]]:
    """Torch's own table of its operations, by name with overload."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    rows = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {row["func"].partition("(")[0]: row for row in rows}


@cache
def has_kernel(func: Any) -> bool:
    """Whether torch's table has the operation for mps: its own, by one that it delegates to, or made of others."""
    row = _stated().get(func._schema.name.removeprefix("aten::") + f".{func._overloadname}".removesuffix(".default"))
    if row is None:
        return True  # made by the generator out of another that is in the table, or not of torch's own
    row = _stated().get(row.get("structured_delegate", ""), row)
    keys = set(itertools.chain(*(key.split(", ") for key in row.get("dispatch", {"CompositeImplicitAutograd": ""}))))
    return "MPS" in keys or any(key.startswith("Composite") for key in keys)


@contextmanager
def apple_gpu() -> Iterator[None]:
    """Inside, ``model.device: mps`` is there, and is the stand-in."""
    was_swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied weights stay tied, as where there is one
    try:
        with pytest.MonkeyPatch.context() as patch, _Factories(), _Devices():
            patch.setattr(torch.backends.mps, "is_available", lambda: True)
            # tensors of Python's cannot be inference tensors
            patch.setattr(torch, "inference_mode", lambda on=True: torch.no_grad() if on else nullcontext())
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_swapping)
