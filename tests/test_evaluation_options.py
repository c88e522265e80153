"""Options of lm-eval's command line are answered by `posttrain evaluate`: with what does the same, or not offered."""

from __future__ import annotations

import pytest

import posttrain as pt
from posttrain.cli import main
from posttrain.errors import UsageError

# Options of lm-eval 0.4.13 that are not called the same here, and what the answer says.
ANSWERS = {
    "--config": "not offered",
    "-C": "not offered",
    "--model": "MODEL",
    "-M": "MODEL",
    "--model_args": "MODEL",
    "-a": "MODEL",
    "--tasks": "--task",
    "-t": "--task",
    "--apply_chat_template": "--template chat",
    "-L": "--limit",
    "--use_cache": "--out",
    "-c": "--out",
    "--num_fewshot": "not offered",
    "-f": "not offered",
    "--batch_size": "--batch",
    "-b": "--batch",
    "--max_batch_size": "--batch",
    "--gen_kwargs": "--temperature",
    "--output_path": "--out",
    "-o": "--out",
    "--log_samples": "items.jsonl",
    "-s": "items.jsonl",
    "-E": "not offered",
    "--cache_requests": "none is needed",
    "--check_integrity": "not offered",
    "--system_instruction": "--template.system",
    "--fewshot_as_multiturn": "not offered",
    "--include_path": "--task module:function",
    "--verbosity": "--quiet",
    "-v": "--quiet",
    "--write_out": "posttrain data show",
    "-w": "posttrain data show",
    "--show_config": "results.json",
    "--wandb_args": "not offered",
    "--wandb_config_args": "not offered",
    "--trackio_args": "not offered",
    "--hf_hub_log_args": "not offered",
    "--predict_only": "posttrain generate",
    "-x": "posttrain generate",
    "--confirm_run_unsafe_code": "none is needed",
    "--metadata": "--task.KEY",
    "--question_suffix": "--task.prompt_format",
    "--num-fewshot": "not offered",
}
# Values of options with the same name there, which are of another form here.
VALUES = {
    "--limit": ("0.1", "whole number"),
    "--seed": ("0,1234,1234,1234", "whole number"),
    "--device": ("cuda:0", "'cuda'"),
    "--samples": ('{"arc": [0, 1]}', "whole number"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_option_of_lm_eval_is_answered_by_what_does_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "tiny", name, "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    answer = said.partition("Known: ")[0]
    assert ANSWERS[name] in answer
    assert "Traceback" not in said


@pytest.mark.parametrize("name", VALUES)
def test_value_of_lm_eval_is_refused_with_the_form_that_is_taken(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, wanted = VALUES[name]
    with pytest.raises(SystemExit):
        main(["evaluate", "tiny", name, value])
    said = " ".join(capsys.readouterr().err.split())
    assert wanted in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "answer"), [("num_fewshot", "not offered"), ("gen_kwargs", "temperature"), ("log_samples", "items.jsonl")]
)
def test_argument_of_lm_eval_is_answered_in_python(name: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        pt.evaluate("tiny", **{name: 1})


def test_option_of_lm_eval_is_answered_by_evaluate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny", "hello", "--num_fewshot", "1"]) == 2
    assert "few" not in capsys.readouterr().err.replace("--num_fewshot", "")
