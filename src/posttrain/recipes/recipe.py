"""A recipe: YAML plus overrides, strict, with a resolved dump that reruns it.

A recipe names *words* (objective, advantage, reward, task, ...), whose options are checked against
the signature of the function of that name, and a few ``sections`` for the machinery.
Unknown keys are refused with a suggestion and the line in the file. No torch is imported here;
``Recipe.resolve`` imports the modules of the words that the recipe names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from posttrain import registry
from posttrain.consent import declare_code, is_declared, refuse_remote_code, without_remote_code
from posttrain.errors import RecipeError, UnallowedCode
from posttrain.recipes.files import apply_override, extend, merge, parse_yaml, recipe_names, recipe_text
from posttrain.recipes.sections import (
    AdapterSection,
    DataSection,
    EvalSection,
    HeadSection,
    InitSection,
    KLInRewardSection,
    ModelSection,
    PromptSection,
    RewardWord,
    RolloutSection,
    Section,
    TeacherSection,
    TokenizerSection,
    TrainSection,
    Word,
    Words,
    as_list,
)
from posttrain.strict_yaml import write_yaml

__all__ = [
    "AdapterSection",
    "DataSection",
    "EvalSection",
    "HeadSection",
    "InitSection",
    "KLInRewardSection",
    "ModelSection",
    "PromptSection",
    "Recipe",
    "RewardWord",
    "RolloutSection",
    "TeacherSection",
    "TokenizerSection",
    "TrainSection",
    "Word",
    "apply_override",
    "extend",
    "load_recipe",
    "merge",
    "parse_yaml",
    "recipe_names",
    "recipe_text",
    "validate_recipe",
]


WORD_KINDS = {
    "task": "task",
    "objective": "objective",
    "advantage": "advantage",
    "aggregate": "aggregation",
    "correction": "correction",
    "optimizer": "optimizer",
}

# Where a run works, who watches it and what it is called: no part of the fingerprint, and free to change when it is
# resumed (the change is written into its log). Everything else decides what comes out.
PLACE_KEYS = (
    "description",
    "track",
    "model.device",
    "train.device",
    "activations.model.device",
    "rollout.engine.url",
    "rollout.engine.served_name",
    "rollout.engine.timeout_seconds",
    "rollout.engine.retries",
)


class Recipe(Section):
    """One experiment. ``rollout`` makes it reinforcement learning, ``data`` supervised training.

    ``track``: where the metrics are shown besides ``metrics.jsonl``.
    """

    description: str = ""
    model: ModelSection = Field(default_factory=ModelSection)
    task: Word
    prompt: PromptSection = Field(default_factory=PromptSection)
    rewards: Annotated[list[RewardWord], BeforeValidator(as_list)] = Field(default_factory=list)
    rollout: RolloutSection | None = None
    data: DataSection | None = None
    advantage: Word | None = None
    kl_in_reward: KLInRewardSection | None = None
    correction: Word | None = None
    objective: Word
    head: HeadSection | None = None
    teacher: TeacherSection | None = None
    aggregate: Word | None = None
    optimizer: Word = Word(name="adamw")
    train: TrainSection = Field(default_factory=TrainSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    track: Words = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if (self.rollout is None) == (self.data is None):
            raise ValueError("give exactly one of 'rollout' (reinforcement learning) and 'data' (supervised)")
        if self.rollout is not None and not self.rewards:
            self.rewards = [RewardWord(name="correct")]
        for key in ("advantage", "kl_in_reward", "correction"):
            if self.data is not None and getattr(self, key) is not None:
                raise ValueError(f"'{key}' belongs to 'rollout'; a supervised recipe has none")
        if self.correction is not None and self.rollout is not None and self.rollout.old_logprobs != "trainer":
            raise ValueError(
                "'correction' compares the trainer's log-probabilities with the sampler's; "
                "set rollout.old_logprobs to trainer"
            )
        if self.data is not None and self.train.minibatches * self.train.epochs != 1:
            raise ValueError("train.epochs and train.minibatches count passes over a rollout batch; 'data' has none")
        return self

    def resolve(self, *, to_read: bool = False) -> Recipe:
        """The recipe with every word's options checked and all their defaults filled in.

        ``to_read``: nothing is built from it, so a word that would be code that nobody allowed stays as it stands.

        Raises:
            UnknownWord, RecipeError: with the key that is wrong.
            UnallowedCode: a stored recipe names code.
        """

        def _resolve_word(word: Any, kind: str, where: str) -> Any:
            try:
                return complete_word(word, kind, where)
            except UnallowedCode:
                if not to_read:
                    raise
                return word

        resolved = self.model_copy(deep=True)
        if not to_read or is_declared(self.objective.name):
            resolved._fill_defaults()
        for key, kind in WORD_KINDS.items():
            word = getattr(resolved, key)
            if word is not None:
                setattr(resolved, key, _resolve_word(word, kind, key))
        resolved.prompt.template = _resolve_word(resolved.prompt.template, "template", "prompt.template")
        if resolved.rollout is not None:
            resolved.rollout.engine = _resolve_word(resolved.rollout.engine, "engine", "rollout.engine")
            if resolved.rollout.select is not None:
                resolved.rollout.select = _resolve_word(resolved.rollout.select, "selection", "rollout.select")
        resolved.rewards = [_resolve_word(w, "reward", f"rewards.{i}") for i, w in enumerate(resolved.rewards)]
        resolved.eval.tasks = [_resolve_word(w, "task", f"eval.tasks.{i}") for i, w in enumerate(resolved.eval.tasks)]
        resolved.track = [_resolve_word(w, "tracker", f"track.{i}") for i, w in enumerate(resolved.track)]
        return resolved

    def _fill_defaults(self) -> None:
        """Words that follow from the objective: its aggregation, selection, advantage and head."""
        traits = registry.find("objective", self.objective.name, "objective").traits
        level = traits.get("level", "token")
        if self.aggregate is None:
            self.aggregate = Word(name="token_mean" if level == "token" else "unit_mean")
        if self.head is None and traits.get("head") is not None:
            self.head = HeadSection()
        if self.rollout is not None:
            if self.rollout.select is None:
                self.rollout.select = Word(name="best_and_worst" if level == "pair" else "every")
            if self.advantage is None and "advantages" in traits.get("needs", ("advantages",)):
                self.advantage = Word(name="gae" if traits.get("head") == "value" else "normalized")

    @property
    def trains_scorer(self) -> bool:
        """Whether a reward model is trained, which scores answers, and no policy, which writes them.

        Of a stored recipe whose objective may not be imported, its sections tell: a head on data is one that scores.
        """
        traits = registry.traits_of("objective", self.objective.name)
        return self.head is not None and self.data is not None if traits is None else traits.get("head") == "score"

    def dump(self) -> dict[str, Any]:
        """Plain data, without keys that are None by default; a None that was asked for stays."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain

    def to_yaml(self) -> str:
        return write_yaml(self.dump())

    def fingerprint(self) -> str:
        """``fingerprint_of`` the resolved recipe; two runs with it are the same experiment."""
        return fingerprint_of(self.dump())


