"""Runs on a mixture: shares and numbers by part in every kind of training, and resume under a curriculum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.store.metrics import MetricsLog
from posttrain.train.build import prepare
from posttrain.train.checks import words_of
from small_runs import one_layer_recipe, recorded, run, same_bits, saved_tensors, steps_of, untimed

SHARE = "small_runs:vowel_share"
pytestmark = pytest.mark.usefixtures("quick_stories")


def mixed(weights: dict[str, float], **options: Any) -> dict[str, Any]:
    """Stories of one step, two, ... under the names of the parts; 12 of each."""
    steps = {name: number for number, name in enumerate(weights, start=1)}
    parts = [
        {
            "name": name,
            "weight": weight,
            "task": {"name": "stories", "size": 12, "min_steps": n, "max_steps": n} | options,
        }
        for (name, weight), n in zip(weights.items(), steps.values(), strict=True)
    ]
    return {"name": "mixture", "parts": parts}


# a window in which the parts open while the run is under way, and in the middle of what a checkpoint is saved in
OPENING = {"name": "by_success_rate", "by": SHARE, "rate": 0.001, "window": 2, "review": 0.5}
BAND = {"name": "difficulty_band", "by": "small_runs:many_vowels", "low": 0.1, "high": 0.6}
UPDATES = {"steps": 14, "lr": 1e-3, "epochs": 1, "minibatches": 2, "save_every": 1, "keep": 20}


def sampling_recipe(curriculum: dict[str, Any] | None, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {"task": mixed({"one": 1, "two": 1, "three": 2}), "train": UPDATES}
    settings |= {"curriculum": curriculum} if curriculum is not None else {}
    return one_layer_recipe("grpo", **settings | changes)


@pytest.fixture(scope="module")
def opening(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opening")
    run(folder, sampling_recipe(OPENING))
    return folder


def shares_of(folder: Path, *names: str) -> list[tuple[float, ...]]:
    """Prompts of each part in every rollout batch."""
    rows = [step for step in steps_of(folder) if f"{names[0]}:prompts" in step]
    return [tuple(row[f"{name}:prompts"] for name in names) for row in rows]


def test_harder_parts_open_when_the_easier_succeed(opening: Path) -> None:
    shares = shares_of(opening, "one", "two", "three")
    assert len(shares) == 7
    assert shares[:2] == [(4, 0, 0)] * 2, "a window of two"
    assert shares[2][1] > shares[2][0] > 0 == shares[2][2], "1 to a half, of four prompts"
    assert [sum(share[k] for share in shares[4:]) for k in range(3)] == [2, 2, 8], "2 beside two halves, exactly"
    assert all(sum(share) == 4 for share in shares)


def test_numbers_are_told_by_part_and_add_up(opening: Path) -> None:
    training, _ = recorded(opening)
    for step, row in enumerate(steps_of(opening), start=1):
        own = [r for r in training if r.step == step]
        if "one:prompts" not in row:
            assert not own
            continue
        by_part = {name: [r for r in own if r.example_id.startswith(f"{name}/")] for name in ("one", "two", "three")}
        for name, rollouts in by_part.items():
            assert row[f"{name}:prompts"] == row[f"{name}:trained"] == len(rollouts) / 4
            if rollouts:
                assert row[f"{name}:reward"] == pytest.approx(sum(r.reward for r in rollouts) / len(rollouts))
                assert row[f"{name}:num_tokens"] == pytest.approx(sum(r.num_own for r in rollouts) / len(rollouts))
                assert row[f"{name}:accuracy"] == sum(r.outcome == "right" for r in rollouts) / len(rollouts)
            else:
                assert f"{name}:reward" not in row


@pytest.mark.parametrize("stop", [1, 4, 5, 9])
def test_stopped_and_resumed_under_a_curriculum_equals_undisturbed(stop: int, opening: Path, tmp_path: Path) -> None:
    run(tmp_path, sampling_recipe(OPENING), stop_after=stop)
    run(tmp_path, sampling_recipe(OPENING), resume=True)
    assert same_bits(saved_tensors(tmp_path, 14), saved_tensors(opening, 14))
    assert untimed(tmp_path) == untimed(opening)


def test_a_band_with_replaced_groups_resumes_bit_for_bit(tmp_path: Path) -> None:
    rollout = {"group": 2, "max_tokens": 4, "drop_uniform_groups": True, "max_rounds": 3}
    recipe = sampling_recipe(BAND, rollout=rollout, task=mixed({"one": 2, "two": 1}), rewards=[BAND["by"]])
    run(tmp_path / "whole", recipe)
    rows = [row for row in steps_of(tmp_path / "whole") if "one:prompts" in row]
    assert any(row["one:prompts"] + row["two:prompts"] > 4 for row in rows), "groups were replaced"
    assert all(row["one:trained"] + row["two:trained"] <= 4 for row in rows)
    assert sum(row.get("one:skipped", 0) + row.get("two:skipped", 0) for row in rows) > 0, "some rested"
    for stop in (5, 9):
        run(tmp_path / str(stop), recipe, stop_after=stop)
        run(tmp_path / str(stop), recipe, resume=True)
        assert untimed(tmp_path / str(stop)) == untimed(tmp_path / "whole")
        assert same_bits(saved_tensors(tmp_path / str(stop), 14), saved_tensors(tmp_path / "whole", 14))


STAGES = {
    "name": "stages",
    "stages": [{"step": 1, "weights": {"one": 1}}, {"step": 5, "weights": {"one": 1, "two": 3}}],
}


def test_stages_sample_ahead_the_same_prompts_and_resume(tmp_path: Path) -> None:
    task = mixed({"one": 1, "two": 1})
    recipes = {s: sampling_recipe(STAGES, rollout={"staleness": s}, task=task) for s in (0, 2)}
    for staleness, recipe in recipes.items():
        run(tmp_path / str(staleness), recipe)
    shares = shares_of(tmp_path / "2", "one", "two")
    assert shares == shares_of(tmp_path / "0", "one", "two") == [(4, 0)] * 2 + [(1, 3)] * 5
    drawn = [[r.example_id for r in recorded(tmp_path / s)[0]] for s in ("0", "2")]
    assert drawn[0] == drawn[1]
    run(tmp_path / "cut", recipes[2], stop_after=5)
    run(tmp_path / "cut", recipes[2], resume=True)
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "2")


def test_demonstrations_by_part(tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "sft",
        task=mixed({"one": 3, "two": 1}),
        curriculum=STAGES,
        data={"batch": 8},
        train={"steps": 6, "save_every": 1},
    )
    run(tmp_path / "whole", recipe)
    rows = steps_of(tmp_path / "whole")
    assert [(row["one:rows"], row["two:rows"]) for row in rows] == [(8, 0)] * 4 + [(4, 4)] * 2, "3 · 1 to 1 · 3"
    for row in rows:
        own = [name for name in ("one", "two") if row[f"{name}:rows"]]
        tokens = {name: row[f"{name}:rows"] * row[f"{name}:num_tokens"] for name in own}
        assert sum(tokens.values()) == pytest.approx(row["tokens"])
        told = sum(row[f"{name}:loss"] * tokens[name] for name in own) / row["tokens"]
        assert told == pytest.approx(row["loss"], rel=1e-5)
    run(tmp_path / "cut", recipe, stop_after=4)
    run(tmp_path / "cut", recipe, resume=True)
    assert same_bits(saved_tensors(tmp_path / "cut", 6), saved_tensors(tmp_path / "whole", 6))


@pytest.mark.parametrize(
    ("objective", "responses", "accuracy", "unit"),
    [
        ("bradley_terry", "pair", "pair_accuracy", "pairs"),
        ("dpo", "pair", "pair_accuracy", "pairs"),
        ("kto", "judged", None, "answers"),
        ("outcome", "judged", "final_accuracy", "answers"),
        ("process", "steps", "step_accuracy", "solutions"),
    ],
)
def test_given_answers_by_part(objective: str, responses: str, accuracy: str | None, unit: str, tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "judged",
        task=mixed({"one": 1, "two": 1}, responses=responses),
        objective=objective,
        data={"batch": 6},
        train={"steps": 2},
        eval={"every": 2, "n": 12} if accuracy else {},
    )
    run(tmp_path, recipe)
    for row in steps_of(tmp_path):
        assert (row[f"one:{unit}"], row[f"two:{unit}"]) == (3, 3)
        told = ["loss", *([accuracy] if accuracy else [])]
        assert {f"{name}:{metric}" for name in ("one", "two") for metric in told} <= row.keys()
        if unit == "pairs":
            for metric in told:
                assert (row[f"one:{metric}"] + row[f"two:{metric}"]) / 2 == pytest.approx(row[metric], abs=1e-6)
    evaluated = MetricsLog(tmp_path / "metrics.jsonl").read()[-1].metrics
    if accuracy is not None:
        assert {f"eval/mixture/validation/{name}:{accuracy}" for name in ("one", "two")} <= evaluated.keys()


def test_a_held_out_mixture_tells_accuracy_by_part(tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "sft", task=mixed({"one": 1, "two": 1}), train={"steps": 1}, eval={"every": 1, "n": 9, "items": "first"}
    )
    run(tmp_path, recipe)
    label = "eval/mixture/validation"
    results = MetricsLog(tmp_path / "metrics.jsonl").read()[-1].metrics
    counted = [results[f"{label}/{name}:accuracy_n"] for name in ("one", "two")]
    assert counted == [5, 4], "the first nine are of both, in turns"
    means = [results[f"{label}/{name}:accuracy"] for name in ("one", "two")]
    assert sum(n * mean for n, mean in zip(counted, means, strict=True)) / 9 == pytest.approx(
        results[f"{label}/accuracy"]
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout": {"staleness": 1}}, r"rollout\.staleness: 'by_success_rate' goes by the batch before"),
        ({"curriculum": OPENING | {"order": ["oen"]}}, r"curriculum\.order: there is no part 'oen'.*mean 'one'"),
        (
            {"curriculum": {"name": "stages", "stages": [{"step": 1, "weights": {"four": 1}}]}},
            "there is no part 'four'",
        ),
    ],
)
def test_curricula_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        words_of(sampling_recipe(**{"curriculum": OPENING} | changes))


def test_what_else_is_refused(tmp_path: Path) -> None:
    data = one_layer_recipe("sft", task=mixed({"one": 1}), curriculum={"name": "by_success_rate"})
    with pytest.raises(RecipeError, match="curriculum: 'by_success_rate' goes by how often sampled answers are right"):
        words_of(data)
    with pytest.raises(UsageError, match=r"curriculum\.by: there is no reward part 'corect'.*mean 'correct'"):
        prepare(sampling_recipe(OPENING | {"by": "corect"}), tmp_path)
    same = mixed({"one": 1, "two": 1}, split="validation")
    with pytest.raises(RecipeError, match=r"task\.split: training on 'validation' leaves nothing of task 'stories'"):
        prepare(one_layer_recipe("sft", task=same, eval={"every": 1}), tmp_path)
    short = one_layer_recipe("sft", task=mixed({"one": 1, "five": 1}, max_value=30), data={"max_tokens": 60})
    with pytest.raises(UsageError, match=r"task\.parts: not one example of part 'five' can be used here"):
        prepare(short.model_copy(update={"task": _long(short)}), tmp_path)


def _long(recipe: Recipe) -> Any:
    """The second part has stories of six steps, which are longer than the limit."""
    parts = [dict(part) for part in recipe.task.options["parts"]]
    parts[1]["task"] = parts[1]["task"] | {"min_steps": 6, "max_steps": 6}
    return recipe.task.model_copy(update={"parts": parts})
