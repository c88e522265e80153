"""``min_p``, ``min_tokens``, ``repetition_penalty`` and ``stop`` in Python, on the command line and over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.cli import main
from posttrain.commands.serve.requests import BadRequest, CompletionRequest, read_request
from posttrain.errors import UsageError
from posttrain.sampling.base import DecodingRules, Sampling, read_rules
from refusing import refuses

PROMPT = "Tom has 3 apples and buys 4. How many has he?"


def test_generate_with_rules_answers_accordingly() -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "progress": False}
    (plain,) = pt.generate("tiny-sft", [PROMPT], **options)
    (cut,) = pt.generate("tiny-sft", [PROMPT], stop="<answer>", **options)
    assert cut.text.endswith("<answer>")
    assert (cut.finish, plain.text.startswith(cut.text)) == ("stop", True)
    (longer,) = pt.generate("tiny-sft", [PROMPT], min_tokens=plain.num_tokens + 5, **options)
    assert longer.num_tokens >= plain.num_tokens + 5
    (penalized,) = pt.generate("tiny-sft", [PROMPT], repetition_penalty=5.0, **options)
    assert penalized.text != plain.text
    sampled = pt.generate("tiny-sft", [PROMPT], min_p=1.0, max_tokens=40, samples=4, progress=False)
    assert {one.text for one in sampled} == {plain.text}, "at min_p 1 only the likeliest token is left"


@pytest.mark.parametrize(
    ("options", "name"),
    [({"min_p": 2}, "min_p"), ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 1.5}, "min_tokens"),
     ({"repetition_penalty": 0}, "repetition_penalty"), ({"stop": [""]}, "stop"), ({"stop": 3}, "stop"),
     ({"stop": ["a"] * 17}, "stop"), ({"min_tokens": 500, "max_tokens": 4}, "min_tokens")],
)  # fmt: skip
def test_generate_with_rules_out_of_range_names_the_argument(options: dict[str, Any], name: str) -> None:
    with refuses(UsageError, name):
        pt.generate("tiny-sft", [PROMPT], progress=False, **options)


def test_command_takes_the_rules_and_evaluations_of_others_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["generate", "tiny-sft", PROMPT, "--temperature", "0", "--max-tokens", "40"]
    assert main([*said, "--stop", "<answer>", "--min-tokens", "2", "--repetition-penalty", "1.0"]) == 0
    assert "<answer>" in capsys.readouterr().out
    asked = ["evaluate", "tiny-sft", "--task", "stories", "--limit", "3", "--max-tokens", "20", "--quiet"]
    for name, rules in (("one", []), ("two", ["--stop", "x", "--stop", "y", "--repetition-penalty", "1.2"])):
        assert main([*asked, "--out", str(tmp_path / name), *rules]) == 0
    results = [next((tmp_path / name).rglob("results.json")).read_text() for name in ("one", "two")]
    assert "repetition_penalty" not in results[0], "as earlier versions wrote it"
    assert '"repetition_penalty": 1.2' in results[1]
    assert main([*asked, "--out", str(tmp_path / "three"), "--min-p", "0.1"]) == 2
    assert "--min-p" in capsys.readouterr().err


def test_requests_over_http_take_the_rules() -> None:
    body = {"prompt": "a", "min_p": 0.1, "min_tokens": 3, "repetition_penalty": 1.1}
    read = read_request(CompletionRequest, body)
    assert (read.min_p, read.min_tokens, read.repetition_penalty) == (0.1, 3, 1.1)
    for key, value in {"min_p": 1.5, "min_tokens": -1, "repetition_penalty": 0}.items():
        with refuses(BadRequest, key):
            read_request(CompletionRequest, {"prompt": "a", key: value})


def test_rules_onto_a_sampling_and_what_is_given() -> None:
    rules = read_rules(None, 2, None, ["x"])
    assert rules == DecodingRules(min_tokens=2, stop=("x",))
    assert rules.given() == {"min_tokens": 2, "stop": ("x",)}
    assert rules.onto(Sampling(5)) == Sampling(5, min_tokens=2, stop=("x",))
