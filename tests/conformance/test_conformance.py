"""The checks themselves: what they ask, how they name what is wrong, and what they need."""

from __future__ import annotations

import ast
import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import made, right_advantages, right_score

from closeness import assert_close
from posttrain.cli import main
from posttrain.conformance.adapters import own
from posttrain.conformance.advantages import GROUP, REWARDS, known_forms
from posttrain.conformance.cases import OBJECTIVES, Config, acting_options, all_configs, made_batch, with_padding
from posttrain.conformance.findings import largest_gap
from posttrain.conformance.loss_calls import run_reference
from posttrain.conformance.losses import check_loss
from posttrain.conformance.reference import reference_loss
from posttrain.conformance.run import ConformanceReport, check_module, load_module, table_lines
from torch_alone import run_with_torch_alone

PACKAGE = Path(own.__file__).parents[1]


def statuses(report: ConformanceReport, function: str, check: str) -> set[str]:
    return {one.status for one in report.findings if one.function == function and one.check == check}


def test_our_own_objectives_conform():
    report = check_module("own")
    assert report.conforms
    assert report.count("ok") >= 560
    assert report.count("convention") == 1  # a group of one answer is refused
    assert {one.function for one in report.findings} == {"loss", "advantages", "score", "rows"}
    assert len({one.case for one in report.findings if one.function == "loss"}) == len(all_configs())


def test_checks_take_at_most_five_cpu_seconds():
    module = load_module("own")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    check_module(module)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 5.0


def test_checks_run_where_torch_alone_is_installed():
    code = """
import sys
from posttrain.cli import main
status = main(["conformance", "own"])
named = ("pydantic", "jaxtyping", "numpy", "transformers", "peft", "yaml", "rich")
print("RC", status, [name for name in named if name in sys.modules])
"""
    lines = run_with_torch_alone(code).splitlines()
    assert lines[-1] == "RC 0 []"
    assert any(line.startswith("loss ") and "grpo, token_mean" in line for line in lines)


def test_the_reference_shares_nothing_with_the_algorithms():
    for name in ("reference", "cases", "losses", "advantages", "scores", "rows", "loss_calls", "findings"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(str(module).startswith(("posttrain.algorithms", "posttrain.api")) for module in imported), name


def test_reference_of_two_tokens_is_worked_by_hand():
    batch = made_batch([2])
    batch["logprobs"] = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    batch["old_logprobs"] = torch.tensor([[-1.0, -2.5]], dtype=torch.float64)
    batch["advantages"] = torch.tensor([[2.0, 2.0]], dtype=torch.float64)
    value = float(reference_loss(batch, Config("grpo")))
    assert_close(torch.tensor(value), torch.tensor(-(2.0 + 2.0 * 1.3) / 2), rtol=1e-6, atol=0.0)
    result = run_reference(batch, Config("grpo"))
    assert result.gradients["logprobs"].tolist() == [[-1.0, 0.0]]  # the second is clipped


def test_batches_have_every_case_of_sign_and_clip():
    """So that a wrong clip moves the loss."""
    batch = made_batch([4] * 4)
    ratio, positive = (batch["logprobs"] - batch["old_logprobs"]).exp(), batch["advantages"] > 0
    for above in (ratio > 1.3, ratio < 0.8, (ratio > 0.8) & (ratio < 1.3)):
        assert bool((above & positive).any())
        assert bool((above & ~positive).any())


def test_every_configuration_differs_from_the_others_on_uneven_rows():
    batch = made_batch([1, 2, 7, 5])
    values = [float(reference_loss(batch, config)) for config in all_configs()]
    distinct = {round(value, 12) for value in values}
    same_as_token_mean = 0
    assert len(distinct) >= len(values) - same_as_token_mean - 1  # IPO and others may not coincide


@pytest.mark.parametrize("config", all_configs(), ids=lambda one: one.label)
def test_every_option_that_is_asked_for_acts_in_the_reference(config: Config):
    rows = 4 * OBJECTIVES[config.objective].rows_per_unit
    batch = made_batch([4] * rows)
    plain = run_reference(batch, config)
    for name in acting_options(config):
        value = getattr(config, name)
        changed = run_reference(batch, replace(config, **{name: value * 2 if isinstance(value, int) else value * 1.3}))
        moved = abs(float(changed.value) - float(plain.value)) + largest_gap(changed.gradient, plain.gradient)
        assert moved > 1e-5, name


def test_known_formulas_of_advantages_differ():
    rewards, group = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUP)
    groups = [rewards[group == number] for number in (0, 1)]
    results = [torch.cat(form.compute(groups)) for form in known_forms()]
    for number, one in enumerate(results):
        for other in results[:number]:
            assert largest_gap(one, other) > 1e-9


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "raises": (lambda batch, config, micro_batches: 1 / 0, "ZeroDivisionError"),
    "leaves": (lambda batch, config, micro_batches: exec("raise SystemExit(3)"), "SystemExit"),
    "a float": (lambda batch, config, micro_batches: 0.5, "a float"),
    "nothing": (lambda batch, config, micro_batches: None, "nothing"),
    "another shape": (lambda batch, config, micro_batches: batch["logprobs"], "shape (4, 4)"),
    "whole numbers": (lambda batch, config, micro_batches: torch.tensor(3), "int64"),
    "another device": (lambda batch, config, micro_batches: torch.zeros((), device="meta"), "meta"),
    "too few arguments": (lambda batch: batch, "TypeError"),
    "an unknown field": (lambda batch, config, micro_batches: batch["log_probs"], "log_probs"),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_a_loss_that_gives_nothing_to_compare_is_one_line(case: str):
    function, named = BAD_LOSSES[case]
    (finding,) = check_loss(function, Config("grpo"))
    assert (finding.status, finding.check) == ("bad", "value")
    assert named in finding.note
    assert "\n" not in finding.note


