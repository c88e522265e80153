"""Knights and knaves: whether a response says of every inhabitant, once and for all, what they are."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from posttrain.graders.grading import Submission, Verdict
from posttrain.graders.knights_lists import any_name_of, name_pattern, spell_out
from posttrain.graders.knights_remarks import introduces, is_neutral, leads_on, leaves_standing
from posttrain.graders.responses import answer_region
from posttrain.registry import register

MAX_CHARS = 20_000  # of a response: what comes before is no conclusion
MAX_NAMES = 100

_ROLE_NAMES = {True: "knight", False: "knave", None: "both"}
_DRESS = re.compile(r"[*_`$#{}]|\\(?:text|textbf|mathrm|mathbf|boxed)\b|\\[,;!]")
# Behind a name: "is a knight", "is not a knave", ": knight", "→ knave"; then a second role that takes the first back,
# or the other role denied ("not a knave").
_CLAIM = (
    r"\s{0,3}(?:(is\s{1,3}not\b|isn['’]t\b|can(?:not|['’]t)\s{1,3}be\b)|(?:is|must\s{1,3}be|has\s{1,3}to\s{1,3}be)\b|"
    r"->|[:=(→|–—-])?\s{0,3}(?:(?:definitely|therefore|thus|also|clearly)\s{1,3})?(?:(?:an?|the)\s{1,3})?(knight|knave)\b"
    r"((?:\s{0,3}[/,]\s{0,3}|\s{1,3}(?:or|and|and/or)\s{1,3})(?:(?:an?|the|also|maybe|possibly)\s{1,3}){0,3}"
    r"(?:knight|knave)\b)?"
    r"(?:[\s,;]{0,3}(?:and\s{1,3})?\bnot\s{1,3}(?:(?:an?|the)\s{1,3})?(?!\3)(?:knight|knave)\b)?"
)
# Words beside the statements of a line, which then states nothing: it supposes, reports, denies or doubts.
_SUPPOSED = r"if|unless|whether|either|would|could|might|suppos\w*|assum\w*|says?|said|claim\w*|told|tells|states?"
_DENIED = (
    r"not|\w{1,9}n['’]t|cannot|never|no(?!\.\s?\d)|none|neither|nor|doubt\w*|false\w*|untrue|wrong\w*|mistake\w*|incorrect\w*|"
    r"contradict\w*|impossible|absurd|unlikely|hardly|den(?:y|ies|ied)|refut\w*|reject\w*|disprov\w*|rule[sd]?\s{1,3}out"
)
# Sentences that take back the list above them: "Wait, no.", "No: the opposite.", "Just kidding."
_TAKEN_BACK = re.compile(
    r"(?:^|[.!?;\n])[\s*_(]{0,4}"
    r"(?:(?:oh|but|ah|well|ok|okay|or|and|so|rather|in fact|actually|no)\b[,.:;!–—-]{0,3}\s{1,3}){0,3}(?:"
    r"wait\b(?=\s{0,3}(?:[,.!:;…–—-]|$|no\b))|no\b[,.!:]{0,3}+\s{0,3}+(?=[.!]?\s{0,3}$|wait\b|sorry\b|that['’]s|it['’]s)|not[.!]{0,3}\s{0,3}$|hmm|"
    r"sorry\b(?=\s{0,3}(?:[,.!:;]|$))|correction\b|scratch\s{1,3}that\b|never\s?mind\b|on\s{1,3}second\s{1,3}thoughts?\b|"
    r"i\s{1,3}(?:was|am)\s{1,3}(?:wrong|mistaken|joking)\b|i\s{1,3}lied\b|(?:just\s{1,3})?kidding\b|"
    r"i\s{1,3}take\s{1,3}(?:that|it|this|all)\b.{0,20}\bback\b|"
    r"(?:(?:it|that)(?:['’]s|\s{1,3}is)\s{1,3})?(?:(?:exactly|quite|just|rather|maybe|perhaps)\s{1,3})?(?:vice\s{1,3}versa|"
    r"the\s{1,3}(?:opposite|reverse|contrary|other\s{1,3}way\s{1,3}(?:a?round)))(?:\s{1,3}(?:is|holds|applies|was)\b[^.!?\n]{0,30})?"
    r"\s{0,3}(?:[.!;)]|$))",
    re.IGNORECASE,
)
_STATES_NOTHING = re.compile(rf"\b(?:{_SUPPOSED}|{_DENIED})\b", re.IGNORECASE)


@register("grader")
def knights_and_knaves(submission: Submission) -> Verdict:
    """Right if the response calls every inhabitant what they are, and none of them both.

    Read are statements such as ``(1) Zoey is a knight`` or ``Zoey: knight``, without case; "is not a knave" says
    knight, since everyone is one or the other. They stand in the answer tags or the last box, all of which counts, so
    that a name with two roles is wrong. Without these, the last lines of the response that state roles are read:
    upwards to a line that states none or, where every name was called, to a blank one. Lines that suppose, report
    or deny ("if Zoey is a knight", "Zoey says", "it is false that") state nothing at all. A statement may be
    repeated; a missing name, both roles, and "a knight or a knave" are wrong, and a list that is opened or followed
    by words that may turn it round ("Suppose:", "Swap the roles.") is no answer: beside statements a marked answer
    holds harmless words only (knights_remarks), and below an unmarked list so do the sentences before an explanation.
    Groups ("Knights: Zoey, Bob; knave: Jack") and Markdown tables are read, too.

    ``meta``: ``names``, and ``solution``, of which True is a knight. The fact ``people_right`` is the share of
    names that were called what they are.

    Source: knights-and-knaves puzzles of Xie et al. 2024 (arXiv 2410.23123); rule-based reward as in Logic-RL
    (Xie et al. 2025). Departure: statements are read by name, in any order.
    """
    names, solution = submission.meta.get("names"), submission.meta.get("solution")
    if not names or solution is None or len(names) != len(solution) or len(names) > MAX_NAMES:
        return Verdict("ungraded", facts={"people_right": 0.0})
    text, marked = answer_region(submission) or ("", True)
    if marked and len(text) > MAX_CHARS:
        text = ""  # no list of names, and all of it would count
    roles = read_roles(text[-MAX_CHARS:], names, all_lines=marked)
    if not roles:
        return Verdict("no_answer", facts={"people_right": 0.0})
    share = sum(roles.get(name) is bool(role) for name, role in zip(names, solution, strict=True)) / len(names)
    stated = ", ".join(f"{name}: {_ROLE_NAMES[roles[name]]}" for name in names if name in roles)
    return Verdict("right" if share == 1.0 else "wrong", stated, {"people_right": share})


def read_roles(text: str, names: Sequence[str], *, all_lines: bool) -> dict[str, bool | None]:
    """For every name that is called something: True for a knight, False for a knave, None for both.

    Args:
        text: what is read.
        names: the inhabitants.
        all_lines: whether all of the text counts, or the lines at its end alone.
    """
    pattern, any_name = _claims_about(tuple(names)), any_name_of(tuple(names))
    known = {name.casefold(): name for name in names}
    roles: dict[str, bool | None] = {}
    doubts: list[tuple[str, ...]] = []  # what "No, Zoey is a knave" says below the list
    below: list[str] = []  # the lines below the list, the last one first
    harmless, opening = True, ""
    for line in reversed(spell_out(_DRESS.sub("", text), names)):
        # the words count beside the statements alone: a name may be such a word, and "is not a knave" is a statement
        beside, claims = pattern.sub(" ", line), pattern.findall(line)
        if all_lines:
            harmless = harmless and is_neutral(any_name.sub(" ", beside))
        if not roles and _TAKEN_BACK.search(beside):
            if not claims:
                return {}
            doubts.extend(claims)
            continue
        stated = [] if _STATES_NOTHING.search(beside) else claims
        ended = not all_lines and bool(roles) and not stated and (bool(line.strip()) or len(roles) == len(names))
        if ended or opening:
            opening = line  # above its headings a table may stand, and blank lines above a list
            if line.strip() and "|" not in line:
                break
            opening = "|"
            continue
        if stated and not all_lines and not _is_stated(line, pattern, any_name, None if roles else below):
            return {}
        if not stated and not roles:
            below.append(line)
        for name, denied, role, second in stated:
            is_knight = (role.casefold() == "knight") != bool(denied)
            key = known[name.casefold()]
            agrees = not second and roles.get(key, is_knight) is is_knight
            roles[key] = is_knight if agrees else None
    # all that stands in a marked answer counts; where names are missing it is wrong in any case
    if (not harmless and len(roles) == len(names)) or not introduces(opening, any_name):
        return {}
    kept = all(
        roles.get(known[name.casefold()]) is ((role.casefold() == "knight") != bool(d)) for name, d, role, _ in doubts
    )
    return roles if kept else {}


def _is_stated(line: str, pattern: re.Pattern[str], any_name: re.Pattern[str], below: Sequence[str] | None) -> bool:
    """Whether the words around a line's statements leave them stated; ``below`` follows the last line of a list."""
    last = deque(pattern.finditer(line), maxlen=1)[0]
    following = line[last.end() :] + ("" if below is None else "\n" + "\n".join(reversed(below)))
    return leads_on(pattern.sub(" ", line[: last.start()])) and leaves_standing(following, any_name)


@lru_cache(maxsize=256)  # a puzzle is graded many times in a row
def _claims_about(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"({name_pattern(names)}){_CLAIM}", re.IGNORECASE)
