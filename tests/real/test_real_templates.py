"""Chat templates: one that does not end, or fails, is refused; those of known layouts are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from model_templates import CALL_LAYOUTS, LAYOUTS, tokenizer_of

from posttrain.cli import main
from posttrain.data.render.chat_template import render_dicts
from posttrain.data.render.foreign import render_foreign
from posttrain.errors import UsageError
from posttrain.models.patterns import check_chat_template
from posttrain.models.sources import TINY
from refusing import refuses

ENDLESS_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "indentation": "{{ messages | tojson(indent=99999999) }}",
    "doubling": "{% set ns = namespace(s='ab') %}{% for c in 'a' * 60 %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "one product": "{{ 'a' * 10000000000 }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "with tools": "{% if tools %}{% for a in 'aaaaaaaaaa' * 9 %}"
    + "{% for b in 'a' * 99 %}" * 5
    + "{% endfor %}" * 6
    + "{% endif %}",
    "behind a tag of generations": "{% generation %}{% endgeneration %}{{ messages | tojson(indent=99999999) }}",
    "recursion of macros": "{% macro f(n) %}{{ f(n + 1) ~ f(n + 1) if n < 40 }}{% endmacro %}{{ f(0) }}",
    "recursion of a loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "one filter": "{{ 'a' | center(10 ** 9) }}",
    "a huge refusal": "{{ raise_exception('a' * 10 ** 12) }}",
    "while it is compiled": "{{ 'a'" + " ~ 'a'" * 100_000 + " }}",
    "after a long text": "{% if messages[0].content | length > 1000 %}{{ 'a' * 10000000000 }}{% endif %}",
    "after thinking": "{% for m in messages %}{{ 'a' * 10000000000 if m.reasoning_content }}{% endfor %}",
    "for a real content": "{% if 'q q' in messages[0]['content'] %}{{ 'a' * 10000000000 }}{% endif %}",
    "after turns": "{% if messages | length > 60 %}{{ 'a' * 10000000000 }}{% endif %}",
}


# Each takes its second of processor time; of those that are stopped alike only the first is tested every time.
ALIKE = ("indentation", "doubling", "output", "behind a tag of generations", "recursion of macros", "one filter")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in ENDLESS_TEMPLATES]
)
def test_chat_template_that_does_not_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that begins it meets the limits, and every later one is refused without being rendered."""
    monkeypatch.setattr("posttrain.data.render.foreign.CPU_SECONDS", 1.0)
    tokenizer = copy(tokenizer_of("chatml"))
    tokenizer.chat_template = ENDLESS_TEMPLATES[name]
    thought = {"role": "assistant", "content": "a", "reasoning_content": "c"}
    rows = [{"role": "user", "content": "q q " * 1000}, thought] * 40
    for conversation in (rows, rows[:1]):
        with refuses(UsageError, "model.name"):
            render_dicts(tokenizer, conversation, {"tools": [{"type": "function"}]}, prompt=True)


def test_check_chat_template_without_workers_endless_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.models.patterns.HAS_WORKERS", False)
    monkeypatch.setattr("posttrain.models.patterns.TRIAL_SECONDS", 1)
    with refuses(UsageError, "here:"):
        check_chat_template(ENDLESS_TEMPLATES["one product"], "here: ")


CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": "ß", "n": [1, {}]}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "ß"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "q\u2028 <|im_end|> 日本"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "c", "name": None}],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "abcdefghi"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
    [{"role": "assistant", "content": "a"}],
]
VARIABLES: list[dict[str, Any]] = [{}, {"tools": [TOOL]}, {"enable_thinking": False, "documents": [{"title": "t"}]}]


def shown_or_raised(render: Callable[[], str]) -> str:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - whatever a template raises
        return f"raised {error}"[:507]


@pytest.mark.parametrize("name", [*LAYOUTS, *CALL_LAYOUTS])
def test_render_dicts_is_what_transformers_renders(name: str) -> None:
    """In the worker as in the tokenizer, errors of the template too."""
    tokenizer = tokenizer_of(name)
    check_chat_template(str(tokenizer.chat_template), "here: ")
    num_texts = 0
    for rows in CONVERSATIONS:
        for variables in VARIABLES:
            for prompt in (False, True):
                options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt, **variables}
                shown = shown_or_raised(partial(tokenizer.apply_chat_template, rows, **options))
                assert shown_or_raised(partial(render_foreign, tokenizer, rows, variables, prompt=prompt)) == shown
                num_texts += not shown.startswith("raised ")
    assert num_texts >= 10


def test_render_dicts_chooses_among_named_templates_as_transformers_does() -> None:
    tokenizer = copy(tokenizer_of("chatml"))
    tokenizer.chat_template = {"default": "plain {{ eos_token }}", "tool_use": "tools {{ tools | tojson }}"}
    rows = [{"role": "user", "content": "q"}]
    assert render_dicts(tokenizer, rows, {}, prompt=True) == f"plain {tokenizer.eos_token}"
    assert (
        render_dicts(tokenizer, rows, {"tools": [TOOL]}, prompt=True)
        == f"tools {json.dumps([TOOL], ensure_ascii=False)}"
    )
    tokenizer.chat_template = "{{ strftime_now('%Y %Z') }}"
    assert render_dicts(tokenizer, rows, {}, prompt=True) == datetime.now().strftime("%Y %Z")


def test_model_with_an_endless_chat_template_is_refused_when_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(ENDLESS_TEMPLATES["one product"], encoding="utf-8")
    assert main(["generate", str(folder), "Hi", "--template", "chat"]) == 2
    assert "chat template exceeds" in capsys.readouterr().err


def test_error_that_a_chat_template_raises_is_reported_with_the_roles() -> None:
    tokenizer = copy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with refuses(UsageError, "roles user: division"):
        render_dicts(tokenizer, [{"role": "user", "content": "a"}], {}, prompt=True)
    tokenizer.chat_template = "{{ raise_exception('no ' * 100000) }}"
    with pytest.raises(UsageError) as output:
        render_dicts(tokenizer, [{"role": "user", "content": "a"}], {}, prompt=True)
    assert len(str(output.value)) < 1000


@pytest.mark.parametrize("text", ["{{ ''.__class__.__mro__ }}", "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"])
def test_chat_template_that_is_not_run_is_reported(text: str) -> None:
    check_chat_template(text, "here: ")
    tokenizer = copy(tokenizer_of("chatml"))
    tokenizer.chat_template = text
    with refuses(UsageError, "render the roles"):
        render_dicts(tokenizer, [{"role": "user", "content": "a"}], {}, prompt=True)