def fingerprint_of(dump: Mapping[str, Any]) -> str:
    """SHA-256 (16 hex digits) of what decides the result in a resolved recipe's plain data."""
    return hashlib.sha256(json.dumps(decisive(dump), sort_keys=True).encode()).hexdigest()[:16]


def decisive(dump: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A recipe's plain data without the ``PLACE_KEYS``."""
    kept = {key: value for key, value in dump.items() if f"{above}{key}" not in PLACE_KEYS}
    return {k: decisive(v, f"{above}{k}.") if isinstance(v, Mapping) else v for k, v in kept.items()}


def is_place(key: str) -> bool:
    """Whether a dotted key is one of ``PLACE_KEYS``, or lies below one."""
    return any(key == place or key.startswith(f"{place}.") for place in PLACE_KEYS)


def complete_word(word: Any, kind: str, where: str) -> Any:
    """A word with all of its options, which are checked."""
    entry = registry.find(kind, word.name, where)
    options = entry.options(word.options, where)
    fields = entry.options_model().model_fields
    options = {k: v for k, v in options.items() if v is not None or fields[k].default is not None}
    fixed = {name: getattr(word, name) for name in type(word).model_fields}
    return type(word)(**fixed, **json.loads(json.dumps(options)))


def _plain(value: Any) -> Any:
    """A section, word or value as plain data; see ``Recipe.dump``."""
    if isinstance(value, Word):
        return value.model_dump(mode="json")  # its options were sorted out when it was resolved
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        shown = {name: getattr(value, name) for name in fields}
        return {k: _plain(v) for k, v in shown.items() if v is not None or fields[k].default is not None}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def stored_recipe(stored: Mapping[str, Any], place: str) -> Recipe:
    """The recipe that a run has stored, to look things up in: it allows no code, neither its own nor a model's.

    Raises:
        RecipeError: this version does not know its keys.
    """
    return validate_recipe(without_remote_code(stored), place, is_own=False)


def load_recipe(name_or_path: str, overrides: Sequence[tuple[str, str]] = (), *, is_own: bool = True) -> Recipe:
    """Read a recipe, apply dotted overrides, validate. Words are checked by ``resolve``.

    ``is_own``: a file of the user's may name code (``consent``).

    Raises:
        RecipeError: with file, line and key.
    """
    place, text = recipe_text(name_or_path)
    data, lines = parse_yaml(text, place, is_own=is_own)
    if {"methods", "base"} <= data.keys():
        raise RecipeError(f"{place}: this compares several methods; run it with: posttrain compare {name_or_path}")
    if "study" in data:
        raise RecipeError(f"{place}: this is a study of several runs; run it with: posttrain study {name_or_path}")
    if "dictionary" in data:
        raise RecipeError(f"{place}: this trains a dictionary; run it with: posttrain sae train {name_or_path}")
    if "changes" in data:
        raise RecipeError(f"{place}: this compares two models; run it with: posttrain sae diff {name_or_path}")
    data, inherited = extend(data, place, lines, is_own=is_own)
    for key, value in overrides:
        if key == "extends":
            raise RecipeError(
                "command line: extends: only a file extends a recipe; give that recipe's name to begin with"
            )
        apply_override(data, key, value)
    return validate_recipe(data, place, lines, {key for key, _ in overrides}, inherited, is_own=False)


def validate_recipe(
    data: Mapping[str, Any],
    place: str = "recipe",
    lines: Mapping[str, int] | None = None,
    overridden: Sequence[str] | set[str] = (),
    inherited: Mapping[str, str] | None = None,
    *,
    is_own: bool = True,
) -> Recipe:
    """A ``Recipe`` from plain data; errors name ``place``, the line and the key.

    ``inherited``: ``file:line`` of the keys that stand in a recipe below this one. ``is_own``: code that it names is
    allowed by that, as what the caller has written; False of data that a file said.
    """
    if is_own:
        declare_code(data)
    places = dict(inherited or {}) | {key: f"{place}:{line}" for key, line in (lines or {}).items()}

    def line_of(key: str) -> str:
        if key in overridden:
            return "command line: "
        probe = key
        while probe:
            if probe in places:
                return f"{places[probe]}: "
            probe = probe.rpartition(".")[0]
        return f"{place}: "

    refuse_remote_code(data, overridden, line_of)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines_out = []
        for item in error.errors():
            path = [str(part) for part in item["loc"]]
            single = ValidationError.from_exception_data("recipe", [_as_init_error(item)])
            known = _known_keys(path[:-1])
            if len(path) == 1 and path != ["extends"]:
                known.append("extends")  # a file's key, gone by the time that a recipe is checked
            label = f"section {'.'.join(path[:-1])!r}" if path[:-1] else "a recipe"
            lines_out.append(registry.explain_validation(single, known, "", label, line_of))
        raise RecipeError("\n".join(lines_out)) from None


def _as_init_error(item: Any) -> Any:
    if item["type"] in ("extra_forbidden", "missing"):
        return {"type": item["type"], "loc": item["loc"], "input": item["input"]}
    message = item["msg"].removeprefix("Value error, ").replace("{", "(").replace("}", ")")
    return {"type": PydanticCustomError("invalid", message), "loc": item["loc"], "input": item["input"]}


def _known_keys(path: Sequence[str]) -> list[str]:
    model: Any = Recipe
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(model.model_fields) if model is not None else []
