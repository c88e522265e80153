from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.recipes.recipe import Recipe, validate_recipe


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """A resolved recipe; keyword arguments change its ``train`` section."""

    def make(**train: object) -> Recipe:
        data = {
            "task": "stories",
            "rollout": {"num_prompts": 2, "group_size": 2},
            "objective": "grpo",
            "train": {"steps": 10, "lr": 1e-3} | train,
        }
        return validate_recipe(data).resolve()

    return make
