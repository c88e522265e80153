"""Names of other libraries lead to the key that is meant here, and to a value that it takes, or are not offered."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from posttrain import registry
from posttrain.api.inputs import overrides_of
from posttrain.cli import main
from posttrain.errors import RecipeError, UnknownComponent
from posttrain.other_names import OTHER_NAMES, answer_other_name, answer_spelling
from posttrain.other_names.absent import METHODS, OPTIONS
from posttrain.other_names.answers import NOT_NEEDED, SAID
from posttrain.other_names.command_names import COMPONENTS
from posttrain.other_names.keys import CARRIERS, FAMILIES, KEYS
from posttrain.other_names.terms import TERMS
from posttrain.recipes.recipe import COMPONENT_KINDS, Recipe, load_recipe
from posttrain.registry import suggest_key
from refusing import refuses

KEY = re.compile(r"\b(?:[a-z]\w+\.)+[a-z]\w+\b")


def is_key(key: str) -> bool:
    """Return whether a recipe has the key, or an option of some component that may stand there."""
    if key.startswith("--") or key == "tools":
        return True
    model: type[BaseModel] = Recipe
    parts = key.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() or part == "NAME":  # an entry of a list
            continue
        path = ".".join(parts[:i])
        if path in COMPONENT_KINDS or path in ("rewards.0", "rewards.NAME"):
            kind = COMPONENT_KINDS.get(path, "reward")
            found = (part in entry.options_model.model_fields for entry in registry.entries(kind).values())
            return part in ("name", "weight") or any(found)
        if part not in model.model_fields:
            return False
        kinds = [model.model_fields[part].annotation, *getattr(model.model_fields[part].annotation, "__args__", ())]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return True


def test_other_names_lead_to_keys_that_exist() -> None:
    named = {key for answer in OTHER_NAMES.values() for key in (KEY.findall(answer) if " " in answer else [answer])}
    keys = {key for key in named if not key.endswith((".jsonl", ".json")) and not key.startswith("pt.")}
    assert len(keys) > 60
    assert [key for key in sorted(keys) if not is_key(key)] == []


# One name for every kind of answer, and a word of the right one: a key, the key of a path, of a section, of a family,
# a method, a component with its option, an option of the command line, what needs no key, and what is not offered.
KNOWN = {
    "learning_rate": "train.lr",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "critic.optim.lr": "head.lr_ratio",
    "fsdp_new_option": "scale.sharding",
    "vllm_top_k": "rollout.top_k",
    "vllm_new_option": "serve-command",
    "importance_sampling_level": "gspo",
    "dataset_text_field": "prompt.template: document",
    "output_dir": "--runs-dir",
    "callbacks": "on_step=",
    "GRPOTrainer": "rl/grpo",
    "remove_unused_columns": "meta",
    "sync_ref_model": "not offered",
    "galore_update_interval": "not offered",
}


def test_names_of_other_libraries_lead_to_the_right_key() -> None:
    said = {name: answer_other_name(name) or answer_spelling(name) for name in KNOWN}
    assert {name: said[name] for name, word in KNOWN.items() if word not in said[name]} == {}


def test_families_have_an_answer_and_take_no_key_of_ours() -> None:
    assert [name for name in {**FAMILIES, **CARRIERS} if name not in OTHER_NAMES] == []
    keys = {key.rpartition(".")[2] for key in KEYS} | set(Recipe.model_fields)
    assert {key: answer_other_name(key) for key in keys if key not in OTHER_NAMES and answer_other_name(key)} == {}
    for key in ("model.adapter.nothing", "rollout.engine.nothing", "train.nothing", "eval.nothing"):
        assert answer_other_name(key) == ""


def test_name_that_is_ours_is_not_answered() -> None:
    assert answer_other_name("train.num_epochs") == answer_other_name("objective") == answer_other_name("qwertz") == ""
    assert answer_other_name("model.adapter.nothing") == "", "a key of ours, whose section is no name of others"


@pytest.mark.parametrize(
    ("kind", "name", "ours"),
    [
        ("reward", "accuracy_reward", "correct"),
        ("reward", "think_format_reward", "xml_format"),
        ("objective", "sigmoid", "dpo"),
        ("advantage", "RLOO", "leave_one_out"),
        ("task", "json", "jsonl"),
    ],
)
def test_component_that_is_called_otherwise_elsewhere_is_answered_by_name(kind: str, name: str, ours: str) -> None:
    with pytest.raises(UnknownComponent, match=f"This is called {ours} here"):
        registry.find(kind, name)


def test_components_of_the_table_exist() -> None:
    first = {
        (kind, re.split(r"[,:]", ours.removeprefix("{name: "))[0]) for kind, rows in COMPONENTS.items() for ours in rows
    }
    assert {(kind, ours) for kind, ours in first if ours not in registry.names(kind)} == set()


@pytest.mark.parametrize(
    ("name", "ours"), [("ppo_clip_eps", "objective.clip_low"), ("entropy_coeffs", "regularize.entropy_coef")]
)
def test_another_spelling_of_a_name_of_the_table_is_answered(name: str, ours: str) -> None:
    assert name not in OTHER_NAMES
    assert ours in suggest_key(name, Recipe.model_fields)


def test_a_name_has_one_answer() -> None:
    tables = (KEYS, SAID, NOT_NEEDED, OPTIONS, METHODS, TERMS)
    listed = [name for table in tables for names in table.values() for name in names.split()]
    assert len(listed) > 2000
    assert sorted({name for name in listed if listed.count(name) > 1}) == []


# A recipe, and what is set in it before, such that every component of the table may stand in one of them.
BASES: dict[str, tuple[str, dict[str, str]]] = {
    "rollout": ("tiny/grpo", {}),
    "rows": ("tiny/sft", {}),
    "file": ("tiny/sft", {"task": "{name: jsonl, path: rows.jsonl}"}),
    "vllm": ("tiny/grpo", {"rollout.engine.name": "vllm", "rollout.engine.url": "http://localhost:8000"}),
    "own vllm": ("tiny/grpo", {"rollout.engine.name": "vllm"}),
    "tools": ("tiny/grpo-calculator", {}),
    "ppo": ("rl/ppo", {}),
    "dpo": ("preference/dpo", {}),
    "rm": ("tiny/rm", {}),
    "teacher": ("distillation/reverse-kl", {}),
    "adapter": ("tiny/sft", {"model.adapter.kind": "lora"}),
    "sampled": ("tiny/grpo", {"eval.temperature": "1.0"}),
    "in reward": ("tiny/grpo", {"kl_in_reward.weight": "0.05"}),
    "corrected": ("tiny/grpo", {"rollout.old_logprobs": "trainer"}),
}


def accepts(base: str, key: str, value: str) -> str:
    """Return nothing if a recipe takes the value, else what it says."""
    recipe, before = BASES[base]
    try:
        load_recipe(recipe, [*before.items(), (key, value)]).resolve()
    except RecipeError as error:
        return str(error)
    return ""


# A key with its value in a sentence: ``model.load_bits: 4``, ``track: {name: wandb, project: NAME}``.
SET = re.compile(
    r"\b((?:[a-z]\w*\.)*[a-z]\w*): (\{.*?\}(?=[,;) ]|$)|\[.*?\]|(?:true|null|\d+|[a-z0-9][\w.-]*\w)\b)(?!:)"
)
# Values that need a second key, which the refusal names.
INCOMPLETE = {("task", "jsonl"): "task.path", ("task", "preferences"): "task.path", ("task", "mixture"): "task.parts"}


def test_every_value_in_a_sentence_of_the_table_is_taken_by_a_recipe() -> None:
    answers = {*OTHER_NAMES.values(), *(ours for rows in COMPONENTS.values() for ours in rows)}
    pairs = {pair for answer in answers for pair in SET.findall(answer) if pair[0].split(".")[0] in Recipe.model_fields}
    pairs = {(key, value) for key, value in pairs if "module:function" not in value and value not in ("module", "the")}
    assert len(pairs) > 60
    refused = {}
    for pair in pairs:
        said = [accepts(base, *pair) for base in BASES]
        if all(said) and INCOMPLETE.get(pair, "?") not in " ".join(said):
            refused[pair] = said[0]
    assert refused == {}


@pytest.mark.parametrize(("kind", "name"), [("objective", "gdpo"), ("optimizer", "sophia"), ("engine", "sglang")])
def test_component_that_we_do_not_have_is_not_offered(kind: str, name: str) -> None:
    with refuses(UnknownComponent, "not offered") as caught:
        registry.find(kind, name)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [("objective", "gxpo"), ("optimizer", "muonx"), ("task", "gsm9")])
def test_unknown_component_gets_no_look_alike(kind: str, name: str) -> None:
    with refuses(UnknownComponent, name) as caught:
        registry.find(kind, name)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["sync_ref_model", "num_generations", "learnig_rate", "GRPOTrainer"])
def test_a_name_has_the_same_answer_in_recipe_command_python_and_explain(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answer_other_name(name) or answer_other_name("learning_rate")
    with pytest.raises(RecipeError) as in_recipe:
        load_recipe("tiny/grpo", [(name, "1")])
    with pytest.raises(RecipeError) as in_python:
        overrides_of({name: 1})
    assert main(["train", "tiny/grpo", f"--{name}", "1"]) == 2
    command = " ".join(capsys.readouterr().err.split())
    main(["explain", name])
    captured = capsys.readouterr()
    explained = " ".join((captured.out + captured.err).split())
    said = [str(in_recipe.value), str(in_python.value), command, explained]
    assert [one for one in said if answer.strip() not in one] == []
