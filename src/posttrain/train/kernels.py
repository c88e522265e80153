"""Kernels of the device that trains: in which order they add up, what that guarantees, and which paths are slow."""

from __future__ import annotations

import os

import torch

from posttrain.models.forward.forward import Forward
from posttrain.models.load import choose_device
from posttrain.recipes.recipe import Recipe
from posttrain.train.checks import Words


def choose_kernels(recipe: Recipe) -> None:
    """Ask a GPU for kernels that add up in one order, where ``train.deterministic`` says so."""
    if choose_device(recipe.model.device).type == "cuda":
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
