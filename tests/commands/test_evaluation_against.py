"""`posttrain evaluate A --against B`: win rate and KL, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.store.metric_names import find_metric

pytestmark = pytest.mark.usefixtures("quick_stories", "no_curves")
SMALL = ["--task.size", "40", "--data.batch_size", "2", "--train.steps", "2", "--eval.every", "0", "--quiet"]


@pytest.fixture(scope="module")
def runs(quick_stories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy and a reward model."""
    root = tmp_path_factory.mktemp("runs")
    for recipe in ("tiny/sft", "tiny/rm"):
        name = recipe.partition("/")[2]
        assert main(["train", recipe, "--runs-dir", str(root), "--run", name, "--train.lr", "3e-3", *SMALL]) == 0
    return root


def against(runs: Path, *arguments: str) -> int:
    fixed = ["--runs-dir", str(runs), "--limit", "6", "--max-tokens", "12"]
    return main(["evaluate", *arguments, *fixed])


def read(folder: Path) -> tuple[dict, list[dict]]:
    content = json.loads((folder / "results.json").read_text())
    return content, [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


def test_a_policy_against_its_base(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against(runs, "sft", "--against", "tiny", "--judge", "rm", "--samples", "2") == 0
    folder = runs / "sft" / "evaluation" / "against-tiny-stories-test"
    shown = capsys.readouterr().out
    assert "stories/test: sft against tiny, n = 6" in shown
    assert str(folder) in shown.replace("\n", "")
    content, items = read(folder)
    results = content["results"]
    assert [name for name in results if find_metric(name) is None] == []
    assert (content["a"], content["b"], results["n"], len(items)) == ("sft", "tiny", 6.0, 6)
    assert results["win_rate"] == approx(sum(item["win_rate"] for item in items) / 6)
    assert results["wins"] + results["ties"] + results["losses"] == approx(1.0)
    assert all(isinstance(answer["score"], float) for item in items for answer in (*item["a"], *item["b"]))
    for name in ("ab", "ba"):
        values = [answer[f"kl_{name}"] for item in items for answer in item[name[0]]]
        assert len(values) == 12
        assert results[f"kl_{name}"] == approx(sum(values) / 12)
        assert results[f"kl_{name}"] > 1e-4  # the run has moved
        assert results[f"kl_{name}_low"] < results[f"kl_{name}"] < results[f"kl_{name}_high"]
    assert content["settings"]["temperature"] == 1.0
    # the base has no template of its own: it is asked under that of the run
    assert [word["preamble"] for word in content["settings"]["templates"]] == ["", ""]
    assert content["notes"] == []
    page = (folder / "summary.md").read_text()
    assert "KL(tiny ‖ sft), nats per answer" in page
    assert items[0]["question"] in page


def test_further_judges_are_reported_next_to_the_first_of_the_same_answers(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*SMALL[:-1], "--train.seed", "5", "--quiet"]
    assert main(["train", "tiny/rm", "--runs-dir", str(runs), "--run", "other-rm", "--train.lr", "3e-3", *other]) == 0
    request = ["sft", "--against", "tiny", "--judge", "rm,other-rm", "--out", str(tmp_path / "both")]
    assert against(runs, *request) == 0
    assert "wins, by other-rm" in capsys.readouterr().out
    content, items = read(tmp_path / "both")
    alone = tmp_path / "alone"
    assert against(runs, "sft", "--against", "tiny", "--judge", "other-rm", "--out", str(alone), "--quiet") == 0
    results, own = read(alone)
    assert content["others"]["other-rm"]["win_rate"] == results["results"]["win_rate"]
    scores = [answer["scores"]["other-rm"] for item in items for answer in item["a"]]
    assert scores == [answer["score"] for item in own for answer in item["a"]]
    assert against(runs, "sft", "--against", "tiny", "--judge", "rm,rm") == 2
    assert "--judge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--temperature", "0"], "no KL: undefined for greedy decoding; give --temperature above 0"),
        (
            ["--top-k", "5"],
            "no KL: sampling options modify the distributions; drop --top-k, --top-p, --min-p, --min-tokens, "
            "--repetition-penalty and --stop",
        ),
    ],
)
def test_where_there_is_no_kl_the_win_rate_is_still_measured(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], note: str
) -> None:
    assert against(runs, "sft", "--against", "tiny", "--out", str(tmp_path / "out"), *arguments) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    content, _ = read(tmp_path / "out")
    assert "win_rate" in content["results"]
    assert not any(name.startswith("kl") for name in content["results"])
    assert content["notes"] == [note]


def test_other_templates_and_other_tokenizers_have_no_kl(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_tokenizer, tiny_random
) -> None:
    plain = ["--task.size", "40", "--prompt.template", "plain", *SMALL[2:]]
    assert main(["train", "tiny/sft", "--runs-dir", str(runs), "--run", "plain", *plain]) == 0
    assert against(runs, "sft", "--against", "plain", "--out", str(tmp_path / "a")) == 0
    assert "no KL: different templates" in capsys.readouterr().out
    other = tmp_path / "other"
    tiny_random("qwen3").save_pretrained(other)
    small_tokenizer.save_pretrained(other)
    assert against(runs, "sft", "--against", str(other), "--out", str(tmp_path / "b")) == 0
    shown = capsys.readouterr().out
    assert "no KL: different tokenizers" in " ".join(shown.split())
    assert "win_rate" in read(tmp_path / "b")[0]["results"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "tiny", "--against", "tiny"], "--against"),
        (["sft", "--against", "rm"], "trained a reward"),
        (["sft", "--against", "tiny", "--judge", "sft"], "cross_entropy"),
        (["sft", "--against", "tiny", "--task", "stories,gsm8k"], "--task"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    runs: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert against(runs, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_gold_answers_a_judge_is_needed(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"What is {i} plus {i}?", "chosen": f"{2 * i}.", "rejected": f"{2 * i + 1}."} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = ["sft", "--against", "tiny", "--task", "preferences", "--task.path", str(path), "--task.split", "all"]
    assert against(runs, *request) == 2
    assert "--judge" in capsys.readouterr().err
    assert against(runs, *request, "--judge", "rm", "--out", str(tmp_path / "out"), "--quiet") == 0
    results = read(tmp_path / "out")[0]["results"]
    assert results["n"] == 4.0
    assert "accuracy_a" not in results
