"""Threads and kernels of a run, and notices about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttrain.models.forward.forward import Forward
from posttrain.recipes.recipe import Recipe
from posttrain.world import World


def use_threads(number: int) -> None:
    """Compute with so many threads. Setting what it is already would change how MKL takes them."""
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextmanager
def threads_of_main(world: World) -> Iterator[None]:
    """Let every process compute with as many threads as the main one: that shows in the last bits of sums."""
    before = torch.get_num_threads()
    use_threads(world.tell(before, "number of threads"))
    try:
        yield
    finally:
        use_threads(before)


def choose_kernels(recipe: Recipe) -> None:
    """Ask a GPU for kernels that add up in one order, where ``train.deterministic`` says so."""
    if recipe.model.device in ("auto", "cuda") and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it, read when it starts
        torch.use_deterministic_algorithms(recipe.train.deterministic)


def slow_paths(policy: Forward, recipe: Recipe) -> list[str]:
    """Return a line where batches are padded, or where a GPU attends under masks and the recipe did not ask for it."""
    if policy.path == "padded" and recipe.model.attention != "sdpa":
        return [f"model.attention: {recipe.model.attention}: batches are padded; with sdpa they are packed"]
    if policy.path == "padded":
        return ["batches are padded, which is slower: packing them would change what this model computes"]
    if policy.device.type == "cuda" and policy.attention == "mask":
        return [
            "model.attention: variable-length flash attention computes in 16 bits only, so the trainer attends under "
            "masks, in rectangles; train.precision: bf16 avoids them"
        ]
    return []
