"""Knights and knaves: every inhabitant called once and for all what they are."""

from __future__ import annotations

import time

import pytest

from posttrain.graders.grading import Submission, Verdict
from posttrain.graders.knights import knights_and_knaves, read_roles

META = {"names": ("Jack", "Jackson", "Zoey"), "solution": (True, False, True)}
GOLD = "(1) Jack is a knight\n(2) Jackson is a knave\n(3) Zoey is a knight"


def verdict(text: str, extracted: str | None = None) -> Verdict:
    return knights_and_knaves(Submission(text, extracted, GOLD, META))


@pytest.mark.parametrize(
    "text",
    [
        GOLD,
        f"<think>If Zoey is a knave, Jack is a knave.</think> <answer> {GOLD} </answer>",
        "(1) Jack is a knight, (2) Jackson is a knave, (3) Zoey is a knight",
        "Zoey: Knight\nJackson: Knave\nJack: KNIGHT",
        "- **Jack**: knight\n- **Jackson**: *knave*\n- **Zoey** → knight",
        "Jack = knight; Jackson = knave; Zoey = knight",
        "Jack is not a knave. Jackson isn't a knight. Zoey must be a knight.",
        "Jack is definitely a knight, Jackson is a knave and Zoey is a knight.",
        f"So Zoey is a knave? That is absurd.\n\n{GOLD}\n\nI hope this helps.",
        f"{GOLD}\nSo Zoey is a knight.",
        "jack is a knight, not a knave.\njackson is a knave.\nzoey is the knight.",
        "\\boxed{\\text{Jack is a knight, Jackson is a knave, Zoey is a knight}}",
    ],
)
def test_right(text: str) -> None:
    found = verdict(text)
    assert (found.outcome, found.facts) == ("right", {"people_right": 1.0})
    assert found.extracted == "Jack: knight, Jackson: knave, Zoey: knight"


GROUPS = [
    "Knights: Jack, Zoey; knaves: Jackson",
    "**Knights:** Jack and Zoey\n**Knaves:** Jackson",
    "- Knights (2): Jack, Zoey\n- Knaves (1): Jackson",
    "The knights are Jack and Zoey, and the only knave is Jackson.",
    "knights = {Jack, Zoey}, knaves = {Jackson}",
    "Both Jack and Zoey are knights, while Jackson is a knave.",
    "Jack, Zoey: knights. Jackson: knave.",
    "<answer>Knights: Jack, Zoey; Knaves: Jackson</answer>",
    "| Name | Role |\n|---|---|\n| Jack | Knight |\n| Jackson | Knave |\n| Zoey | Knight |",
    "| # | Name | Role |\n|--:|:--|---|\n| 1 | **Jack** | Knight |\n| 2 | Jackson | Knave |\n| 3 | Zoey | Knight |",
    "| Knights | Knaves |\n|---|---|\n| Jack, Zoey | Jackson |",
    "| Knights | Knaves |\n|---|---|\n| Jack | Jackson |\n| Zoey | |",
    "| Name | Knight | Knave |\n|---|---|---|\n| Jack | ✓ | |\n| Jackson | | ✓ |\n| Zoey | ✓ | |",
    "| Name | Knight | Knave |\n|---|---|---|\n| Jack | yes | no |\n| Jackson | no | yes |\n| Zoey | yes | no |",
    "| Knights | Jack, Zoey |\n|---|---|\n| Knaves | Jackson |",
]


@pytest.mark.parametrize("text", GROUPS)
def test_groups_and_tables_are_read(text: str) -> None:
    found = verdict(text)
    assert (found.outcome, found.extracted) == ("right", "Jack: knight, Jackson: knave, Zoey: knight")
    for one, other in (("Jackson", "Zoey"), ("Jackson", "Jack")):
        swapped = text.replace(one, "\0").replace(other, one).replace("\0", other)
        assert verdict(swapped).outcome == "wrong", swapped


