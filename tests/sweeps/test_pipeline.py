"""Pipelines: what is planned, and what is told of the contests, by hand-worked numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import DataError, PosttrainError, RecipeError, UsageError
from posttrain.sweeps.pipeline import load_pipeline
from posttrain.sweeps.pipeline_results import (
    Estimate,
    Meeting,
    against_each_other,
    choose_samples,
    findings,
    over_seeds,
    read_meeting,
    reward_gain,
    show_estimate,
    stand,
    tables,
)
from posttrain.sweeps.plan import Training

FILE = """\
start: {recipe: tiny/sft, train: {steps: 2}}
reward_models:
  proxy: {recipe: tiny/rm, train: {steps: 3}}
  judge: {recipe: tiny/rm, task: {seed: 9}}
optimize: proxy
judge: judge
policies:
  grpo: rl/grpo
  dpo-files: {recipe: tiny/rm, objective: {name: dpo, beta: 0.1}, head: null}
evaluate: {task: {name: stories, split: validation}, n: 8, samples: 2}
seeds: 2
"""


def plan_of(tmp_path: Path, text: str = FILE, **options: Any) -> Any:
    (tmp_path / "file.yaml").write_text(text)
    return load_pipeline(str(tmp_path / "file.yaml"), folder=tmp_path / "runs" / "p", **options)


def test_every_part_begins_with_the_start_and_policies_that_sample_are_rewarded_by_their_seeds_proxy(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path)
    folder = tmp_path / "runs" / "p"
    own = ["proxy", "judge", "grpo", "dpo-files"]
    contests = ["grpo", "dpo-files"]
    names = ["start"]
    for seed in (0, 1):
        names += [f"{name}-seed{seed}" for name in own] + [f"{name}-seed{seed}-contest" for name in contests]
    assert [part.name for part in plan.parts] == names
    parts = {part.name: part for part in plan.parts}
    start = str(folder / "start" / "checkpoints" / "step-000002")
    trained = [part for part in plan.parts if isinstance(part, Training) and part.name != "start"]
    assert {part.recipe.model.name for part in trained} == {start}
    assert [part.recipe.train.seed for part in trained] == [0] * 4 + [1] * 4
    (reward,) = parts["grpo-seed1"].recipe.rewards  # the verifier's rewards of rl/grpo are gone
    assert (reward.name, reward.options["run"]) == ("reward_model", str(folder / "cells" / "proxy-seed1"))
    assert parts["grpo-seed1"].needs == ("start", "proxy-seed1")
    assert parts["dpo-files-seed1"].needs == ("start",)
    assert parts["dpo-files-seed1"].recipe.rewards == []
    contest = parts["grpo-seed1-contest"]
    assert contest.needs == ("start", "grpo-seed1", "judge-seed1", "proxy-seed1")
    words = list(contest.command)
    assert words[words.index("--against") + 1] == start
    cells = folder / "cells"
    assert words[words.index("--judge") + 1] == f"{cells / 'judge-seed1'},{cells / 'proxy-seed1'}"  # the judge decides
    assert words[words.index("--task.split") + 1] == '"validation"'


def test_a_reward_model_among_other_rewards_keeps_its_options(tmp_path: Path) -> None:
    rewards = "[{name: reward_model, run: runs/x, normalize: true, weight: 0.5}, {name: xml_format, weight: 0.1}]"
    plan = plan_of(tmp_path, FILE.replace("grpo: rl/grpo", f"grpo: {{recipe: rl/grpo, rewards: {rewards}}}"))
    grpo = next(part for part in plan.parts if part.name == "grpo-seed0")
    model, form = grpo.recipe.rewards
    assert (model.options["normalize"], model.weight) == (True, 0.5)
    assert model.options["run"].endswith("cells/proxy-seed0")
    assert (form.name, form.weight) == ("xml_format", 0.1)


def test_the_resolved_file_makes_the_same_pipeline_and_policies_can_be_left_out(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan_of(tmp_path, plan.to_yaml()).to_yaml() == plan.to_yaml()
    assert {part.method for part in plan_of(tmp_path, methods=["grpo"]).contests} == {"grpo"}
    assert plan_of(tmp_path, methods=["all"]).to_yaml() == plan.to_yaml()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("judge: judge", "judge: proxy", "the judge must be another reward model"),
        ("optimize: proxy", "optimize: poxy", "optimize: 'poxy' is none of the reward models: proxy, judge"),
        ("grpo: rl/grpo", "grpo: tiny/rm", "objective 'bradley_terry' trains a reward model, not a policy"),
        ("grpo: rl/grpo", "judge: rl/grpo", "judge: a policy needs a name of its own"),
        ("{recipe: tiny/rm, train: {steps: 3}}", "tiny/sft", "file.yaml:3: reward_models.proxy: objective"),
        ("samples: 2", "sample: 2", "sample"),
        ("judge: judge\n", "", "this is no pipeline (it has no keys 'judge' and 'policies')"),
    ],
)
def test_mistakes_name_the_place(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan_of(tmp_path, FILE.replace(before, after, 1))
    assert message in str(error.value)


def test_an_unknown_policy_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no policy 'grop'\. Did you mean 'grpo'"):
        plan_of(tmp_path, methods=["grop"])


def answered(index: int, own: float | None, start: float, text: str = "yes") -> dict[str, Any]:
    """A prompt to which a policy (score ``own``) and the start have answered; the proxy doubles every score."""

    def answer(score: float | None, text: str) -> dict[str, Any]:
        return {"text": text, "score": score, "scores": {"p": None if score is None else 2 * score}}

    asked = {"index": index, "question": f"q{index}", "answer": f"gold {index}"}
    return asked | {"a": [answer(own, text)], "b": [answer(start, "no")]}


def test_reward_is_counted_in_deviations_of_the_starts_scores_and_unscored_prompts_are_left_out() -> None:
    items = [answered(0, 3.0, 0.0), answered(1, 1.0, 2.0), answered(2, None, 50.0)]
    # gains 3 and -1, mean 1; the start's scores 0 and 2 deviate by 1
    gain = reward_gain(items, None)
    assert gain.mean == pytest.approx(1.0)
    half = 12.706204736432095 * math.sqrt(8.0 / 2)  # variance of (3, -1) is 8, over 2 prompts
    assert (gain.low, gain.high) == (pytest.approx(1.0 - half), pytest.approx(1.0 + half))
    assert reward_gain(items, "p").mean == pytest.approx(1.0)  # the unit doubles with the scores


def test_seeds_give_students_t_and_one_seed_its_own_interval() -> None:
    assert over_seeds([]) is None
    own = Estimate(0.6, 0.5, 0.7, 1)
    assert over_seeds([own]) is own
    three = over_seeds([Estimate(x, 0, 1, 1) for x in (0.6, 0.7, 0.8)])
    assert three is not None
    assert three.mean == pytest.approx(0.7)
    assert three.high - three.mean == pytest.approx(4.302652729911275 * 0.1 / math.sqrt(3))
    wide = over_seeds([Estimate(x, 0, 1, 1) for x in (0.2, 0.9)], is_share=True)
    assert wide is not None
    assert (wide.low, wide.high) == (0.0, 1.0)  # a share stays one
    assert show_estimate(own, is_share=True) == "60.0 % [50.0, 70.0]"


def meeting(method: str, seed: int, rate: Estimate, proxy: Estimate, scores: list[float]) -> Meeting:
    items = [answered(index, score, 0.0, method) for index, score in enumerate(scores)]
    measures = {"win_rate": rate, "win_rate_proxy": proxy, "reward_judge": rate, "reward_proxy": rate}
    return Meeting(method, seed, measures | {"length_ratio": Estimate(1.0, 1.0, 1.0, 1)}, items)


def test_policies_meet_one_another_through_the_judges_scores_prompt_by_prompt() -> None:
    share = Estimate(0.5, 0.4, 0.6, 1)
    left = [meeting("a", 0, share, share, [1.0, 2.0, 3.0, 4.0]), meeting("a", 1, share, share, [0.0, 0.0])]
    right = [meeting("b", 0, share, share, [0.0, 2.0, 9.0, 1.0]), meeting("b", 1, share, share, [1.0, 1.0])]
    rates = against_each_other(stand([*left, *right]))
    # seed 0: win, tie, loss, win = 0.625; seed 1: two losses
    assert rates["a", "b"].mean == pytest.approx((0.625 + 0.0) / 2)
    text = json.dumps([table.lines for table in tables(stand([*left, *right]), rates)])
    assert "a over b" in text


def test_what_is_said_of_a_policy_follows_from_its_intervals(tmp_path: Path) -> None:
    better, unclear = Estimate(0.8, 0.7, 0.9, 3), Estimate(0.55, 0.45, 0.65, 3)
    plan = plan_of(tmp_path)
    best = next(part for part in plan.parts if part.name == "grpo-seed0")
    said = findings(stand([meeting("b", 0, unclear, better, [1.0]), meeting("a", 0, better, better, [1.0])]), best)
    assert said[0].startswith("a: wins 80.0 % [70.0, 90.0] by the judge: better than the start")
    assert said[0].endswith("among answers equally long that is not shown")
    assert "not told apart from the start; it wins by the proxy alone" in said[1]
    assert said[2].endswith(best.weights)


def test_samples_are_the_first_prompts_of_the_lowest_seed_with_everybodys_answer() -> None:
    share = Estimate(0.5, 0.4, 0.6, 1)
    shown = choose_samples([meeting(name, seed, share, share, [1.0] * 6) for seed in (1, 0) for name in "ab"])
    assert [sample.question for sample in shown] == ["q0", "q1", "q2", "q3"]
    assert [sample.gold for sample in shown] == ["gold 0", "gold 1", "gold 2", "gold 3"]
    assert [(answer.who, answer.text) for answer in shown[0].answers] == [("start", "no"), ("a", "a"), ("b", "b")]


def test_damaged_records_are_one_message(tmp_path: Path) -> None:
    for content in (None, "{", '{"results": {}}'):
        if content is not None:
            (tmp_path / "results.json").write_text(content)
            (tmp_path / "items.jsonl").write_text("")
        with pytest.raises(DataError, match="its files are damaged"):
            read_meeting(tmp_path, "a", 0)


WRITTEN: dict[str, Any] = {
    "results": {"characters_a": 100.0, "characters_b": 90}
    | {f"{name}{end}": 0.5 for name in ("win_rate", "kl_ab") for end in ("", "_low", "_high")},
    "others": {"p": {"win_rate": 0.6, "win_rate_low": 0.5, "win_rate_high": 0.7}},
}


def read_written(folder: Path, results: Any, item: Any) -> Meeting:
    for name, content in (("results.json", results), ("items.jsonl", item)):
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode() + b"\n")
    return read_meeting(folder, "a", 0)


def test_a_contest_that_none_has_written_is_one_message(tmp_path: Path) -> None:
    good = answered(0, 3.0, 0.0)
    whole = read_written(tmp_path, WRITTEN, good)
    assert whole.items == [good]
    older = {key: value for key, value in good.items() if key != "answer"}
    assert read_written(tmp_path, WRITTEN, older).items == [good | {"answer": None}]
    read_written(tmp_path, WRITTEN, good)
    assert whole.measures["length_ratio"].mean == pytest.approx(100 / 90)
    changes: list[Any] = [b"[" * 100_000, b"1" * 5000, [], {"results": 7}, WRITTEN | {"others": {"p": 7}}]
    numbers = ("win_rate", "kl_ab_high", "characters_a")
    wrong = (None, "0.5", True, [0.5], 10**400, math.inf)
    changes += [WRITTEN | {"results": WRITTEN["results"] | {name: value}} for name in numbers for value in wrong]
    for results in changes:
        with pytest.raises(DataError, match="its files are damaged"):
            read_written(tmp_path, results, good)
    answer = good["a"][0]
    answers = [answer | change for change in ({"score": "1"}, {"score": math.nan}, {"scores": []}, {"text": 7})]
    items = [good | change for change in ({"index": []}, {"question": None}, {"b": []}, *({"a": [x]} for x in answers))]
    for item in (*items, [], b"[" * 100_000):
        with pytest.raises(DataError, match="its files are damaged"):
            read_written(tmp_path, WRITTEN, item)


def test_words_that_no_evaluation_was_started_with(tmp_path: Path) -> None:
    part = next(part for part in plan_of(tmp_path).parts if part.name == "grpo-seed0-contest")
    path, text = part.settings
    path.parent.mkdir(parents=True)
    for content, is_own in ((text.encode(), True), (b"[" * 100_000, False), (b"\xff", False), (b"{}", False)):
        path.write_bytes(content)
        assert (part.conflict() is None) == is_own
    path.unlink()
    path.symlink_to("/dev/zero")
    assert part.conflict() == f"{part.folder}: made with other settings of {part.group}"


def test_shipped_pipelines_can_be_planned(tmp_path: Path) -> None:
    from posttrain.recipes.document import recipe_names

    names = recipe_names("pipeline/")
    assert "pipeline/tiny" in names
    for name in names:
        try:
            plan = load_pipeline(name, folder=tmp_path / "p", num_seeds=1)
        except PosttrainError as error:  # pragma: no cover - shown by name
            pytest.fail(f"{name}: {error}")
        assert len(plan.contests) >= 3
