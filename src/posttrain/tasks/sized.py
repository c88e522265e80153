"""Tasks that read rows: each has ``size`` and ``seed``, which choose how many of its examples there are, and which."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any

from pydantic import Field

from posttrain.option_types import Seed
from posttrain.randomness import permutation
from posttrain.tasks.base import Task

Reader = Callable[..., Task]
# What the docstring of every reader says of its two further options, behind its own.
_ABOUT = """
    size: of the split, so many examples, drawn by ``seed``; the others are counted as left out. Without it, and where
        there are fewer, all of them. The size of a training split does not cut what is held out.
    seed: another seed, other examples."""


def with_size(read: Reader) -> Reader:
    """A task that reads rows, with the options ``size`` and ``seed`` beside its own; stands below ``register``."""

    @wraps(read)
    def sized(*, size: int | None = None, seed: int = 0, **options: Any) -> Task:
        return choose_size(read(**options), size, seed)

    own = inspect.signature(read, eval_str=True)
    options = (("size", Annotated[int, Field(ge=1)] | None, None), ("seed", Seed, 0))
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in options
    ]
    sized.__signature__ = own.replace(parameters=[*own.parameters.values(), *further])  # type: ignore[attr-defined]
    about, raises, rest = (inspect.getdoc(read) or "").partition("\n\nRaises:")
    sized.__doc__ = f"{about}{_ABOUT}{raises}{rest}"
    return sized


def choose_size(task: Task, size: int | None, seed: int) -> Task:
    """The task with at most ``size`` examples, a function of (seed, size, number of examples), in their own order."""
    there = len(task.examples)
    if size is None or size >= there:
        return task
    chosen = sorted(int(i) for i in permutation(seed, "size", 0, there)[:size])
    dropped = task.dropped | {f"beyond task.size={size}": there - size}
    return replace(task, examples=[task.examples[i] for i in chosen], dropped=dropped)