@pytest.mark.parametrize(
    "text",
    ["Knights: Jack, Zoey", "Knights: Jack, Zoey or Jackson; knaves: Jackson", "Knights: Jack, Zoey, Jackson",
     "Knights: Jack, Jackson, Zoey; knaves: Jack, Jackson, Zoey", "Jack and Zoey are not knights; Jackson is a knave",
     "Knights: Jack, Zoey; knaves: Jackson\nKnaves: Jack, Zoey; knights: Jackson", "Knights: none; knaves: none",
     "If Jack and Zoey are knights, Jackson is a knave", "Knights and knaves: Jack, Jackson, Zoey",
     "| Name | Knight | Knave |\n|---|---|---|\n| Jack | ✓ | ✓ |\n| Jackson | ✓ | ✓ |\n| Zoey | ✓ | ✓ |"],
)  # fmt: skip
def test_groups_that_leave_out_or_call_everything_are_not_right(text: str) -> None:
    assert verdict(text).outcome != "right"


@pytest.mark.parametrize(
    "end",
    ["\nNo: the opposite.", "\nNo: the opposite", " No: the opposite.", "\nThe opposite.", "\n\nWait, no.",
     "\nVice versa.",
     "\nJust kidding.", "\nOr the other way round.", "\nThat is wrong.", "\nAll of this is false.", "\nI lied.",
     "\nNone of this is true.", "\nActually, it's the opposite.", "\nNo, Zoey is a knave.", "\nNo.", "\nNot!",
     "\nHmm, maybe vice versa", "\nSorry, I was wrong.", "\nActually no, Zoey is a knave"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "<answer>{}</answer>"])
@pytest.mark.parametrize("stated", [GOLD, GROUPS[0], GROUPS[8]])
def test_a_list_that_is_taken_back_is_not_right(end: str, form: str, stated: str) -> None:
    assert verdict(form.format(stated + end)).outcome != "right"


@pytest.mark.parametrize(
    "end",
    ["\n\nI hope this helps. No other assignment works.", "\nThe opposite assignment leads to a contradiction.",
     "\nBob says so. This is false.", "\nActually, this is the only solution.", "\nThat is correct.",
     "\nNo, Zoey is a knight.",
     "\nThis is not so hard.", "\nSorry for the long explanation.", "\nNo contradiction arises.",
     "\nIf Zoey were a knave, this would be wrong."],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "Jack is a knave. Wait, no.\n", "Wait, no: the opposite.\n"])
def test_what_else_stands_around_a_list_takes_nothing_back(start: str, end: str) -> None:
    assert verdict(start + GOLD + end).outcome == "right"


TURNED = [
    "The opposite is true.", "vice versa", "Or vice versa.", "Swap the roles.", "Or maybe not.", "False.",
    "Reverse it.", "Reverse all.",
    "I take it back.", "Actually, all of them are knights. Actually, all of them are knaves.", "April fools.",
    "Every knight above is a knave.", "Flip everything above.", "All lies!", "The negation of it holds.",
]  # fmt: skip


@pytest.mark.parametrize("joint", ["\n", " ", "\n\n", ". "])
@pytest.mark.parametrize("form", ["{}", "<answer>{}</answer>", "\\boxed{{\\text{{{}}}}}"])
@pytest.mark.parametrize("stated", [GOLD, GROUPS[0], GROUPS[2]])
def test_what_follows_a_list_has_harmless_words_only(joint: str, form: str, stated: str) -> None:
    texts = [form.format(f"{stated}{joint}{end}") for end in TURNED]
    assert [text for text in texts if verdict(text).outcome == "right"] == []


OPENINGS = [
    "Not:", "The opposite of this:", "Suppose:", "If", "One of these may be right:", "It cannot be that",
    "A knave would say:", "Wrong answers:", "Maybe", "This list is a lie:", "Either this or its opposite:",
    "Imagine that",
    f"{GOLD.replace('Jack is a knight', 'Jack is a knave')}\nor",
]  # fmt: skip


