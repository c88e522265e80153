"""What a machine chooses for a run: it makes the run faster or slower, and changes its last bits (decision 14).

The main process chooses when a run begins and tells the others, and processes beside training are told too. Every
checkpoint keeps the choices. A run that goes on takes them again, so that it goes on with the same bits; one that this
machine has not is named, and the run goes on without it only where that is accepted (``runs/resuming.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.linear import has_products, products, use_products, usual_products
from posttrain.recipes.recipe import Recipe
from posttrain.train.checks import Words
from posttrain.world import World

MOST_THREADS = 1024  # that are believed of a checkpoint


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that is chosen.

    Args:
        key: its name in a checkpoint's state. what: in messages.
        usual: what this machine takes by itself. has: whether it has one that somebody, a stranger perhaps, names.
        current: what this process uses. use: let it use another, one that it has.
        alike: how all machines of a run come to have the same.
        by_size: taken again only in as many processes as before.
    """

    key: str
    what: str
    usual: Callable[[], Any]
    has: Callable[[object], bool]
    current: Callable[[], Any]
    use: Callable[[Any], None]
    alike: str
    by_size: bool = False


def use_threads(number: int) -> None:
    """Compute with so many threads. Setting what it is already would change how MKL takes them."""
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


CHOICES = (
    Choice(
        key="products",
        what="library of products",
        usual=lambda: usual_products(),
        has=has_products,
        current=products,
        use=use_products,
        alike="install the same build of torch on all machines",
    ),
    # Two threads are worth it where cores are idle: sampling is 1.2 to 1.5 times as fast, updates 1.4 to 1.5 times
    # (``benchmarks/results``, ``threads`` 1 and 2). Torch's default, or what the environment says.
    Choice(
        key="num_threads",
        what="number of threads",
        usual=lambda: torch.get_num_threads(),
        has=lambda number: type(number) is int and 0 < number <= MOST_THREADS,
        current=lambda: torch.get_num_threads(),
        use=use_threads,
        alike="",
        by_size=True,
    ),
)


@contextmanager
def chosen_by_main(world: World) -> Iterator[None]:
    """In it every process computes with what the main one's machine chooses.

    Raises:
        UsageError: another machine has not got it.
    """
    num_threads = torch.get_num_threads()
    for choice in CHOICES:
        chosen = world.tell(choice.usual(), choice.what)
        if not choice.has(chosen):
            raise UsageError(
                f"rank {world.rank}: {choice.what}: {choice.usual()!r} on this machine, and {chosen!r} on rank 0's, "
                f"which is not to be had here; {choice.alike}"
            )
        choice.use(chosen)
    try:
        yield
    finally:
        use_threads(num_threads)


def choices_in_use() -> dict[str, Any]:
    """What this process computes with, by key: for a checkpoint, or for a process beside this one."""
    current = {choice.key: choice.current() for choice in CHOICES}
    return {key: chosen for key, chosen in current.items() if chosen is not None}


def use_choices(told: Mapping[str, Any], num_processes: tuple[int, int] = (1, 1)) -> list[str]:
    """Compute with what was kept or told, as far as it is to be had; lines about what is another than before.

    Args:
        num_processes: of the run when it was kept, and now.
    """
    lines = []
    for choice in CHOICES:
        chosen = told.get(choice.key)
        if chosen is None or not choice.has(chosen) or (choice.by_size and len(set(num_processes)) > 1):
            continue
        if chosen != (before := choice.current()):
            choice.use(chosen)
            lines.append(f"{choice.what}: {chosen}, as it began; here it would be {before}")
    return lines


def choices_gone(kept: Mapping[str, Any]) -> list[str]:
    """A line for each choice kept with a run that is not to be had here: the same numbers, but not to the last bit."""
    gone = [choice for choice in CHOICES if kept.get(choice.key) is not None and not choice.has(kept[choice.key])]
    return [f"{c.what}: {str(kept[c.key])[:40]!r} then, which is not to be had here; now {c.usual()!r}" for c in gone]


def choose_kernels(recipe: Recipe) -> None:
    """Ask a GPU for kernels that add up in one order, where ``train.deterministic`` says so."""
    if recipe.model.device in ("auto", "cuda") and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it, read when it starts
        torch.use_deterministic_algorithms(recipe.train.deterministic)


def guarantee_on(device: torch.device, words: Words) -> str:
    """Return what ``Words.guarantee`` says, L1 at most on a GPU whose kernels add up in any order."""
    in_any_order = device.type != "cpu" and not (device.type == "cuda" and words.recipe.train.deterministic)
    return "L1" if in_any_order and words.guarantee == "L2" else words.guarantee


def slow_paths(policy: Forward, recipe: Recipe) -> list[str]:
    """Return a line where batches are padded, or where a GPU attends under masks and the recipe did not ask for it."""
    if policy.path == "padded":
        return ["batches are padded, which is slower: packing them would change what this model computes"]
    meant = recipe.model.attention != "sdpa" or policy.device.type != "cuda"
    if meant or policy.attention == "varlen":
        return []
    if policy.attention == "mask":
        return [
            "model.attention: variable-length flash attention computes in 16 bits only, so the trainer attends under "
            "masks, in rectangles; train.precision: bf16 avoids them"
        ]
    return [f"model.attention: this torch attends by {policy.attention}: keys are repeated for every query head"]
