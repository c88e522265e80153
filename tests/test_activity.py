"""A process whose output is no terminal says what it is doing when it printed nothing for a while."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain import activity, cli
from posttrain.activity import Phase, describe_activity, each_piece, heartbeat, phase
from posttrain.untrusted import note_output


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is due after 0.05 s."""
    monkeypatch.setattr(activity, "QUIET_SECONDS", 0.05)


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


def test_quiet_seconds_leaves_room_below_thirty() -> None:
    assert 5 <= activity.QUIET_SECONDS <= 25


def test_describe_activity_of_nested_phases_names_all_and_counts_the_last() -> None:
    default = Phase("posttrain train")
    assert describe_activity(default) == "posttrain train: 0 s"
    with phase("step 3 of 60"), phase("sampling", 512, "answers") as sampling:
        sampling.num_done = 128
        assert describe_activity(default) == "step 3 of 60, sampling: 128 of 512 answers, 0 s"
        with phase("grading\x1b[2J\n", describe=lambda: "7 tokens"):
            line = describe_activity(default)
            assert line == "step 3 of 60, sampling 128 of 512 answers, grading\\x1b[2J : 7 tokens, 0 s"
    assert describe_activity(default) == "posttrain train: 0 s"


def test_phase_of_failed_work_is_over() -> None:
    with pytest.raises(KeyError), phase("work"):
        raise KeyError
    assert describe_activity(Phase("idle")) == "idle: 0 s"


def test_each_piece_counts_the_members_of_the_pieces_before() -> None:
    said = [describe_activity(Phase("idle")) for _ in each_piece("scoring", [[1, 2], [3]], "answers")]
    assert said == ["scoring: 0 of 3 answers, 0 s", "scoring: 2 of 3 answers, 0 s"]
    assert describe_activity(Phase("idle")) == "idle: 0 s"


def test_heartbeat_in_silence_prints_and_while_others_print_does_not(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    with heartbeat("work", stream):
        wait_for(lambda: stream.getvalue().count("work: 0 s\n") > 1)
    silent = stream.getvalue()
    time.sleep(0.15)
    assert stream.getvalue() == silent  # it ended with the block
    monkeypatch.setattr(activity, "QUIET_SECONDS", 5.0)
    busy, started = io.StringIO(), time.monotonic()
    with heartbeat("work", busy):
        while time.monotonic() - started < 0.1:
            note_output()
    assert busy.getvalue() == ""


def test_heartbeat_within_another_or_off_prints_nothing(impatient: None) -> None:
    outer, inner, off = io.StringIO(), io.StringIO(), io.StringIO()
    with heartbeat("off", off, is_on=False), heartbeat("outer", outer), heartbeat("inner", inner), heartbeat("", None):
        wait_for(lambda: outer.getvalue() != "")
    assert inner.getvalue() == off.getvalue() == ""


def test_heartbeat_whose_reader_is_gone_ends_without_an_error(impatient: None) -> None:
    closed = io.StringIO()
    closed.close()
    with heartbeat("work", closed):
        time.sleep(0.15)


SMALL = ["--eval.every", "0", "--rollout.num_prompts", "4", "--rollout.group_size", "4", "--rollout.max_tokens", "48"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "QUIET_SECONDS", 0.002)


def test_train_into_a_file_says_what_it_does_among_its_progress(
    eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "tiny/grpo", "--train.steps", "1", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.match(r"preparing, loading \S+: \d+ s", line)]
    assert [line for line in lines if re.match(r"step 1 of 1, sampling: \d+ of 16 answers, [\d,]+ tokens, \d+ s", line)]
    assert cli.main(["train", "tiny/grpo", "--train.steps", "1", *SMALL, "--run", "quiet", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == ["run:    runs/quiet"]


def test_generate_into_a_pipe_says_what_it_does_on_standard_error(
    eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "tiny", "--samples", "4", "--max-tokens", "64"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^sampling: \d+ of 4 answers, ", shown.err, re.MULTILINE)
    assert "sampling: " not in shown.out


def test_evaluate_as_json_has_nothing_but_json_on_standard_output(
    eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["evaluate", "tiny", "--task", "stories", "--limit", "8", "--max-tokens", "32", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)
    assert re.search(r"evaluation on stories \S+ of 8 items, sampling: ", shown.err)


def test_every_command_says_where_a_silence_is_broken() -> None:
    """Those that wait for a person, or for requests, break none."""
    silent = {name for name, command in cli.COMMANDS.items() if not command.beats}
    assert silent == {"chat", "studio", "serve", "runs manage"}