def test_nan_is_named():
    found = list(check_loss(lambda b, c, m: made()(b, c, m) * float("nan"), Config("grpo")))
    assert found[0].status == "fails"
    assert "nan" in found[0].note
    assert found[0].gap == float("inf")


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda b, c, m: made()(dict(b) | {"old_logprobs": b["logprobs"].detach()}, c, m), "old_logprobs"),
        (lambda b, c, m: made()(dict(b) | {"advantages": b["advantages"].sign()}, c, m), "advantages"),
        (lambda b, c, m: made()(dict(b) | {"mask": torch.ones_like(b["mask"])}, c, m), "mask"),
        (lambda b, c, m: made()(b, c, [list(range(len(b["mask"])))]), "micro_batches"),
    ],
)
def test_an_argument_that_is_not_used_is_named(function: Any, named: str):
    found = {one.check: one for one in check_loss(function, Config("grpo"))}
    assert found["arguments"].status == "fails"
    assert found["arguments"].note.startswith(named)


def test_a_loss_in_single_precision_is_a_convention_that_is_named():
    def single(batch: dict[str, Tensor], config: Config, micro_batches: Any) -> Tensor:
        return made()({name: x.float() if x.is_floating_point() else x for name, x in batch.items()}, config, micro_batches).float()  # noqa: E501  # fmt: skip

    found = {one.check: one for one in check_loss(single, Config("grpo"))}
    assert found["value"].status == "convention"
    assert "float32" in found["value"].note
    assert {one.status for one in found.values()} == {"ok", "convention"}


def test_what_a_function_declines_has_no_row():
    report = check_module({"loss": lambda b, c, m: NotImplemented, "advantages": right_advantages})
    assert {one.function for one in report.findings} == {"advantages"}


