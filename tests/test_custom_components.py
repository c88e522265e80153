"""A word of each kind, as CONTRIBUTING.md shows it: written into a user's file, named ``mine:word``, trained with."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from closeness import approx
from posttrain import registry, untrusted
from posttrain.algorithms.objectives.policy_gradient import reinforce
from posttrain.cli import main
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.numeric import exact  # noqa: F401  (its module is imported before the registry is looked at)
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.plan import load_sweep
from posttrain.types import Batch, Outputs
from small_runs import recorded, steps_of

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS, YAML_BLOCKS = (
    [
        "\n".join(line.removeprefix(indent) for line in text.splitlines())
        for indent, text in re.findall(rf"^( *)```{language}\n(.*?)^\1```", TEXT, re.MULTILINE | re.DOTALL)
    ]
    for language in ("python", "yaml")
)
IMPORTS = next(block for block in BLOCKS if "@register" not in block)
TABLE = re.findall(r"^\| (\w+) \| `(\w+)` \| (\d+) \|", TEXT, re.MULTILINE)
SMALL = {
    "model.name": "tiny",
    "task": "{name: stories, size: 64, max_steps: 1}",
    "rewards": "small_runs:digit_share",
    "rollout.num_prompts": "4",
    "rollout.group_size": "4",
    "rollout.max_tokens": "10",
    "rollout.temperature": "1.5",  # at which answers differ, however sure the embedded model is
    "train.steps": "2",
    "train.warmup_steps": "0",
    "train.lr": "1e-3",
    "eval.every": "0",
}
# Reads the batch field, which no recipe names by itself.
MOVED = """

@register("objective", level="token", needs=("advantages", "distance"))
def moved(outputs, batch):
    values = -batch.field("advantages") * outputs.logprobs
    return Loss(values, {"distance": batch.field("distance").abs()[:, None].expand_as(values)})
"""


def block_of(word: str) -> str:
    (block,) = [block for block in BLOCKS if f"def {word}(" in block and "@register" in block]
    return block


@dataclass(frozen=True)
class Own:
    """Trains with what is in ``mine.py``."""

    folder: Path

    def train(self, name: str, options: dict[str, str]) -> Path:
        words = [word for key, value in (SMALL | options).items() for word in (f"--{key}", value)]
        assert main(["train", "tiny/grpo", "--run", name, "--quiet", *words]) == 0
        return self.folder / "runs" / name


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    """A working directory, and no words but the package's; nothing of its ``mine.py`` stays in this process."""
    for kind in registry.ALL_KINDS:  # what is imported within the test would be forgotten after it
        registry.entries(kind)
    packages = {
        kind: {word: entry for word, entry in words.items() if entry.function.__module__.startswith("posttrain.")}
        for kind, words in registry._ENTRIES.items()
    }
    monkeypatch.setattr(registry, "_ENTRIES", packages)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("posttrain.reports.summary.write_summary", lambda folder: folder)  # pictures take long
    sys.modules.pop("mine", None)
    yield Own(tmp_path)
    sys.modules.pop("mine", None)


def check_objective(run: Path, own: Own) -> None:
    assert all(row["surprise"] > 0 for row in steps_of(run))  # −log π, its own metric


def check_batch_field(run: Path, own: Own) -> None:
    first, second = steps_of(run)
    assert first["distance"] == approx(0.0, abs=1e-4)  # the policy is its reference, but for rounding
    assert second["distance"] > 1e-2


def check_reward(run: Path, own: Own) -> None:
    for rollout in recorded(run)[0]:
        assert rollout.parts["brief"] == float(rollout.num_tokens <= 4)
    assert len({rollout.parts["brief"] for rollout in recorded(run)[0]}) == 2


def check_grader(run: Path, own: Own) -> None:
    """Right is the gold answer in brackets alone, which this model never writes."""
    for rollout in recorded(run)[0]:
        assert rollout.outcome == ("no_answer" if rollout.extracted is None else "wrong")
    assert "wrong" in {rollout.outcome for rollout in recorded(run)[0]}


def check_task(run: Path, own: Own) -> None:
    numbers = [int(rollout.example_id.removeprefix("doubles/train/")) for rollout in recorded(run)[0]]
    assert all(n % 2 == 0 and n < 12 for n in numbers)
    assert len(set(numbers)) >= 4


def check_template(run: Path, own: Own) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoints/step-000002")
    for rollout in recorded(run)[0]:
        prompt = tokenizer.decode(rollout.token_ids[: -rollout.num_tokens])
        assert prompt == f"Q: {rollout.prompt}\nB:"


def check_environment(run: Path, own: Own) -> None:
    """The model calls no tool of its own accord, so nothing is paid; the prompt is what ``reset`` says."""
    for rollout in recorded(run)[0]:
        assert rollout.prompt.endswith("Count down from 3.")
        assert (
            rollout.parts["environment"]
            == sum(call.tool == "count" for turn in rollout.turns for call in turn.calls) / 3
        )


def check_advantage(run: Path, own: Own) -> None:
    rollouts = recorded(run)[0]
    for start in range(0, len(rollouts), 4):
        group = rollouts[start : start + 4]
        for one in group:
            better = sum(other.reward > one.reward for other in group)
            worse = sum(other.reward < one.reward for other in group)
            assert one.advantage == approx(0.5 * (worse - better) / 3, abs=1e-6)
    assert len({rollout.advantage for rollout in rollouts}) > 3


def check_engine(run: Path, own: Own) -> None:
    """Its answers are the native engine's, token by token, also after an update; so are its log-probabilities."""
    native = own.train("native", {"rollout.old_logprobs": "trainer"})
    assert [r.completion for r in recorded(run)[0]] == [r.completion for r in recorded(native)[0]]
    for one, other in zip(steps_of(run), steps_of(native), strict=True):
        assert one["loss"] == approx(other["loss"], rel=1e-4, abs=1e-6)
        assert one["kl_sampler"] == approx(0.0, abs=1e-5)  # against the trainer's


