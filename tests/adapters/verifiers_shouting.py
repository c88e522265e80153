"""An environment in the layout of verifiers' hub: a module with ``load_environment``."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def shouts(completion: Any, **kwargs: Any) -> float:
    """The share of capitals."""
    text = completion[-1]["content"]
    return sum(one.isupper() for one in text) / max(1, len(text))


async def is_answered(completion: Any, answer: str, **kwargs: Any) -> float:
    return float(answer in completion[-1]["content"])


def brief(completion: Any, **kwargs: Any) -> float:
    return -len(completion[-1]["content"]) / 100


def load_environment(size: int = 8, turns: int = 1) -> vf.Environment:
    rows = [{"question": f"Say {n}.", "answer": str(n), "info": {"n": n}} for n in range(size)]
    rubric = vf.Rubric(funcs=[shouts, is_answered, brief], weights=[1.0, 2.0, 0.0])
    told = {"dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:3]), "rubric": rubric}
    if turns > 1:
        return vf.ToolEnv(tools=[], max_turns=turns, **told)
    return vf.SingleTurnEnv(system_prompt="Be loud.", **told)
