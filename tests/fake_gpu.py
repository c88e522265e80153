"""A stand-in for a GPU, for machines without one: its tensors say that they are on ``mps`` or ``cuda``, and refuse what
one refuses as far as torch says it in advance: tensors of the CPU next to its own, being read as numpy, and on ``mps``
float64 and operations that have no kernel there. What they compute is computed by the CPU, so that results can be
compared bit for bit.

On ``cuda`` variable-length flash attention (16 bits) is there, written out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft  # noqa: F401  # so that what it imports finds no GPU, and takes it for nothing that it is not
import pytest
import torch
import torch.nn.attention.varlen  # its operations, for which there is no kernel of the CPU
import torchgen
import yaml
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from posttrain.models.forward import attention
from posttrain.sampling.native import recorded

MPS, CUDA = torch.device("mps"), torch.device("cuda", 0)
_INSIDE = torch.device(
    "meta", 1
)  # what C++ takes it for: the one device that any build of torch knows and has no kernels on
aten = torch.ops.aten
# Between devices, or with indices of the CPU's, torch takes tensors of both.
_BETWEEN = {aten._to_copy, aten.copy_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
GIB = 2**30


class _Device:
    """The GPU that is faked, and its uses: ``waits`` of the host for a number, calls of ``flash``."""

    def __init__(self, name: torch.device) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()


_device = _Device(MPS)


class OnGpu(torch.Tensor):
    """A tensor on the stand-in; ``inner`` has its numbers."""

    inner: Tensor
    device: torch.device = property(lambda self: _device.name)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        _check_type(inner.dtype)
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=_INSIDE, **layout)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = OnGpu(self.inner.detach().clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def tolist(self) -> Any:
        _device.counts["waits"] += 1
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        kind = _device.name.type
        raise TypeError(f"can't convert {kind}:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


def _check_type(dtype: Any) -> None:
    if dtype is torch.float64 and _device.name == MPS:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")


class _Factories(TorchDispatchMode):
    """Tensors that are made on the stand-in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        request = kwargs.get("device")
        is_there = any(isinstance(x, OnGpu) for x in tree_leaves((args, kwargs)))
        return _compute(func, args, kwargs) if is_there or request == _INSIDE else func(*args, **kwargs)


class _Devices(TorchFunctionMode):
    """Let ``mps`` and ``cuda`` in Python mean the fake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_inside, (args, kwargs or {}))
        if func is Tensor.cuda:
            return args[0].to(_INSIDE)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _indices(args[1]), *args[2:])
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _INSIDE:  # past every dispatch
            return func(*args, **{**kwargs, "device": "cpu"}).to(_INSIDE)
        return func(*args, **kwargs)


def _inside(x: Any) -> Any:
    is_device = isinstance(x, torch.device) or (isinstance(x, str) and x.partition(":")[0] in ("mps", "cuda"))
    return _INSIDE if is_device and torch.device(x).type == _device.name.type else x


def _indices(index: Any) -> Any:
    """Return a list of numbers as a tensor of the fake, which torch itself would not make."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    own = {id(x.inner): x for x in tensors if isinstance(x, OnGpu)}
    strange = [x for x in tensors if not isinstance(x, OnGpu) and x.ndim]
    assert all(x.device.type != "meta" for x in strange), f"{func}: a tensor without numbers"
    kind = _device.name.type
    if own and strange and func.overloadpacket not in _BETWEEN:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found at least two, {kind} and cpu"
        )
    if _device.name == MPS and not has_kernel(func):
        raise NotImplementedError(f"The operator '{func}' is not currently implemented for the MPS device")
    device = kwargs.get("device")
    goes_there = device == _INSIDE if device is not None else bool(own)
    if func.overloadpacket is aten.copy_:
        goes_there = isinstance(args[0], OnGpu)
    if func is aten._local_scalar_dense.default or (own and not goes_there):
        _device.counts["waits"] += 1
    arguments, options = tree_map(lambda x: x.inner if isinstance(x, OnGpu) else x, (args, dict(kwargs)))
    if device == _INSIDE:
        options["device"] = torch.device("cpu")
    if goes_there:
        _check_type(options.get("dtype"))
    compute = _ATTENTION.get(str(func), func)
    out = compute(*arguments, **options)
    if not goes_there:
        return out
    return tree_map(lambda x: own.get(id(x), OnGpu(x)) if isinstance(x, Tensor) else x, out)


