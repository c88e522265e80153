"""The signature is the schema: options, defaults, refusals with suggestions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest

from posttrain import registry
from posttrain.consent import declare_code
from posttrain.errors import RecipeError, UnallowedCode, UnknownWord
from posttrain.registry import Entry


def sample_word(
    text: str, *, limit: int = 3, mode: Literal["a", "b"] = "a", scale: float
) -> tuple[str, int, str, float]:
    """A word for these tests."""
    return text, limit, mode, scale


WORD = Entry("reward", "sample_word", sample_word, {})


def test_options_fill_defaults_and_bind():
    assert WORD.options({"scale": 2}) == {"limit": 3, "mode": "a", "scale": 2.0}
    assert WORD.bind({"scale": 0.5, "limit": "7"})("x") == ("x", 7, "a", 0.5)
    assert WORD.provided == ("text",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"scale": 1, "limmit": 4},
            r"rewards\.0\.limmit: reward 'sample_word' has no key 'limmit'\. Did you mean 'limit'\?",
        ),
        ({}, r"rewards\.0\.scale: reward 'sample_word' needs this key"),
        ({"scale": "much"}, r"rewards\.0\.scale: .*valid number.*'much'"),
        ({"scale": 1, "mode": "c"}, r"rewards\.0\.mode: Input should be 'a' or 'b'; got 'c'"),
    ],
)
def test_refusals_name_place_cause_and_remedy(given: dict, message: str):
    with pytest.raises(RecipeError, match=message):
        WORD.options(given, "rewards.0")


def test_unknown_names_are_refused_with_a_suggestion():
    declare_code(["no_such_module:f", "posttrain.registry:find_alll"])
    with pytest.raises(UnknownWord, match=r"no advantage named 'normalised'\. Did you mean 'normalized'\?"):
        registry.find("advantage", "normalised")
    with pytest.raises(UnknownWord, match="module 'no_such_module' cannot be imported"):
        registry.find("reward", "no_such_module:f")
    with pytest.raises(UnknownWord, match=r"has no function 'find_alll'\. Did you mean 'find'\?"):
        registry.find("reward", "posttrain.registry:find_alll")


def test_a_users_function_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(text, *, limit: int = 5):\n    return float(len(text) < limit)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UnallowedCode, match=r"'my_rewards:short' is Python code .* --allow-code my_rewards:short"):
        registry.find("reward", "my_rewards:short")
    declare_code("my_rewards:short", tmp_path)
    entry = registry.find("reward", "my_rewards:short")
    assert entry.bind({"limit": 3})("ab") == 1.0
    with pytest.raises(RecipeError, match=r"has no key 'limits'\. Did you mean 'limit'\?"):
        entry.options({"limits": 3})


def test_every_registered_word_is_documented_with_typed_options():
    for kind in registry.HOMES:
        for name, entry in registry.entries(kind).items():
            assert len(entry.doc) > 40, f"{kind} {name} has no docstring"
            for field in entry.options_model().model_fields.values():
                assert field.annotation is not None, f"{kind} {name} has an option without a type"
