"""Names of other libraries lead to the key that is meant here, and to a value that it takes, or are not offered."""

from __future__ import annotations

import re
from functools import cache

import pytest
import yaml
from pydantic import BaseModel

from names_and_values import BASES, GIVEN_ELSEWHERE, OTHER_VALUES, VALUES
from names_of_configurations import CONFIGURATIONS
from posttrain import registry
from posttrain.api.inputs import overrides_of
from posttrain.cli import main
from posttrain.errors import PosttrainError, RecipeError, UnknownComponent
from posttrain.other_names import OTHER_NAMES, answer_other_name, answer_spelling, answer_value
from posttrain.other_names.absent import METHODS, OPTIONS
from posttrain.other_names.answers import SAID
from posttrain.other_names.command_names import COMPONENTS
from posttrain.other_names.keys import CARRIERS, FAMILIES, KEYS
from posttrain.other_names.not_needed import NOT_NEEDED
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
    "keep_sampling_mask": "rollout.top_p",
    "sampling.top_p": "rollout.top_p",
    "rollout.sampling_params.min_p": "rollout.min_p",
    "ref_adapters": "not offered",
    "galore_update_interval": "not offered",
}


def answers(table: str) -> dict[str, str]:
    """Return the word of the right answer by name."""
    rows = (row.strip().partition(" ") for row in table.replace("\n", "|").split("|") if row.strip())
    return {name: word for name, _, word in rows}


def test_names_of_other_libraries_lead_to_the_right_key() -> None:
    said = {name: answer_other_name(name) or answer_spelling(name) for name in KNOWN}
    assert {name: said[name] for name, word in KNOWN.items() if word not in said[name]} == {}


@pytest.mark.parametrize("library", CONFIGURATIONS)
def test_every_key_of_a_configuration_elsewhere_is_answered(library: str) -> None:
    names = CONFIGURATIONS[library].split()
    assert len(names) > 40
    assert [name for name in names if not (answer_other_name(name) or answer_spelling(name))] == []


def test_families_have_an_answer_and_take_no_key_of_ours() -> None:
    assert [name for name in {**FAMILIES, **CARRIERS} if name not in OTHER_NAMES] == []
    keys = {key.rpartition(".")[2] for key in KEYS} | set(Recipe.model_fields)
    assert {key: answer_other_name(key) for key in keys if key not in OTHER_NAMES and answer_other_name(key)} == {}
    for key in ("model.adapter.nothing", "rollout.engine.nothing", "train.nothing", "eval.nothing"):
        assert answer_other_name(key) == ""


@pytest.mark.parametrize("name", ["strikt", "galor", "log", "client", "weight"])
def test_unknown_name_is_no_beginning_of_a_name_elsewhere(name: str) -> None:
    assert "_" not in suggest_key(name, Recipe.model_fields).partition("Did you mean ")[2].partition("?")[0]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("train.learning-rate", "This is called train.lr here."),
        ("trainer.total_epochs", "This is called train.num_epochs here."),
        ("actor_rollout_ref.rollout.n", "This is called rollout.group_size here."),
        ("beta", "Here it is objective.beta for preferences (dpo)"),
        ("packing", "There is no such key here, and none is needed: rows are always packed"),
        ("output_dir", "Here it is --runs-dir; in Python runs_dir=."),
    ],
)
def test_unknown_key_with_a_name_of_others_is_answered(
    name: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in answer_other_name(name)
    with pytest.raises(RecipeError, match=re.escape(answer)):
        load_recipe("tiny/grpo", [(name.replace("-", "_"), "1")])
    assert main(["train", "tiny/grpo", f"--{name}", "1"]) == 2
    assert answer in " ".join(capsys.readouterr().err.split())


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
    ("name", "ours"),
    [
        ("use_flash_attention", "model.attention: flash_attention_2"),
        ("grad_accumulation", "data.batch_size"),
        ("beta_1", "optimizer.betas"),
        ("ppo_clip_eps", "objective.clip_low"),
        ("actor_num_nodes", "scale.processes"),
        ("entropy_coeffs", "regularize.entropy_coef"),
        ("n_gpus", "scale.processes"),
    ],
)
def test_another_spelling_of_a_name_of_the_table_is_answered(name: str, ours: str) -> None:
    assert name not in OTHER_NAMES
    assert ours in suggest_key(name, Recipe.model_fields)