@pytest.mark.parametrize(
    ("functions", "function", "named"),
    [
        ({"advantages": lambda rewards, group: rewards[:3]}, "advantages", "shape (3,)"),
        ({"advantages": lambda rewards, group: rewards.tolist()}, "advantages", "a list"),
        ({"advantages": lambda rewards, group: rewards.long()}, "advantages", "int64"),
        ({"score": lambda logits, tokens, temperature: logits}, "score", "shape (3, 6, 5)"),
        ({"score": lambda logits, tokens, temperature: (tokens, tokens, tokens)}, "score", "3 values"),
        ({"score": lambda logits, tokens, temperature: tokens}, "score", "int64"),
        ({"rows": lambda prompts, answers, pad, end: prompts}, "rows", "a list"),
        ({"rows": lambda prompts, answers, pad, end: (torch.zeros(4, 9), torch.zeros(4, 9))}, "rows", "float32"),
        ({"rows": lambda prompts, answers, pad, end: (torch.zeros(3, 9).long(),) * 2}, "rows", "shape (3, 9)"),
        ({"rows": lambda prompts, answers, pad, end: (torch.full((4, 9), 5),) * 2}, "rows", "0 and 1"),
    ],
)
def test_other_functions_that_give_nothing_to_compare_are_one_line(functions: Any, function: str, named: str):
    (finding,) = check_module(functions).findings
    assert (finding.function, finding.status) == (function, "bad")
    assert named in finding.note


def test_unused_arguments_of_other_functions_are_named():
    report = check_module(
        {
            "advantages": lambda rewards, group: rewards - rewards.mean(),
            "score": lambda logits, tokens, temperature: right_score(logits, tokens, 1.0),
        }
    )
    notes = {one.function: one.note for one in report.findings if one.check == "arguments"}
    assert notes["advantages"].startswith("group")
    assert notes["score"].startswith("temperature")


@pytest.mark.parametrize(
    ("module", "named"),
    [("no_such_module_at_all", "no_such_module_at_all"), ("no_such_file.py", "no_such_file.py"), ("json", "loss(")],
)
def test_a_module_that_is_not_there_is_refused_by_name(module: str, named: str, capsys: pytest.CaptureFixture[str]):
    assert main(["conformance", module]) == 2
    told = capsys.readouterr()
    assert named in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(4)", "import no_such_thing", "def loss(:", "loss = 3"])
def test_a_file_that_cannot_be_read_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "adapter_that_fails.py"
    path.write_text(text, encoding="utf-8")
    assert main(["conformance", str(path)]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "adapter_that_fails" in told


def test_the_command_of_a_wrong_file_exits_with_1_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "adapter_of_raw_rewards.py"
    path.write_text("def advantages(rewards, group):\n    return rewards - rewards.mean()\n", encoding="utf-8")
    assert main(["conformance", str(path)]) == 1
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:2] == ["function", "case"]
    assert main(["conformance", str(path), "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert report["conforms"] is False
    assert report["counts"]["fails"] >= 1
    assert {one["check"] for one in report["findings"] if one["status"] == "fails"} >= {"formula"}


def test_what_a_function_raises_reaches_no_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "adapter_that_paints.py"
    path.write_text("def score(*_):\n    raise ValueError('\\x1b[31mred\\n\\u202e')\n", encoding="utf-8")
    assert main(["conformance", str(path)]) == 1
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert "\u202e" not in told.out + told.err
    assert "ValueError" in told.out


def test_the_table_names_each_convention_once_with_its_cases():
    def by_own_tokens(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
        return mask.double() / mask.sum() / num_micro

    declined = lambda b, c, m: NotImplemented if c.objective != "grpo" else made(weights=by_own_tokens)(b, c, m)  # noqa: E731  # fmt: skip
    report = check_module({"loss": declined})
    lines = [line for line in table_lines(report) if "unequal_split" in line and "mean of" in line]
    assert len(lines) == 1
    assert "grpo, token_mean" in lines[0]


def test_the_adapter_of_trl_has_at_most_30_lines():
    text = (PACKAGE / "adapters" / "trl.py").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(lines) <= 30


def test_padding_of_the_batches_differs_by_field():
    batch = with_padding(made_batch([1, 3]), 2.0)
    outside = ~batch["mask"]
    contents = {name: float(x[outside].flatten()[0]) for name, x in batch.items() if x.ndim > 1 and name != "mask"}
    assert len(set(contents.values())) == len(contents)
    assert bool((batch["logprobs"][batch["mask"]] < 0).all())
