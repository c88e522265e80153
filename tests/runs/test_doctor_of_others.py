"""``doctor --from``: records of TRL and NeMo RL that balance, that do not, and that cannot be read."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain as pt
from closeness import approx
from posttrain.cli import main
from posttrain.errors import DataError, UsageError
from posttrain.runs.diagnosis.findings import RunFinding
from posttrain.runs.diagnosis.others import rows
from posttrain.runs.diagnosis.others.formulas import FORMULAS, fitted_weights
from refusing import refuses

Line = dict[str, Any]
SIZE = 4


def normalized(rewards: Sequence[float]) -> list[float]:
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(x - mean) / (spread + 1e-4) for x in rewards]


def lines_of_trl(batches: int = 3, groups: int = 2, size: int = SIZE) -> list[Line]:
    """As ``contrib/trl_records.py`` writes them: two rewards, an end token (0), and both log-probabilities."""
    lines: list[Line] = []
    for batch in range(batches):
        for group in range(groups):
            parts = [
                {"right": float((batch + group + k) % 3 == 0), "length": 0.1 * ((7 * k + batch) % 5)}
                for k in range(size)
            ]
            advantages = normalized([part["right"] - 0.5 * part["length"] for part in parts])
            for k, (part, advantage) in enumerate(zip(parts, advantages, strict=True)):
                length = 3 + k % 2
                logprobs = [-0.5 - 0.1 * t for t in range(6)]
                lines.append(
                    {
                        "prompt": f"What is {batch} and {group}?",
                        "completion": f"It is {k}.",
                        "rewards": part,
                        "weights": {"right": 1.0, "length": -0.5},
                        "step": batch + 1,
                        "batch": batch,
                        "place": group * size + k,
                        "epoch": 0,
                        "group_size": size,
                        "advantage": advantage,
                        "mask": [int(t < length) for t in range(6)],
                        "ids": [5 + t if t < length - 1 else 0 for t in range(6)],
                        "ends": [0],
                        "tools": False,
                        "sampler": logprobs,
                        "trainer": [x + 1e-3 for x in logprobs],
                    }
                )
    return lines


def lines_of_nemo_rl() -> list[Line]:
    """As NeMo RL's logger writes them: each value in a list of one; the baseline is the mean of the others."""
    lines: list[Line] = []
    for group in range(3):
        rewards = [float((group + k) % 2) for k in range(SIZE)]
        for k, reward in enumerate(rewards):
            others = [x for place, x in enumerate(rewards) if place != k]
            advantage = reward - statistics.fmean(others)
            mask = [0, 0, 0, 1, 1, 0]
            lines.append(
                {
                    "content": [f"user: {group} assistant: {k}"],
                    "rewards": [reward],
                    "input_lengths": [5],
                    "token_ids": [[1, 2, 10 + group, 20 + k, 7, 0]],
                    "token_loss_mask": [mask],
                    "sample_loss_mask": [1.0],
                    "advantages": [[advantage] * 6],
                    "generation_logprobs": [[0.0, 0.0, 0.0, -0.3, -0.4, 0.0]],
                    "prev_logprobs": [[-0.1, -2.0, -1.0, -0.3, -0.401, 0.0]],
                    "idx": len(lines),
                }
            )
    return lines


