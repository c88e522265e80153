"""An option that a run says does nothing changes no bit of its weights, and changes them in a run that says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from closeness import rounding
from posttrain.recipes.inert import describe_inert_options, find_inert_options
from posttrain.recipes.recipe import Recipe
from posttrain.training.checks import resolve_components
from small_runs import one_layer_recipe, run, save_perturbed

SEVERAL = {"ppo_epochs": 2, "num_minibatches": 2, "steps": 6}  # updates of one batch of answers
PLAIN = {"name": "adamw", "eps": 1.0}  # steps of the size of the gradient, which amplify no rounding
SHORT = {"max_tokens": 8}


@dataclass(frozen=True)
class Case:
    """An option at two values, in a run in which it does nothing and in one in which it acts.

    ``idle`` and ``acting``: changes of a small recipe of ``kind``. ``is_exact``: no bit changes where it is idle.
    """

    key: str
    values: tuple[object, object]
    idle: Mapping[str, Any]
    acting: Mapping[str, Any] | None  # none where its own values switch it off, or no model here takes several turns
    kind: str = "grpo"
    is_exact: bool = True
    base: Mapping[str, Any] = field(default_factory=dict)


def ratio(objective: str, option: str, *values: object, **more: Any) -> Case:
    """An option that acts where the ratio moves."""
    first, second = values
    base = {"objective": {"name": objective}, "rollout": SHORT} | more.pop("base", {})
    return Case(f"objective.{option}", (first, second), {}, {"train": SEVERAL}, base=base, **more)


GROUPS = {"rollout": SHORT | {"group_size": 4}}
TARGET = {"kl_in_reward": {"weight": 0.5}}
CORRECTED = {"rollout": SHORT | {"old_logprobs": "trainer"}}
STALE = {"rollout": SHORT | {"old_logprobs": "trainer", "staleness": 1}}
CASES: dict[str, Case] = {
    "grpo clip_low": ratio("grpo", "clip_low", 0.2, 0.001),
    "grpo clip_high": ratio("grpo", "clip_high", 0.2, 0.001),
    "grpo clip_low beyond 1": Case(
        "objective.clip_low", (1.0, 1.5), {"train": SEVERAL}, None, base={"objective": "grpo", "rollout": SHORT}
    ),
    "gspo clip_low": ratio("gspo", "clip_low", 3e-4, 2e-1),
    "gspo clip_high": ratio("gspo", "clip_high", 4e-4, 2e-1),
    "gspo_token clip_low": ratio("gspo_token", "clip_low", 3e-4, 2e-1),
    "gspo_token clip_high": ratio("gspo_token", "clip_high", 4e-4, 2e-1),
    "cispo clip_low": ratio("cispo", "clip_low", 0.5, 0.001),
    "cispo clip_high": ratio("cispo", "clip_high", 4.0, 0.001),
    "grpo clip_max": ratio("grpo", "clip_max", 3.0, 1.001),
    "dppo_tv clip_low": ratio("dppo_tv", "clip_low", 0.15, 0.001),
    "dppo_tv clip_high": ratio("dppo_tv", "clip_high", 0.15, 0.001),
    "dppo_kl clip_low": ratio("dppo_kl", "clip_low", 0.05, 0.001),
    "dppo_kl clip_high": ratio("dppo_kl", "clip_high", 0.05, 0.001),
    "dro beta": ratio("dro", "beta", 0.05, 1.0, is_exact=False),
    "clip_cov clip_low": ratio("clip_cov", "clip_low", 0.2, 0.001),
    "clip_cov clip_high": ratio("clip_cov", "clip_high", 0.2, 0.001),
    "kl_cov share": ratio("kl_cov", "share", 0.01, 0.5),
    "kl_cov penalty": ratio("kl_cov", "penalty", 1.0, 0.1),
    "off_policy_sequence threshold": Case(
        "masks.0.threshold",
        (0.001, 1.0),
        {},
        {"train": SEVERAL},
        base={"masks": ["off_policy_sequence"], "rollout": SHORT},
    ),
    "top_entropy share": Case("masks.0.share", (1.0, 1.0), {}, None, base={"masks": ["top_entropy"], "rollout": SHORT}),
    "reference.every": Case(
        "reference.every",
        (3, 5),
        {},
        {"train": {"steps": 6}},
        base={"reference": {"mixing": 0.6}, "regularize": {"kl_coef": 0.5}, "rollout": SHORT},
    ),
    "reference.mixing": Case(
        "reference.mixing",
        (0.2, 1.0),
        {"reference": {"every": 3}},
        {"reference": {"every": 1}},
        base={"regularize": {"kl_coef": 0.5}, "rollout": SHORT},
    ),
    "truncated_divisor": Case(
        "rollout.truncated_divisor",
        ("kept", "all"),
        {},
        {"rollout": {"mask_truncated": True}},
        base={
            "model": {"name": "tiny-sft"},
            "rollout": {"max_tokens": 20, "temperature": 1.3},
            "aggregate": "sequence_mean",
            "optimizer": PLAIN,
        },
    ),
    "f_dpo alpha": Case(
        "objective.alpha",
        (0.5, 0.1),
        {"objective": {"name": "f_dpo", "divergence": "jensen_shannon"}},
        {"objective": {"name": "f_dpo", "divergence": "alpha"}},
        kind="judged",
        base={"train": {"lr": 1e-4}},
    ),
    "gmpo clip": ratio("gmpo", "clip", 0.4, 0.001),
    "ppo clip_low": ratio("ppo", "clip_low", 0.2, 0.001),
    "ppo clip_high": ratio("ppo", "clip_high", 0.2, 0.001),
    "ppo value_clip": ratio("ppo", "value_clip", 0.2, 0.001),
    "ppo value_clip without value loss": Case(
        "objective.value_clip",
        (0.2, 0.001),
        {"objective": {"name": "ppo", "value_weight": 0.0}},
        {"objective": {"name": "ppo"}},
        base={"rollout": SHORT, "train": SEVERAL},
    ),
    "sapo tau_positive": ratio("sapo", "tau_positive", 1.0, 2.0, is_exact=False),
    "sapo tau_negative": ratio("sapo", "tau_negative", 1.05, 2.0, is_exact=False),
    "sdpo ratio_cap": ratio(
        "sdpo",
        "ratio_cap",
        2.0,
        1.001,
        base={"teacher": {"name": "self", "top_k": 4}, "rollout": SHORT | {"label_above": 0.25}},
    ),
    "on_policy_distillation clip": ratio(
        "on_policy_distillation", "clip", 0.2, 0.001, base={"teacher": {"name": "PERTURBED"}}
    ),
    "distillation jsd_weight": Case(
        "objective.jsd_weight",
        (0.5, 0.1),
        {"objective": {"name": "distillation", "divergence": "reverse_kl"}},
        {"objective": {"name": "distillation", "divergence": "jsd"}},
        base={"teacher": {"name": "PERTURBED", "top_k": 4}, "rollout": SHORT},
    ),
    "teacher.top_k": Case(
        "teacher.top_k",
        (4, 8),
        {"objective": "on_policy_distillation"},
        {"objective": "distillation"},
        base={"teacher": {"name": "PERTURBED"}, "rollout": SHORT},
    ),
    "cpo nll_length_normalized": Case(
        "objective.nll_length_normalized",
        (True, False),
        {"objective": {"name": "cpo", "nll_weight": 0.0}},
        {"objective": {"name": "cpo", "nll_weight": 1.0}},
        kind="judged",
    ),
    "mpo beta": Case(
        "objective.beta",
        (0.1, 1.0),
        {"objective": {"name": "mpo", "preference_weight": 0.0, "quality_weight": 0.0}},
        {"objective": {"name": "mpo", "preference_weight": 0.0, "quality_weight": 0.5}},
        kind="judged",
    ),
    "kl_estimator": Case(
        "regularize.kl_estimator",
        ("k3", "k2"),
        {"regularize": {"kl_coef": 0.0}},
        {"regularize": {"kl_coef": 0.5}},
        base={"rollout": SHORT},
    ),
    "kl_coef": Case(
        "regularize.kl_coef",
        (0.1, 5.0),
        {"train": {"steps": 1}},
        {"train": {"steps": 3}},
        base={"rollout": SHORT},
        is_exact=False,
    ),
    "kl_in_reward.weight": Case(
        "kl_in_reward.weight",
        (0.1, 5.0),
        {"train": {"steps": 1}},
        {"train": {"steps": 3}},
        base={"rollout": SHORT, "advantage": "centered", "kl_in_reward": {"estimator": "k1"}},
        is_exact=False,
    ),
    "kl_in_reward.horizon": Case(
        "kl_in_reward.horizon",
        (100, 400),
        {},
        {"kl_in_reward": {"target": 0.001}},
        base={"rollout": SHORT, "kl_in_reward": {"weight": 0.5}},
    ),
    "kl_in_reward.estimator": Case(
        "kl_in_reward.estimator",
        ("k1", "k3"),
        {"kl_in_reward": {"weight": 0.0}},
        {"kl_in_reward": {"weight": 0.5}},
        base={"rollout": SHORT},
    ),
    "max_rounds": Case(
        "rollout.max_rounds",
        (1, 4),
        {},
        {"rollout": {"drop_uniform_groups": True}, "rewards": ["small_runs:many_vowels"]},
        base={"rollout": SHORT},
    ),
    "uniform_by": Case(
        "rollout.uniform_by",
        ("reward", "small_runs:many_vowels"),
        {},
        {"rollout": {"drop_uniform_groups": True}},
        base={"rollout": SHORT, "rewards": ["small_runs:vowel_share", "small_runs:many_vowels"]},
    ),
    "label_above": Case(
        "rollout.label_above",
        (0.25, 0.9),
        {},
        {"objective": "kto", "rollout": {"select": "every"}},
        base={"rollout": SHORT},
    ),
    "staleness": Case(
        "rollout.staleness", (0, 1), {"train": {"steps": 1}}, {"train": {"steps": 3}}, base={"rollout": SHORT}
    ),
    "old_logprobs that nothing reads": Case(
        "rollout.old_logprobs",
        ("sampler", "trainer"),
        {"objective": "reinforce"},
        {"model": {"dtype": "bf16", "adapter": {"rank": 2}}, "objective": {"name": "gspo"}},
        base={"rollout": SHORT},
    ),
    "old_logprobs of the same": Case(
        "rollout.old_logprobs",
        ("sampler", "trainer"),
        {"objective": "grpo"},
        {"model": {"dtype": "bf16", "adapter": {"rank": 2}}, "objective": {"name": "gspo"}},
        base={"rollout": SHORT},
        is_exact=False,
    ),
    "token_tis cap": Case("correction.cap", (2.0, 1.001), CORRECTED, STALE, base={"correction": "token_tis"}),
    "sequence_tis cap": Case("correction.cap", (2.0, 1.001), CORRECTED, STALE, base={"correction": "sequence_tis"}),
    "icepop low": Case("correction.low", (0.5, 0.999), CORRECTED, STALE, base={"correction": "icepop"}),
    "icepop high": Case("correction.high", (5.0, 1.001), CORRECTED, STALE, base={"correction": "icepop"}),
    "geometric_mask low": Case("correction.low", (0.0, 0.999), CORRECTED, STALE, base={"correction": "geometric_mask"}),
    "geometric_mask high": Case(
        "correction.high", (1.001, 100.0), CORRECTED, STALE, base={"correction": "geometric_mask"}
    ),
    "geometric_mask weigh": Case(
        "correction.weigh",
        ("none", "token"),
        CORRECTED,
        STALE,
        base={"correction": {"name": "geometric_mask", "low": 0.5, "high": 2.0}},
        is_exact=False,
    ),
    "geometric_mask cap of nothing": Case(
        "correction.cap",
        (2.0, 1.001),
        {"correction": {"name": "geometric_mask", "low": 0.5, "high": 2.0}},
        {"correction": {"name": "geometric_mask", "low": 0.5, "high": 2.0, "weigh": "token"}},
        base=STALE,
    ),
    "best_of keep": Case(
        "rollout.select.keep",
        (4, 8),
        {"rollout": {"group_size": 4}},
        {"rollout": {"group_size": 8}},
        base={"objective": "cross_entropy", "rollout": SHORT | {"select": {"name": "best_of"}}},
    ),
    "balanced keep": Case(
        "rollout.select.keep",
        (2, 4),
        {"rollout": {"group_size": 4}},
        {"rollout": {"group_size": 16}},
        base={
            "objective": "kto",
            "rollout": SHORT | {"label_above": 0.25, "select": {"name": "balanced", "threshold": 0.25}},
            "rewards": ["small_runs:vowel_share"],
        },
    ),
    "right_and_wrong num_pairs": Case(
        "rollout.select.num_pairs",
        (2, 4),
        {"rollout": {"group_size": 4}},
        {"rollout": {"group_size": 16}},
        base={
            "objective": "dpo",
            "rollout": SHORT | {"select": {"name": "right_and_wrong", "threshold": 0.25}},
        },
    ),
    "turn_normalized gamma": Case(
        "advantage.gamma",
        (1.0, 0.5),
        {},
        None,
        base={"advantage": {"name": "turn_normalized"}, "rollout": SHORT},
    ),
    "batch_normalized center": Case(
        "advantage.center",
        ("batch", "group"),
        {"rollout": {"num_prompts": 1}},
        {"rollout": {"num_prompts": 4}},
        base={"advantage": {"name": "batch_normalized"}, "rollout": SHORT},
        is_exact=False,
    ),
    "a reward's weight": Case(
        "rewards.0.weight",
        (1.0, 3.0),
        {"advantage": "batch_normalized"},
        {"advantage": "centered"},
        base={"rewards": [{"name": "small_runs:vowel_share"}], "rollout": SHORT},
        is_exact=False,
    ),
    "overlong limit": Case(
        "rewards.1.limit",
        (40, 64),
        {"rollout": {"max_tokens": 1}},
        {"rollout": {"max_tokens": 8}},
        base={
            "rewards": ["small_runs:vowel_share", {"name": "overlong", "limit": 64, "cache": 39}],
            "advantage": "raw",
        },
    ),
    "stories worked": Case(
        "task.worked", (1.0, 0.0), {"kind": "grpo"}, {"kind": "sft"}, base={"task": {"name": "stories", "size": 32}}
    ),
    "schedule within the warm-up": Case(
        "train.schedule",
        ("constant", "cosine"),
        {"train": {"warmup_steps": 4}},
        {"train": {"warmup_steps": 1}},
        kind="sft",
    ),
    "schedule to the same": Case(
        "train.schedule",
        ("linear", "cosine"),
        {"train": {"min_lr_ratio": 1.0}},
        {"train": {"min_lr_ratio": 0.1}},
        kind="sft",
    ),
    "min_lr_ratio of a constant": Case(
        "train.min_lr_ratio",
        (0.0, 0.5),
        {"train": {"schedule": "constant"}},
        {"train": {"schedule": "linear"}},
        kind="sft",
    ),
    "muon's AdamW": Case(
        "optimizer.adamw_lr_ratio",
        (1.0, 3.0),
        {"model": {"adapter": {"rank": 2}}},
        {},
        kind="sft",
        base={"optimizer": {"name": "muon"}},
    ),
}


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, sections merged; a component that is named anew replaces the one below."""
    merged = dict(below)
    for name, value in above.items():
        known = merged.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            merged[name] = laid_over(known, value)
        elif isinstance(value, str) and isinstance(known, Mapping) and "name" in known:
            merged[name] = {"name": value}
        else:
            merged[name] = value
    return merged


