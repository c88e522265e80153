"""The signature is the schema: options, defaults, refusals with suggestions."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from posttrain import registry
from posttrain.components import ComponentModules, registered_in
from posttrain.errors import RecipeError, UnallowedCode, UnknownComponent
from posttrain.registry import Entry
from posttrain.untrusted import declare_code
from refusing import refuses


def sample_component(
    text: str,
    *,
    limit: int = 3,
    mode: Literal["a", "b"] = "a",
    scale: float,
    pair: tuple[int, int] = (0, 1),
    names: str | list[str] = "x",
) -> tuple[str, int, str, float]:
    """A word for these tests."""
    return text, limit, mode, scale


WORD = Entry("reward", "sample_component", sample_component, {})


def test_options_fill_defaults_and_bind():
    assert WORD.options({"scale": 2}) == {"limit": 3, "mode": "a", "scale": 2.0, "pair": (0, 1), "names": "x"}
    assert WORD.bind({"scale": 0.5, "limit": "7"})("x") == ("x", 7, "a", 0.5)
    assert WORD.provided == ("text",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 1, "limmit": 4}, "rewards.0.limmit"),
        ({"scale": "much"}, "rewards.0.scale"),
        ({"scale": 1, "pair": [1]}, "rewards.0.pair"),
        ({"scale": 1, "names": 5}, "rewards.0.names"),
        ({"scale": 1, "mode": "c"}, "rewards.0.mode"),
    ],
)
def test_refusals_name_place_cause_and_remedy(given: dict, message: str):
    with refuses(RecipeError, message):
        WORD.options(given, "rewards.0")


def test_unknown_names_are_refused_with_a_suggestion():
    declare_code(["no_such_module:f", "posttrain.registry:findd"])
    with refuses(UnknownComponent, "'normalised'", "'normalized'"):
        registry.find("advantage", "normalised")
    with refuses(UnknownComponent, "'no_such_module'"):
        registry.find("reward", "no_such_module:f")
    with refuses(UnknownComponent, "'findd'", "'find'"):
        registry.find("reward", "posttrain.registry:findd")


def test_find_removed_name_states_what_to_use():
    with refuses(UnknownComponent, "eval:", "'llmbar'"):
        registry.find("task", "llmbar", "eval")


def test_a_users_function_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(text, *, limit: int = 5):\n    return float(len(text) < limit)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with refuses(UnallowedCode, "'my_rewards:short'", "--allow-code my_rewards:short"):
        registry.find("reward", "my_rewards:short")
    declare_code("my_rewards:short", tmp_path)
    entry = registry.find("reward", "my_rewards:short")
    assert entry.bind({"limit": 3})("ab") == 1.0
    with refuses(RecipeError, "'limits'", "'limit'"):
        entry.options({"limits": 3})


def test_every_registered_word_is_documented_with_typed_options():
    for kind in registry.ALL_KINDS:
        for name, entry in registry.entries(kind).items():
            assert len(entry.doc) > 40, f"{kind} {name} has no docstring"
            for field in entry.options_model.model_fields.values():
                assert field.annotation is not None, f"{kind} {name} has an option without a type"


PACKAGE = Path(registry.__file__).parent


def test_component_modules_are_those_that_register_it() -> None:
    """What is found in the source is what is registered when every module is imported."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "register(" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(("posttrain", *path.relative_to(PACKAGE).with_suffix("").parts)))
    registered = {
        (kind, name, entry.function.__module__)
        for kind, entries in registry._ENTRIES.items()
        for name, entry in entries.items()
        if entry.function.__module__.startswith("posttrain.")
    }
    found = {(kind, name, module) for kind, modules in ComponentModules().items() for name, module in modules.items()}
    assert found == registered
    assert {kind for kind, _, _ in found} == set(registry.ALL_KINDS)


def test_registered_in_finds_decorated_functions_at_the_left_margin_with_their_names() -> None:
    source = '''
@register("reward")
def first(text):
    """@register("reward")
    def not_this(text): ..."""

@register(
    "task",
    held_out="test",
)
@row_task("hub", name="not this")
def second(row): ...

@register("engine", name="third-one", takes_weights=True)
class Third: ...

    @register("reward")
    def inner(text): ...

@other("reward")
def other(text): ...
'''
    assert registered_in(source) == [("reward", "first"), ("task", "second"), ("engine", "third-one")]


def test_built_in_batch_fields_are_in_the_order_of_the_source() -> None:
    """The order in which fields are filled decides the bits of a run."""
    assert registry.built_in("batch_field") == [
        "old_logprobs",
        "ref_logprobs",
        "correction",
        "teacher_logprobs",
        "teacher_ids",
        "old_values",
        "kl_baseline",
        "policy_logprobs",
        "clip_cov_tokens",
        "kl_cov_tokens",
        "transport_shift",
    ]


def test_a_word_is_found_without_its_neighbours_and_a_slip_without_any():
    code = """
import sys
from posttrain import registry
from posttrain.errors import UnknownComponent
try:
    registry.find("task", "stoires")
except UnknownComponent as error:
    assert "Did you mean 'stories'? Known: aime24, " in str(error), error
assert not any(m.startswith("posttrain.data") for m in sys.modules)
registry.find("task", "gsm8k")
assert "posttrain.data.stories" not in sys.modules
assert "posttrain.data.preferences" not in sys.modules
print(*registry.names("advantage"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(registry.entries("advantage"))


def test_a_word_belongs_to_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with refuses(RecipeError, "'grpo'", ".policy_gradient; give"):
        registry.register("objective", name="grpo")(sample_component)
    (tmp_path / "second_grpo.py").write_text(
        "from posttrain.registry import register\n\n@register('objective')\ndef grpo(outputs, batch):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    declare_code("second_grpo:grpo", tmp_path)
    with refuses(UnknownComponent, "second_grpo", "'grpo'"):
        registry.find("objective", "second_grpo:grpo")