def write(path: Path, lines: Sequence[Line]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def of(findings: Sequence[RunFinding], kind: str) -> dict[str, RunFinding]:
    return {one.check: one for one in findings if one.kind == kind}


def test_doctor_of_trl_lines_that_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """k3 of a difference of 0.001 at each token: e^0.001 − 1 − 0.001 = 5.0e-7."""
    lines = lines_of_trl()
    folder = tmp_path / "out"
    write(folder / "records-0.jsonl", lines[0::2])  # of two processes
    write(folder / "records-1.jsonl", lines[1::2])
    found = pt.diagnose(folder, trainer="trl")
    assert of(found, "fault") == {}
    assert of(found, "level") == {}
    assert of(found, "audit").keys() == {"groups", "advantage", "sampler", "tokens"}
    assert of(found, "audit")["sampler"].found.startswith("5.00e-07")
    assert of(found, "audit")["tokens"].found == str(sum(sum(line["mask"]) for line in lines))
    assert main(["doctor", str(folder), "--from", "trl"]) == 0
    out = capsys.readouterr().out
    assert "24 answers in 3 batches of trl" in out
    assert main(["doctor", str(folder / "records-0.jsonl"), "--from", "trl", "--json"]) == 1  # half of each group
    content = json.loads(capsys.readouterr().out)
    assert (content["trainer"], content["answers"]) == ("trl", 12)
    assert "groups" in {one["check"] for one in content["findings"] if one["kind"] == "fault"}


def changed(change: Callable[[Line], None], only: Callable[[Line], bool] = lambda line: True) -> list[Line]:
    lines = lines_of_trl()
    for line in lines:
        if only(line):
            change(line)
    return lines


def of_next_group() -> list[Line]:
    lines = lines_of_trl()
    advantages = [line["advantage"] for line in lines]
    for place, line in enumerate(lines):
        line["advantage"] = advantages[(place + SIZE) % len(lines)]
    return lines


def of_batch() -> list[Line]:
    """The baseline of the batch in place of the group's."""
    lines = lines_of_trl()
    for batch in range(3):
        members = [line for line in lines if line["batch"] == batch]
        rewards = [line["rewards"]["right"] - 0.5 * line["rewards"]["length"] for line in members]
        for line, value in zip(members, normalized(rewards), strict=True):
            line["advantage"] = value
    return lines


TRL_FAULTS: dict[str, tuple[list[Line], str]] = {
    "wrong sign": (changed(lambda line: line.update(advantage=-line["advantage"])), "advantage"),
    "of the next group": (of_next_group(), "advantage"),
    "of the batch": (of_batch(), "advantage"),
    "a reward that is not paid": (
        changed(lambda line: line["rewards"].update(right=1.0), lambda line: line["place"] == 1),
        "advantage",
    ),
    "another weight": (changed(lambda line: line["weights"].update(length=0.5)), "advantage"),
    "mixed groups": (changed(lambda line: line.update(prompt="Another."), lambda line: line["place"] == 2), "groups"),
    "an answer is lost": (lines_of_trl()[:-1], "groups"),
    "untrained end": (
        changed(lambda line: line["mask"].__setitem__(sum(line["mask"]) - 1, 0)),
        "tokens",
    ),
    "padding is trained": (changed(lambda line: line.update(mask=[1] * 6)), "tokens"),
    "another sampler": (changed(lambda line: line.update(trainer=[x - 0.5 for x in line["sampler"]])), "sampler"),
}


@pytest.mark.parametrize("name", TRL_FAULTS)
def test_doctor_of_trl_lines_with_a_fault_names_it(name: str, tmp_path: Path) -> None:
    lines, check = TRL_FAULTS[name]
    fault = of(pt.diagnose(write(tmp_path / "r.jsonl", lines), trainer="trl"), "fault")[check]
    assert fault.step is not None
    assert fault.causes
    assert fault.decided_by


def test_doctor_of_trl_prompts_that_come_again_are_a_level(tmp_path: Path) -> None:
    repeated = changed(lambda line: line.update(prompt="What is 0 and 0?"), lambda line: line["batch"] == 2)
    levels = of(pt.diagnose(write(tmp_path / "r.jsonl", repeated), trainer="trl"), "level")
    assert levels["prompts"].step == 3
    masked = changed(lambda line: line.update(mask=[0] * 6, sampler=None, trainer=None), lambda x: x["place"] == 3)
    found = pt.diagnose(write(tmp_path / "m.jsonl", masked), trainer="trl")
    assert of(found, "fault") == {}
    assert "tokens" in of(found, "explanation")
    silent = changed(lambda line: line["rewards"].update(right=None, length=None), lambda line: line["place"] == 3)
    assert "reward" in of(pt.diagnose(write(tmp_path / "s.jsonl", silent), trainer="trl"), "level")


# --- the table of completions ---


def write_tables(folder: Path, lines: Sequence[Line], *without: str) -> Path:
    """TRL's parquet files; the table of step 2 is logged again at step 3, as with several updates of a batch."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    folder.mkdir(parents=True)
    for step, batch in ((1, 0), (2, 1), (3, 1), (4, 2)):
        members = [line for line in lines if line["batch"] == batch]
        columns: dict[str, list[Any]] = {
            "step": [step] * len(members),
            "prompt": [line["prompt"] for line in members],
            "completion": [[{"role": "assistant", "content": line["completion"]}] for line in members],
            "right": [line["rewards"]["right"] for line in members],
            "length": [line["rewards"]["length"] for line in members],
            "advantage": [line["advantage"] for line in members],
        }
        table = pyarrow.table({name: x for name, x in columns.items() if name not in without})
        parquet.write_table(table, folder / f"completions_{step:05d}.parquet")
    return folder


def test_doctor_of_a_table_infers_the_weights_of_rewards(tmp_path: Path) -> None:
    found = pt.diagnose(write_tables(tmp_path / "completions", lines_of_trl()), trainer="trl")
    assert of(found, "fault") == {}
    advantage = of(found, "audit")["advantage"]
    assert advantage.num_updates == 3
    assert "1 right + -0.5 length minus group mean, divided by group standard deviation" in advantage.expected
    assert "log-probabilities" in of(found, "explanation")["records"].found
    wrong = write_tables(tmp_path / "wrong", of_next_group())
    assert "advantage" in of(pt.diagnose(wrong, trainer="trl"), "fault")


def test_doctor_of_a_table_without_a_column_names_it(tmp_path: Path) -> None:
    without = write_tables(tmp_path / "advantage", lines_of_trl(), "advantage")
    explained = [one.found for one in pt.diagnose(without, trainer="trl") if one.kind == "explanation"]
    assert "missing: advantage" in explained
    for name in ("prompt", "completion"):
        with refuses(DataError, f"{name}: missing column"):
            pt.diagnose(write_tables(tmp_path / name, lines_of_trl(), name), trainer="trl")
    with refuses(DataError, "no reward column"):
        pt.diagnose(write_tables(tmp_path / "rewards", lines_of_trl(), "right", "length"), trainer="trl")


def test_fitted_weights_are_those_of_the_sum() -> None:
    """Differences of 2 a − b in two groups, one of them halved."""
    a = [[0.0, 1.0, 3.0], [2.0, 0.0, 1.0]]
    b = [[1.0, 0.0, 0.0], [0.0, 5.0, 1.0]]
    sums = [[2 * x - y for x, y in zip(*group, strict=True)] for group in zip(a, b, strict=True)]
    centred = [[x - statistics.fmean(group) for x in group] for group in sums]
    halved = [centred[0], [x / 2 for x in centred[1]]]
    for weights in fitted_weights([a, b], halved):
        assert weights[1] / weights[0] == approx(-0.5)
    assert fitted_weights([a, b], centred)[1] == approx([2.0, -1.0])
    assert fitted_weights([a, b], [[0.0] * 3] * 2) == []


# --- NeMo RL ---


@pytest.mark.parametrize("lost", [0, 1])
def test_leave_one_out_formula_is_that_of_the_others_spread(lost: int) -> None:
    name = "minus leave-one-out mean, divided by leave-one-out standard deviation"
    if lost == 0:
        name = "minus leave-one-out mean, divided by biased leave-one-out standard deviation"
    spread = statistics.stdev if lost else statistics.pstdev
    groups = [[0.1, 0.7, -2.0, 0.1], [1.0, 1.0, 1.0, 0.0], [0.1] * 3, [1e9, 1e9 + 1, 1e9 + 3], [0.0, 1.0]]
    for group, found in zip(groups, FORMULAS[name](groups), strict=True):
        for place, value in enumerate(found):
            others = [*group[:place], *group[place + 1 :]]
            expected = group[place] - statistics.fmean(others)
            if len(others) > 1 and len(set(others)) > 1:
                expected /= spread(others) + 1e-6
            assert value == approx(expected, rel=1e-6)


def test_doctor_of_thousands_of_answers_to_one_prompt_takes_linear_time(tmp_path: Path) -> None:
    """With a spread for each answer, computed from all others, this takes minutes."""
    lines = lines_of_trl(1, 1, 6_000)
    report = pt.diagnose(write(tmp_path / "lines.jsonl", lines), trainer="trl")
    assert [one for one in report if one.kind == "fault"] == []


def test_weights_are_fitted_without_a_matrix_of_answers_by_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    decompose = torch.linalg.svd
    sizes: list[int] = []

    def watched(matrix: torch.Tensor, **options: Any) -> Any:
        found = decompose(matrix, **options)
        sizes.append(found.U.numel())
        return found

    monkeypatch.setattr(torch.linalg, "svd", watched)
    groups = [[0.0, 1.0, 2.0, 4.0]] * 50
    other = [[1.0, 0.0, 5.0, 2.0]] * 50
    mixed = [[0.5 * x + 0.25 * y for x, y in zip(a, b, strict=True)] for a, b in zip(groups, other, strict=True)]
    centred = [[x - statistics.fmean(group) for x in group] for group in mixed]
    assert fitted_weights([groups, other], centred)[1] == approx([0.5, 0.25], rel=1e-9)
    assert sizes == [202 * 2]
    few = fitted_weights([[[0.0, 1.0]], [[1.0, 0.0]], [[0.0, 0.0]]], [[-0.5, 0.5]])
    assert all(math.isfinite(x) for weights in few for x in weights)


def test_doctor_of_rows_with_different_rewards_reads_them_all(tmp_path: Path) -> None:
    lines = lines_of_trl(1)
    for line in lines:
        del line["weights"]
    del lines[0]["rewards"]["length"]
    report = pt.diagnose(write(tmp_path / "lines.jsonl", lines), trainer="trl")
    assert "advantage" in {one.check for one in report}


def test_doctor_of_records_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_BYTES", 1 << 10)
    with refuses(DataError, "lines.jsonl", "MiB"):
        pt.diagnose(write(tmp_path / "lines.jsonl", lines_of_trl()), trainer="trl")


def test_doctor_of_nemo_rl_lines_that_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    for step in (2, 10, 1):
        write(folder / f"train_data_step{step}.jsonl", lines_of_nemo_rl())
    found = pt.diagnose(folder, trainer="nemo-rl")
    assert of(found, "fault") == {}
    audit = of(found, "audit")
    assert audit.keys() == {"groups", "advantage", "sampler", "tokens"}
    assert "leave-one-out mean" in audit["advantage"].expected
    assert float(audit["sampler"].found.split()[0]) == approx((math.expm1(-0.001) + 0.001) / 2, rel=5e-3)
    assert of(found, "level")["prompts"].step == 2  # the same prompts in each
    assert main(["doctor", str(folder), "--from", "nemo-rl"]) == 0
    assert "36 answers in 3 batches" in capsys.readouterr().out


def without(lines: list[Line], *names: str) -> list[Line]:
    return [{name: x for name, x in line.items() if name not in names} for line in lines]


def test_doctor_of_older_nemo_rl_lines_names_what_is_missing(tmp_path: Path) -> None:
    """An older version writes content, rewards, lengths and log-probabilities of all tokens."""
    older = without(lines_of_nemo_rl(), "token_ids", "token_loss_mask", "sample_loss_mask", "advantages")
    found = pt.diagnose(write(tmp_path / "train_data_step1.jsonl", older), trainer="nemo-rl")
    assert of(found, "fault") == {}
    missing = " ".join(one.found for one in found if one.check == "records")
    assert all(name in missing for name in ("advantages", "token_loss_mask", "token_ids"))
    with refuses(DataError, "rewards"):
        pt.diagnose(write(tmp_path / "x.jsonl", without(lines_of_nemo_rl(), "rewards")), trainer="nemo-rl")


def test_doctor_of_nemo_rl_faults(tmp_path: Path) -> None:
    lines = lines_of_nemo_rl()
    for line in lines:
        line["advantages"] = [[-x for x in line["advantages"][0]]]
    found = pt.diagnose(write(tmp_path / "train_data_step1.jsonl", lines), trainer="nemo-rl")
    assert "advantage" in of(found, "fault")
    lines = lines_of_nemo_rl()
    for line in lines:
        line["token_loss_mask"] = [[0, 0, 0, 1, 1, 1]]  # behind its length
        line["prev_logprobs"] = [[0.0, 0.0, 0.0, -2.0, -2.0, -2.0]]
    assert of(pt.diagnose(write(tmp_path / "train_data_step2.jsonl", lines), trainer="nemo-rl"), "fault").keys() == {
        "tokens",
        "sampler",
    }


# --- what cannot be read ---

DAMAGED: dict[str, tuple[str, str]] = {
    "empty": ("", "empty"),
    "cut off": (json.dumps(lines_of_trl()[0])[:80], "not JSON"),
    "no object": ("[1, 2]", "object"),
    "no numbers": (json.dumps(lines_of_trl()[0] | {"advantage": "high"}), "advantage"),
    "infinite": (json.dumps(lines_of_trl()[0] | {"advantage": 1e300}), "advantage"),
    "a bool": (json.dumps(lines_of_trl()[0] | {"sampler": [True]}), "sampler"),
    "other lengths": (json.dumps(lines_of_trl()[0] | {"sampler": [-1.0]}), "sampler"),
    "rewards are a list": (json.dumps(lines_of_trl()[0] | {"rewards": [1.0]}), "rewards"),
    "no prompt": (json.dumps({k: v for k, v in lines_of_trl()[0].items() if k != "prompt"}), "prompt"),
    "groups of none": (json.dumps(lines_of_trl()[0] | {"group_size": 0}), "group_size"),
    "of NeMo RL": (json.dumps(lines_of_nemo_rl()[0]), "batch"),
    "twice": ("\n".join([json.dumps(lines_of_trl()[0])] * 2), "duplicate"),
    "bytes": ("\ud800", "UTF-8"),
    "an escape": (json.dumps(lines_of_trl()[0] | {"advantage": "\x1b]0;x\x07"}), "advantage"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_doctor_of_damaged_lines_is_one_line_with_the_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, word = DAMAGED[name]
    path = tmp_path / "records-0.jsonl"
    path.write_bytes(text.encode(errors="surrogatepass"))
    assert main(["doctor", str(path), "--from", "trl"]) == 2
    err = capsys.readouterr().err
    assert "records-0.jsonl" in err
    assert word in err
    assert "\x1b" not in err
    assert len(err.strip().splitlines()) == 1


def test_doctor_of_no_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "records-0.jsonl", lines_of_trl())
    for arguments, words in (
        ([str(tmp_path / "empty"), "--from", "trl"], ("file in this folder",)),
        ([str(tmp_path / "record-0.jsonl"), "--from", "trl"], ("no such file", "records-0.jsonl")),
        ([str(tmp_path / "records-0.jsonl"), "--from", "trl", "--audit", "1"], ("--audit",)),
        ([str(tmp_path / "records-0.jsonl"), "--from", "nemo-rl"], ("rewards",)),
    ):
        code = main(["doctor", *arguments])
        err = capsys.readouterr().err
        assert code == 2, (arguments, err)
        assert all(word in err for word in words), err
        assert "Traceback" not in err
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing")
    assert main(["doctor", str(tmp_path / "x.parquet"), "--from", "trl"]) == 2
    assert "x.parquet" in capsys.readouterr().err
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert main(["doctor", str(tmp_path / "x.csv"), "--from", "trl"]) == 2
    assert "prompt" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", str(tmp_path), "--from", "verl"])
    assert "trl" in capsys.readouterr().err
    for trainer in ("verl", "", 3):
        with refuses(UsageError, "trainer"):
            pt.diagnose(tmp_path, trainer=trainer)  # type: ignore[arg-type]
    with refuses(UsageError, "audit"):
        pt.diagnose(tmp_path, trainer="trl", audit=2)


def test_what_users_of_trl_copy_has_at_most_20_lines() -> None:
    text = (Path(__file__).parents[2] / "contrib" / "trl_records.py").read_text()
    lines = text[text.index("class Recorded") :].splitlines()
    assert len([line for line in lines if line.strip()]) == 20
