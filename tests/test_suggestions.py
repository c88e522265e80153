"""A name that nothing has leads to the one that was meant, or to none: never to one that merely shares its letters."""

from __future__ import annotations

import pytest

from posttrain.cli import main
from posttrain.commands.explain import all_names
from posttrain.errors import nearest

MEANT = {  # of all that `posttrain explain` knows
    "kl_cof": "kl_coef",
    "gpro": "grpo",
    "sgpo": "gspo",  # swapped letters come before other ones
    "gsm9k": "gsm8k",
    "normalised": "normalized",
    "Normalized": "normalized",
    "clip-lo": "clip_low",
    "temprature": "temperature",
    "drgrpo": "dr-grpo",
    "qwen": None,
    "tvpo": None,  # a different method, not a slip
    "zzz": None,
    "": None,
}


def test_each_of_the_usual_slips_leads_to_what_was_meant() -> None:
    known = sorted(all_names())
    assert {name: nearest(name, known) for name in MEANT} == MEANT
    assert {name: nearest(name, reversed(known)) for name in MEANT} == MEANT


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("clip_low", ["clip_low  option of", "grpo        objective  float (at least 0), default 0.2: ", "gspo_token"]),
        ("rewards.0.mode", ["mode  option of", "correct    reward"]),
    ],
)
def test_an_option_of_words_is_explained_by_them(
    name: str, output: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert not [line for line in output if line not in out], out
