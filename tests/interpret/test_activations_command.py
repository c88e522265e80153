"""`posttrain activations`, end to end with the embedded model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from posttrain.cli import main, parse
from posttrain.errors import UsageError
from posttrain.interpret.activations import record
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import ModelSection
from posttrain.store.checkpoint_files import seal
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["activations", *arguments]) == 2
    return capsys.readouterr().err


def test_prompts_of_a_task(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["activations", "tiny", "--layer", "2,3", "--max-rows", "700", "--dtype", "fp32"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "700 tokens x 1,044 bytes = 0.7 MB at most, in activations/tiny-stories" in out
    assert "4 first token (0.57% of the rows)" in out
    store = ActivationStore.open("activations/tiny-stories", verify=True)
    assert store.num_rows == 696
    assert store.index.data == {
        "source": "task", "task": "stories", "split": "test", "template": "r1_zero", "context_tokens": 1024,
        "max_rows": 700,
    }  # fmt: skip
    model = load_model(ModelSection(name="tiny"), seed=0).model
    ids = store.document_tokens(1)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[3][0, 1:]
    rows = torch.arange(store.num_rows)
    found = store.gather(rows[store.documents(rows) == 1], "resid.3")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert main([*command, "--quiet"]) == 0  # all of it is there
    assert capsys.readouterr().out == ""
    assert "was recorded with another `outliers`: 10.0 there, 3.0 now" in refused(
        capsys, *command[1:], "--outliers", "3"
    )


def test_what_a_run_has_sampled(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = here / "runs" / "a"
    shutil.copytree(TINY, run / "checkpoints" / "step-000001")
    seal(run / "checkpoints" / "step-000001", 1)
    resolved = load_recipe("tiny/grpo").resolve().model_dump(mode="json")
    (run / "recipe.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    example = Example("1", (Message("user", "Two and two?"),))
    completion = Completion((11, 12, 0), (-0.1, -0.2, -0.3), "stop")
    with RolloutStore(run / "rollouts.db") as rollouts:
        rollouts.record([Rollout(example, (5, 6), completion, "4", {}, 1.0, 1, 0, 0, number) for number in range(3)])
    assert main(["activations", "a", "--layer", "1", "--rollouts", "a", "--quiet"]) == 0
    store = ActivationStore.open("activations/a-a")
    rows = torch.arange(store.num_rows)
    assert store.tokens(rows).tolist() == [6, 11, 12, 0] * 3
    assert store.prompt_lengths(torch.arange(3)).tolist() == [2, 2, 2]
    assert store.index.sources[0].model == "runs/a/checkpoints/step-000001"
    assert main(["activations", "a", "--layer", "1", "--max-rows", "50", "--quiet"]) == 0  # the task of its recipe
    assert ActivationStore.open("activations/a-stories").index.data["task"] == "stories"


def test_pairs_over_a_text_and_pt_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.txt").write_text("Tom has 7 apples and eats 2 of them. " * 10, encoding="utf-8")
    asked = ["tiny", "--paired", "tiny", "--layer", "1", "--text", "a.txt", "--context-tokens", "32"]
    assert main(["activations", *asked, "--out", "pair"]) == 0
    store = ActivationStore.open("pair")
    rows = torch.arange(store.num_rows)
    assert store.sources == ("base", "post")
    assert torch.equal(store.gather(rows, source="base"), store.gather(rows, source="post"))
    assert int(store.positions(rows).max()) == 31
    assert main(["activations", "pair", "--export-pt", "pt"]) == 0
    assert main(["activations", "pt", "--import-pt", "resid.1", "--out", "again"]) == 0
    assert "rows of resid.1 in again" in capsys.readouterr().out
    again = ActivationStore.open("again")
    assert torch.equal(again.gather(rows, source="post"), store.gather(rows, source="post"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "--layer is needed"),
        (["tiny", "--layer", "9"], "resid.9: tiny has 4 layers"),
        (["tiny", "--layer", "2", "--site", "mlp"], "`posttrain activations --site` was removed. Use --layer"),
        (["tiny", "--layer", "2", "--text", "none.txt"], "none.txt: no such file"),
        (["tiny", "--layer", "2", "--text", "none.txt", "--task", "stories"], "give one of --task, --text and"),
        (["tiny", "--layer", "2", "--text", "none.txt", "--task.n", "5"], "options of a task or template"),
        (["tiny", "--layer", "2", "--rollouts", "none"], "none"),
        (["tiny", "--layer", "2", "--taks", "x"], "no option --taks. Did you mean --task?"),
        (["tiny", "--layer", "2", "--context-tokens", "5000", "--text", "long.txt"], "does not fit into the model"),
        (["none", "--export-pt", "x"], "no recorded activations here"),
        (["none", "--import-pt", "resid.2"], "give --out"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "long.txt").write_text("apples " * 3000, encoding="utf-8")
    assert message in refused(capsys, *arguments)


def test_much_is_written_only_when_it_is_wanted_and_fits(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["tiny", "--layer", "1", "--max-rows", "100", "--out", "s"]
    monkeypatch.setattr(record, "LARGE_BYTES", 27_000)
    assert "100 tokens x 272 bytes = 0.0 MB at most: add --yes to record them" in refused(capsys, *asked)
    assert not (here / "s").exists()
    free = shutil.disk_usage(here)._replace(free=27_000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: free)
        assert "but 0.0 MB are free; set --max-rows lower" in refused(capsys, *asked, "--yes")
    assert main(["activations", *asked, "--yes"]) == 0


def test_actions_of_sae_know_their_own_options_from_keys_of_a_recipe() -> None:
    with pytest.raises(UsageError, match="no option --model"):
        parse(["sae", "features", "a", "--model.name", "x"])
    found = parse(["sae", "diff", "a", "b", "--dictionary.k", "4"])
    assert (found.models, found.overrides) == (["a", "b"], [("dictionary.k", "4")])
    with pytest.raises(SystemExit):
        parse(["sae", "--help"])