@pytest.mark.parametrize("joint", ["\n", " ", "\n\n"])
@pytest.mark.parametrize("form", ["{}", "Zoey spoke first.\n\n{}", "<answer>{}</answer>"])
@pytest.mark.parametrize("stated", [GOLD, GROUPS[1], GROUPS[8]])
def test_what_opens_a_list_denies_and_supposes_nothing(joint: str, form: str, stated: str) -> None:
    if joint == " " and stated != GOLD:
        return
    texts = [form.format(f"{opening}{joint}{stated}") for opening in OPENINGS]
    assert [text for text in texts if verdict(text).outcome == "right"] == []


@pytest.mark.parametrize(
    "around",
    ["So the final answer is:\n{}", "**Final Answer**\n\n{}", "Putting it all together:\n{}",
     "We can conclude that:\n{}", "Based on the above analysis, we conclude:\n{}", "The knights and knaves are:\n{}",
     "Therefore, {}",
     "{}\nThis assignment satisfies all the statements.", "{}\n\nThis is the only solution.",
     "{}\nNo other assignment is possible.",
     "{}\nAll knights tell the truth and all knaves lie.", "{}\nI hope this helps!", "{}\n---", "{}\n</s>"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "<answer>{}</answer>"])
@pytest.mark.parametrize("stated", [GOLD, GROUPS[0]])
def test_headings_and_remarks_leave_a_list_standing(around: str, form: str, stated: str) -> None:
    assert verdict(form.format(around.format(stated))).outcome == "right"


@pytest.mark.parametrize(
    "text",
    [f"Since Zoey cannot be a knave, we get:\n{GOLD}", f"If Jack is a knave, Zoey lies\nSo:\n{GOLD}",
     f"{GOLD}\n**Explanation:** if Zoey were a knave, that would be false.", f"{GOLD}\nThis is because Jackson lied.",
     f"{GOLD}\nJack tells the truth, while Jackson lies.", f"<answer>答案：{GOLD}</answer>",
     "1. Jack - Knight (truth-teller)\n2. Jackson - Knave (liar)\n3. Zoey - Knight (truth-teller)",
     f"<think> Not: </think> The opposite is wrong. <answer>{GOLD}</answer> Or maybe not."],
)  # fmt: skip
def test_reasoning_around_a_list_is_free(text: str) -> None:
    assert verdict(text).outcome == "right"


@pytest.mark.parametrize(
    ("text", "people_right"),
    [
        (GOLD.replace("Zoey is a knight", "Zoey is a knave"), 2 / 3),
        (GOLD.replace("\n(3) Zoey is a knight", ""), 2 / 3),
        (f"{GOLD}\n(3) Zoey is a knave", 2 / 3),
        (f"(3) Zoey is a knave\n{GOLD}", 2 / 3),
        (f"<answer>{GOLD}\n\nBy the way, Jack is a knave.</answer>", 2 / 3),
        (f"<answer>Jack is a knave.\n\nThat is all.\n\n{GOLD}</answer>", 2 / 3),
        (GOLD.replace("is a knave", "is a knave or a knight"), 2 / 3),
        (GOLD.replace("is a knave", "is a knave and a knight"), 2 / 3),
        (GOLD.replace("is a knave", "is a knave/knight"), 2 / 3),
        (GOLD.replace("is a knave", "is a knave, a knight"), 2 / 3),
        (GOLD.replace("is a knave", "is not a knave"), 2 / 3),
        (GOLD.replace("is a knave", "is neither a knight nor a knave"), 1 / 3),
        (f"{GOLD[:-20]}If Zoey is a knight, then so be it.", 2 / 3),
        (GOLD.replace("Jackson", "Jacksons"), 1 / 3),
        ("Zoey is a knave", 0.0),
        (f"<think>{GOLD}</think> Zoey is a knight", 1 / 3),
    ],
)
def test_wrong(text: str, people_right: float) -> None:
    found = verdict(text)
    assert found.outcome == "wrong"
    assert found.facts["people_right"] == pytest.approx(people_right)


@pytest.mark.parametrize(
    "text",
    ["", "I do not know.", "Jackknight, Zoeyknight", f"<think>{GOLD}", "If Zoey is a knight then Jack is a knight.",
     "Zoey says that Jack is a knave.", "Knights and knaves: Jack, Jackson, Zoey",
     f"<answer>{'x' * 30_000}{GOLD}</answer>"],
)  # fmt: skip
def test_no_answer(text: str) -> None:
    found = verdict(text)
    assert (found.outcome, found.facts) == ("no_answer", {"people_right": 0.0})