TRIALS: dict[str, tuple[dict[str, str], Callable[[Path, Own], None]]] = {
    "objective": ({"objective": "mine:surprised"}, check_objective),
    "batch_field": ({"objective": "mine:moved"}, check_batch_field),
    "reward": ({"rewards": "[{name: mine:brief, limit: 4}, small_runs:digit_share]"}, check_reward),
    "grader": (
        {"rewards": "[{name: correct, mode: mine:brackets}, small_runs:digit_share]", "prompt.template": "plain"},
        check_grader,
    ),
    "task": ({"task": "{name: mine:doubles, size: 6}"}, check_task),
    "template": ({"prompt.template": "{name: mine:question, mark: 'B:'}"}, check_template),
    "environment": (
        {"environment": "{name: mine:countdown, start: 3}", "rewards": "[environment, small_runs:digit_share]"},
        check_environment,
    ),
    "advantage": ({"advantage": "{name: mine:ranked, width: 0.5}"}, check_advantage),
    "engine": ({"rollout.engine": "mine:plain", "rollout.old_logprobs": "trainer"}, check_engine),
}


def test_the_table_has_every_kind_and_counts_the_lines_that_are_shown() -> None:
    assert [kind for kind, _, _ in TABLE] == list(TRIALS)
    for _, word, lines in TABLE:
        assert int(lines) == sum(bool(line.strip()) for line in block_of(word).splitlines()), word


@pytest.mark.parametrize(("kind", "word"), [row[:2] for row in TABLE], ids=[row[0] for row in TABLE])
def test_it_trains_by_its_name_alone(kind: str, word: str, own: Own, capsys: pytest.CaptureFixture[str]) -> None:
    options, check = TRIALS[kind]
    assert word not in registry.names(kind), "the package knows it"
    mine = own.folder / "mine.py"
    mine.write_text(f"{IMPORTS}\n\n\n{block_of(word)}\n{MOVED if kind == 'batch_field' else ''}")
    run = own.train("mine", options)
    rows = steps_of(run)
    assert len(rows) == 2
    assert all(row["grad_norm"] > 0 for row in rows)
    named = re.findall(r"mine:\w+", (run / "recipe.yaml").read_text())
    assert len(named) == 1
    check(run, own)
    # To run the stored recipe again, the code must be named.
    untrusted._FOLDERS.clear()
    capsys.readouterr()
    stored = ["train", str(run / "recipe.yaml"), "--dry-run"]
    allowed = ["--allow-code", named[0], "--allow-code", "small_runs:digit_share"]
    assert main(stored) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert main([*stored, *allowed]) == 0
    dumped: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert named[0] in str(dumped)


def test_the_worked_example_is_worth_what_it_says(own: Own) -> None:
    """Values by hand, and the recipe and the sweep of the page, which name the objective as the package would."""
    (own.folder / "mine.py").write_text(
        f"{IMPORTS}\n\n\n{block_of('surprised')}\n\n\n{block_of('brief')}\n\n\n{block_of('brackets')}\n"
    )
    untrusted.declare_code(["mine:surprised", "mine:brief", "mine:brackets"], own.folder)
    surprised, brief = (
        registry.find(kind, f"mine:{name}") for kind, name in (("objective", "surprised"), ("reward", "brief"))
    )
    mask, zeros = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    advantages = {"advantages": torch.tensor([[2.0, -1.0, 3.0]])}
    batch = Batch(torch.zeros(1, 3, dtype=torch.long), zeros + 3, mask, zeros, zeros, advantages)
    outputs = Outputs(torch.tensor([[-0.5, -2.0, -1.0]]))
    # −A · (−log π) · log π: −2·0.5·(−0.5), 1·2·(−2), −3·1·(−1)
    assert surprised.function(outputs, batch).values.tolist() == [[0.5, -4.0, 3.0]]
    assert torch.equal(surprised.function(outputs, batch, power=0.0).values, reinforce(outputs, batch).values)
    assert (brief.function(50), brief.function(51), brief.options({})) == (1.0, 0.0, {"limit": 50})
    asked = [Submission("", text, "7") for text in ("[7]", "7", None)]
    assert [verdict.outcome for verdict in grade_submissions("mine:brackets", asked)] == ["right", "wrong", "no_answer"]
    recipe, sweep = YAML_BLOCKS
    (own.folder / "surprised.yaml").write_text(recipe)
    (own.folder / "mine.yaml").write_text(sweep.replace("rl/surprised", str(own.folder / "surprised.yaml")))
    resolved = load_recipe("surprised.yaml").resolve()
    assert (resolved.objective.options, resolved.advantage.name) == ({"power": 1.0}, "centered")
    plan = load_sweep("mine.yaml", folder="unused")
    methods = {one.recipe.objective.name for one in plan.trainings}
    assert (len(plan.trainings), methods, plan.base.train.steps) == (9, {"grpo", "reinforce", "surprised"}, 60)


def test_its_options_are_checked_like_any_other(own: Own, capsys: pytest.CaptureFixture[str]) -> None:
    (own.folder / "mine.py").write_text(f"{IMPORTS}\n\n\n{block_of('ranked')}\n")
    assert main(["train", "tiny/grpo", "--dry-run", "--advantage", "{name: mine:ranked, widht: 2}"]) == 2
    assert "'ranked'" in capsys.readouterr().err
    assert (
        main(["train", "tiny/grpo", "--advantage", "mine:ranked", "--rollout.group_size", "1", "--eval.every", "0"])
        == 2
    )
    assert "'ranked'" in capsys.readouterr().err