@cache
def _reported_memory() -> dict[str, dict[str, Any]]:
    """Torch's own table of its operations, by name with overload."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    rows = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {row["func"].partition("(")[0]: row for row in rows}


@cache
def has_kernel(func: Any) -> bool:
    """Return True if torch has the operation for mps: its own, a delegated one, or one made of others."""
    row = _reported_memory().get(
        func._schema.name.removeprefix("aten::") + f".{func._overloadname}".removesuffix(".default")
    )
    if row is None:
        return True  # made by the generator out of another that is in the table, or not of torch's own
    row = _reported_memory().get(row.get("structured_delegate", ""), row)
    keys = set(itertools.chain(*(key.split(", ") for key in row.get("dispatch", {"CompositeImplicitAutograd": ""}))))
    return "MPS" in keys or any(key.startswith("Composite") for key in keys)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, is_causal: bool,
    scale: float | None, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Row after row with all scores: the last query sees all keys of its row."""
    rows, starts = [], cu_seq_q.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if block_table is None:
            assert cu_seq_k is not None
            k, v = (x[cu_seq_k[i] : cu_seq_k[i + 1]] for x in (key, value))
        else:
            assert seqused_k is not None
            k, v = (x[block_table[i].long()].flatten(0, 1)[: seqused_k[i]] for x in (key, value))
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], k) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - (end - start) + 1)
            scores = scores.masked_fill(ahead, -torch.inf)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    padding = query.new_zeros((len(query) - starts[-1], *query.shape[1:]))
    return torch.cat([*rows, padding])


def _flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: Any = None, enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _device.counts["flash" if block_table is None else "flash over pages"] += 1
    if query.dtype.itemsize != 2:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    sides = (x.float() for x in (query, key, value))
    out = _attend(*sides, cu_seq_q, cu_seq_k, is_causal, scale, seqused_k, block_table).to(query.dtype)
    return out, torch.zeros(query.shape[1::-1]), torch.zeros(2, dtype=torch.uint64)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor,
    cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None,
    window_size: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _device.counts["flash backward"] += 1
    sides = [x.detach().float().requires_grad_() for x in (query, key, value)]

    def gradients() -> tuple[Tensor, ...]:
        attended = _attend(*sides, cu_seq_q, cu_seq_k, is_causal, scale)
        return torch.autograd.grad(attended, sides, grad_out.float())

    with ThreadPoolExecutor(1) as own:  # here, inside of an operation, nothing is recorded
        return tuple(x.to(query.dtype) for x in own.submit(gradients).result())


_ATTENTION = {"torch_attn._varlen_attn.default": _flash, "torch_attn._varlen_attn_backward.default": _flash_backward}


@contextmanager
def _fake(device: torch.device) -> Iterator[tuple[pytest.MonkeyPatch, Counter[str]]]:
    global _device
    was_swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied weights stay tied, as where there is one
    _device = _Device(device)
    try:
        with pytest.MonkeyPatch.context() as patch, _Factories(), _Devices():
            # tensors of Python's cannot be inference tensors
            patch.setattr(torch, "inference_mode", lambda on=True: torch.no_grad() if on else nullcontext())
            yield patch, _device.counts
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_swapping)


@contextmanager
def apple_gpu() -> Iterator[None]:
    """Inside, ``model.device: mps`` is there, and is the stand-in."""
    with _fake(MPS) as (patch, _):
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        yield


@contextmanager
def nvidia_gpu() -> Iterator[Counter[str]]:
    """Inside, ``model.device: cuda`` is there, and is the stand-in: one GPU of 80 GiB. Counts what was asked of it."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    given_arguments: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_: "a stand-in",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=80 * GIB),
        "mem_get_info": lambda *_: (60 * GIB, 80 * GIB),
        "memory_reserved": lambda *_: GIB,
        "memory_allocated": lambda *_: GIB,
        "max_memory_allocated": lambda *_: GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "synchronize": lambda *_: None,
        "device": lambda device: nullcontext(),
        "Stream": lambda *_: stream,
        "current_stream": lambda *_: stream,
        "stream": lambda stream: nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "graph_pool_handle": lambda: (0, 0),
    }

    def in_any_memory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    with _fake(CUDA) as (patch, counts):
        for name, value in given_arguments.items():
            patch.setattr(torch.cuda, name, value)
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, in_any_memory(getattr(torch, name)))
        patch.setattr(torch, "compile", lambda compute, **_: compute)
        patch.setattr(recorded, "record", lambda step, *_: step)  # a graph is what it would have recorded, called
        attention.kernel_for.cache_clear()
        try:
            yield counts
        finally:
            attention.kernel_for.cache_clear()