TWO = {"names": ("Zoey", "Bob"), "solution": (True, False)}


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("It is not the case that Zoey is a knight, and Bob is a knave", "no_answer"),
        ("It's not true that Zoey is a knight; Bob is a knave", "no_answer"),
        ("Neither Zoey is a knight nor Bob is a knave", "no_answer"),
        ("It cannot be that Zoey is a knight and Bob is a knave.", "no_answer"),
        ("Zoey is a knight and Bob is a knave: a contradiction.", "no_answer"),
        ("I don't think Zoey is a knight, Bob is a knave.", "no_answer"),
        ("I don’t think Zoey is a knight, Bob is a knave.", "no_answer"),
        ("That Zoey is a knight and Bob is a knave is FALSE.", "no_answer"),
        ("Zoey is a knight and Bob is a knave is wrong.", "no_answer"),
        ("Zoey is a knight, not a knight. Bob is a knave.", "no_answer"),
        ("I doubt Zoey is a knight\nBob is a knave", "wrong"),
        ("Zoey is a knight (false)\nBob is a knave", "wrong"),
        ("Zoey is a knight: no\nBob is a knave", "wrong"),
        ("Zoey is a knight\nI deny that Bob is a knave", "wrong"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "<answer>{}</answer>"])
def test_what_is_denied_is_not_stated(text: str, outcome: str, form: str) -> None:
    found = knights_and_knaves(Submission(form.format(text), None, GOLD, TWO))
    assert (found.outcome, found.facts["people_right"]) == (outcome, 0.5 if outcome == "wrong" else 0.0)


@pytest.mark.parametrize(
    "text",
    ["Zoey is not a knave, Bob is not a knight", "Zoey cannot be a knave; Bob can't be a knight",
     "Zoey is a knight and not a knave\nBob is a knave, not a knight.",
     "No. 1: Zoey is a knight\nNo. 2: Bob is a knave",
     "It is not so simple.\nZoey is a knight\nBob is a knave"],
)  # fmt: skip
def test_what_denies_the_other_role_is_a_statement(text: str) -> None:
    assert knights_and_knaves(Submission(text, None, GOLD, TWO)).outcome == "right"


@pytest.mark.parametrize(
    "name", ["Nora", "Notley", "Iffy", "Neveah", "Will Wrong", "Doubt", "Nor", "May", "If", "Claims"]
)
def test_names_may_be_or_contain_words_that_deny(name: str) -> None:
    assert read_roles(f"{name} is a knight, Bob: knave", (name, "Bob"), all_lines=False) == {name: True, "Bob": False}


def test_without_a_solution_nothing_is_graded() -> None:
    for meta in ({}, {"names": ("A",)}, {"names": ("A",), "solution": (True, False)}):
        assert knights_and_knaves(Submission(GOLD, None, GOLD, meta)).outcome == "ungraded"


def test_reading_stops_above_the_last_lines() -> None:
    text = "Jack is a knave.\nTherefore:\nJack is a knight.\n\nZoey is a knight."
    assert read_roles(text, ("Jack", "Zoey"), all_lines=False) == {"Jack": True, "Zoey": True}
    assert read_roles(text, ("Jack", "Zoey"), all_lines=True) == {"Jack": None, "Zoey": True}


@pytest.mark.parametrize(
    "text", ["Zoey is " * 10**5, " " * 10**6, "knight " * 10**5, "Zoey" + " " * 10**6 + "knight", "if\n" * 10**5,
     "Knights: " + "Jack, " * 10**5, "|" * 10**6, "| Jack " * 10**5, "(knights: " * 10**5,
     "Jack, " * 10**5 + "are knights"],
)  # fmt: skip
def test_hostile_texts_are_read_at_once(text: str) -> None:
    start = time.process_time()
    assert verdict(text).outcome != "right"
    assert time.process_time() - start < 2.0