def with_value(changes: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return the changes with the option at a dotted key set."""
    first, _, rest = key.partition(".")
    if not rest:
        return changes | {first: value}
    below = changes.get(first, {})
    if isinstance(below, str):
        below = {"name": below}
    if isinstance(below, list):
        number, _, name = rest.partition(".")
        entries = [dict(entry) if isinstance(entry, Mapping) else {"name": entry} for entry in below]
        entries[int(number)][name] = value
        return changes | {first: entries}
    return changes | {first: with_value(dict(below), rest, value)}


def recipes_of(case: Case, changes: Mapping[str, Any], teacher: str) -> list[Recipe]:
    """Return the recipe at each value of the option."""
    merged = laid_over({"train": {"steps": 3, "lr": 3e-3, "save_every": 0}}, laid_over(case.base, changes))
    kind = merged.pop("kind", case.kind)
    if not case.is_exact:
        merged["optimizer"] = PLAIN
        merged["train"] = merged["train"] | {"lr": 0.3, "max_grad_norm": 1.0}
    if merged.get("teacher", {}).get("name") == "PERTURBED":
        merged["teacher"] = merged["teacher"] | {"name": teacher}
    return [one_layer_recipe(kind, **with_value(merged, case.key, value)) for value in case.values]


def inert_keys(recipe: Recipe) -> set[str]:
    return {option.key for option in find_inert_options(recipe, resolve_components(recipe).needs)}


def weights_after(recipe: Recipe, folder: Path) -> Tensor:
    """Return all trained weights after the run, in a row."""
    folder.mkdir()
    step = run(folder, recipe).step
    place = folder / "checkpoints" / f"step-{step:06d}"
    names = ("model.safetensors", "adapter_model.safetensors", "heads.safetensors", "critic.safetensors")
    tensors: dict[str, Tensor] = {}
    for name in names:
        if (place / name).is_file():
            tensors |= load_file(place / name)
    assert tensors
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_perturbed(tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("name", CASES)
def test_option_is_said_to_do_nothing_where_it_is_idle_only(name: str) -> None:
    case = CASES[name]
    for recipe in recipes_of(case, case.idle, "tiny"):
        assert case.key in inert_keys(recipe)
        exact = [o.is_exact for o in find_inert_options(recipe, resolve_components(recipe).needs) if o.key == case.key]
        assert exact == [case.is_exact]
    if case.acting is not None:
        assert any(case.key not in inert_keys(recipe) for recipe in recipes_of(case, case.acting, "tiny"))


def _check_weights(name: str, teacher: str, folder: Path) -> None:
    case = CASES[name]
    idle = [weights_after(r, folder / f"idle{i}") for i, r in enumerate(recipes_of(case, case.idle, teacher))]
    if case.is_exact:
        assert torch.equal(*idle)
    else:
        steps = recipes_of(case, case.idle, teacher)[0].train.steps
        assert steps is not None
        size = float(idle[0].abs().max())
        assert float((idle[0] - idle[1]).abs().max()) <= rounding(torch.float32, size=size, condition=1000.0 * steps)
    if case.acting is None:
        return
    acting = [weights_after(r, folder / f"acting{i}") for i, r in enumerate(recipes_of(case, case.acting, teacher))]
    assert not torch.equal(*acting)


@pytest.mark.parametrize("name", ["grpo clip_low", "grpo clip_high", "gspo clip_high", "sapo tau_positive"])
def test_weights_of_policy_gradients_change_where_option_acts_only(name: str, teacher: str, tmp_path: Path) -> None:
    _check_weights(name, teacher, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_change_where_option_acts_only(name: str, teacher: str, tmp_path: Path) -> None:
    _check_weights(name, teacher, tmp_path)


def test_line_names_options_of_one_reason_together() -> None:
    recipe = one_layer_recipe("grpo")
    lines = describe_inert_options(find_inert_options(recipe, resolve_components(recipe).needs))
    assert [line.partition(":")[0] for line in lines] == ["objective.clip_low, clip_high do nothing"]
    assert "train.num_minibatches 1" in lines[0]