def test_a_name_has_one_answer() -> None:
    tables = (KEYS, SAID, NOT_NEEDED, OPTIONS, METHODS, TERMS)
    listed = [name for table in tables for names in table.values() for name in names.split()]
    assert len(listed) > 2000
    assert sorted({name for name in listed if listed.count(name) > 1}) == []


def accepts(base: str, key: str, value: str) -> str:
    """Return nothing if a recipe takes the value, else what it says."""
    recipe, before = BASES[base]
    try:
        load_recipe(recipe, [*before.items(), (key, value)]).resolve()
    except PosttrainError as error:
        return str(error)
    return ""


def test_every_key_of_the_table_takes_the_value_that_is_given_elsewhere() -> None:
    assert VALUES.keys() == KEYS.keys()
    named = {(key, OTHER_VALUES[name]) for key, names in KEYS.items() for name in names.split() if name in OTHER_VALUES}
    tried = {*((key, value) for key, (_, value) in VALUES.items()), *named}
    assert {(key, value): said for key, value in tried if (said := accepts(VALUES[key][0], key, value))} == {}
    assert "constant_with_warmup" in accepts("rollout", "train.schedule", "constant_with_warmup")


@cache
def given_elsewhere(key: str, value: str) -> str:
    """Return nothing if a recipe takes the value or says what to give in its place, else what it says."""
    said = accepts(VALUES.get(key, ("rollout", ""))[0], key, value)
    (parsed,) = yaml.safe_load(f"[{value}]")
    answered = answer_value(key, parsed)
    is_answered = re.search(r"This is called|Here it is|not offered|Did you mean|give 'steps' or", said) is not None
    if not said or is_answered or (answered and answered in said):
        return ""
    return said


@pytest.mark.parametrize("library", CONFIGURATIONS)
def test_key_of_a_name_elsewhere_takes_what_is_given_there_or_says_what_to_give(library: str) -> None:
    found = {}
    for name in CONFIGURATIONS[library].split():
        leads = re.fullmatch(r" This is called (\S+) here\.", answer_other_name(name) or answer_spelling(name))
        if leads is not None:
            found[name] = leads[1]
    assert len(found) > 4
    assert {name: key for name, key in found.items() if key not in GIVEN_ELSEWHERE} == {}
    refused = {}
    for name, key in found.items():
        for value in GIVEN_ELSEWHERE[key].split(" | "):
            refused[name, key, value] = given_elsewhere(key, value)
    assert {one: said for one, said in refused.items() if said} == {}


# Names that are spelled as one of ours and mean something else, with a word of the answer.
OTHER_MEANING = """
qat.group_size not offered | quantization.group_size not offered | profiler.warmup_steps not offered
num_rollout train.steps | alpha of LoRA | adapter_name one adapter | n_shot not offered
prompt_format task.prompt_format
reward_model.sandbox_fusion.max_concurrent code_tests | reward.reward_model.model_path reward_model
distillation.teacher_model.model_path teacher.name | distillation.teacher_models teacher.name
env.timeout tool_seconds
weight_broadcast.timeout rollout.engine.timeout_seconds | reward_model.n_gpus_per_node none is needed
distillation.n_gpus_per_node not offered | actor_rollout_ref.rollout.n_gpus_per_node rollout.engine.gpus
actor_rollout_ref.model.lora.dtype none is needed | vllm.dtype rollout.engine.dtype | client.base_url one address
inference.model.dtype rollout.engine.dtype | trl.skip_zero_advantage_batches train.skip_zero_rows
test_datasets name: jsonl | eval.env name: jsonl | data.val_files name: jsonl | dataset_mixer_list_splits task: mixture
"""


def test_name_that_means_something_else_is_answered_by_its_section() -> None:
    wanted = answers(OTHER_MEANING)
    assert {name: answer_other_name(name) for name, word in wanted.items() if word not in answer_other_name(name)} == {}


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


@pytest.mark.parametrize(("kind", "name"), [("objective", "tvpo"), ("optimizer", "sophia"), ("engine", "sglang")])
def test_component_that_we_do_not_have_is_not_offered(kind: str, name: str) -> None:
    with refuses(UnknownComponent, "not offered") as caught:
        registry.find(kind, name)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [("objective", "gxpo"), ("optimizer", "muonx"), ("task", "gsm9")])
def test_unknown_component_gets_no_look_alike(kind: str, name: str) -> None:
    with refuses(UnknownComponent, name) as caught:
        registry.find(kind, name)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["ref_adapters", "num_generations", "sglang", "GRPOTrainer", "learnig_rate"])
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
