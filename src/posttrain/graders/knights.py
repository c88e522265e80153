"""Knights and knaves: whether a response says of every inhabitant, once and for all, what they are."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache

from posttrain.graders.answers import answer_region
from posttrain.graders.grading import Submission, Verdict
from posttrain.registry import register

# Lists and tables of knights and knaves, spelt out: "Knights: A, B; knaves: C" becomes one statement for each name.

_ROLE = re.compile(r"\W{0,8}(knight|knave)s?\W{0,8}", re.IGNORECASE)
_RULER = re.compile(r"[\s|:]*-[\s|:-]*")
_YES = frozenset(("✓", "✔", "✔️", "✅", "☑", "yes", "true"))
_NOBODY = r"none|nobody|no\s{1,3}one|\(none\)|\[\s?\]|\{\s?\}|∅|[-–—]"
# What may stand in front of "knights:" where a group begins; "knights and knaves:" is a heading.
_START = (
    r"(?P<start>^[^\w]{0,8}|[.;,(]\s{0,3}|(?<!knights\s)(?<!knight\s)\band\s{1,3}|\b(?:while|but|so|therefore|thus)\s{1,3})"
    r"(?:(?:the|all|only)\s{1,3}){0,2}"
)


def spell_out(text: str, names: Sequence[str]) -> list[str]:
    """The lines of the text, with groups and the rows of tables as ``NAME is a knight``."""
    lines = _spell_tables(text.splitlines(), any_name_of(tuple(names)))
    return [_spell_groups(line, tuple(names)) for line in lines]


def name_pattern(names: Sequence[str]) -> str:
    """One of the names, as words of their own."""
    longest_first = sorted(names, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(re.escape(name) for name in longest_first)})(?!\w)"


@lru_cache(maxsize=256)  # a puzzle is graded many times in a row
def any_name_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds each of the names."""
    return re.compile(name_pattern(names), re.IGNORECASE)


@lru_cache(maxsize=256)
def _groups(names: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Names behind a role ("knights: A, B"), and a role behind several names ("A and B are knights")."""
    one = name_pattern(names)
    further = rf"(?:\s{{0,3}}(?:,\s{{0,3}}(?:and\b|&)|,|and\b|&|\+)\s{{0,3}}{one})"
    behind = (
        rf"{_START}(?P<role>knight|knave)s?\s{{0,3}}(?:\(s\)|\([0-9]\))?\s{{0,3}}(?:are\b|is\b|->|[:=→–—-])\s{{0,3}}[\[{{(]?\s?"
        rf"(?P<names>{one}{further}{{0,99}}|{_NOBODY})[\])}}]?"
        r"(?=\s{0,3}(?:[.;!|]|$|,?\s{0,3}(?:(?:and|while|but)\s{1,3})?(?:(?:the|only|all)\s{1,3}){0,2}(?:knight|knave)))"
    )
    before = (
        rf"(?P<start>\bboth\s{{1,3}})?(?P<names>{one}{further}{{1,99}})\s{{0,3}}(?:(?:are|must\s{{1,3}}be)\b|[:=→–—-])\s{{0,3}}"
        r"(?:(?:both|all|the|definitely|therefore|thus)\s{1,3}){0,2}(?P<role>knight|knave)s\b"
    )
    return re.compile(behind, re.IGNORECASE), re.compile(before, re.IGNORECASE)


def _spell_groups(line: str, names: tuple[str, ...]) -> str:
    def state(match: re.Match[str]) -> str:
        start = (match["start"] or "").removeprefix("both ")
        return f"{start}{_state(any_name_of(names).findall(match['names']), match['role'])} "

    for pattern in _groups(names):
        line = pattern.sub(state, line)
    return line


def _state(names: Sequence[str], role: str) -> str:
    return ", ".join(f"{name} is a {role.lower()}" for name in names)


def _spell_tables(lines: Sequence[str], any_name: re.Pattern[str]) -> Iterator[str]:
    """Rows of tables whose columns, or whose first cells, are the roles; all other lines as they are."""
    roles: dict[int, str] = {}  # by column, of the table that is being read
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 2:
            roles = {}
            yield line
            continue
        named = {i: match[1] for i, cell in enumerate(cells) if (match := _ROLE.fullmatch(cell))}
        if len({role.lower() for role in named.values()}) == 2 and not any_name.search(line):
            roles = named
            yield ""
        elif _RULER.fullmatch(line):
            yield ""
        elif roles:
            yield _read_row(cells, roles, any_name)
        elif list(named) == [0] and any_name.search(line):
            yield _state(any_name.findall(line), named[0])
        else:
            yield line


def _read_row(cells: Sequence[str], roles: dict[int, str], any_name: re.Pattern[str]) -> str:
    """A row below columns of roles: names in them, or a mark in one of them beside a name."""
    beside = [name for i, cell in enumerate(cells) if i not in roles for name in any_name.findall(cell)]
    stated = []
    for i, role in roles.items():
        cell = cells[i] if i < len(cells) else ""
        others = [cells[j] for j in roles if j != i and j < len(cells)]
        marked = cell.casefold() in _YES or (cell.casefold() == "x" and not any(others))
        stated.append(_state(beside if marked else any_name.findall(cell), role))
    return ", ".join(one for one in stated if one)


# What may stand beside the statements of a list of knights and knaves, so that they stay stated.  A list can be turned
# round in more words than can be listed. So it is the harmless words that are: headings, what joins sentences, and the
# remark that all fits. In a marked answer nothing else may stand. In a response without marks what is above the list is
# reasoning, of which the words that lead to the list are looked at; below it an explanation may follow.

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_NEUTRAL = frozenset(
    _WORD.findall("""
    a above according accordingly across actually all altogether am analysis and answer answers are arrive as
    assignment assignments based be been below both by can case character characters check checked clear clearly
    clue clues coherent complete completely conclude concluded conclusion condition conditions confident confirm
    confirmed confirms consequently consistent constraint constraints correct correctly deduce deduced deduction
    deductions definitely description determine determined determines do done each every everyone everything
    exactly explanation final finally find first fit fits following follows for found from fully further get given
    gives group hard has have having help helps hence here hold holds hope i identification identified identities
    identity in indeed inhabitant inhabitants is island islander islanders it item its lastly lead leads let
    letters list listed logic logical logically long mapping match matches me meet meets member members my name
    names now number of on only order our out outcome overall people person persons problem proven putting puzzle
    question questions reached reading reasoning respective respectively response result results right role roles
    satisfied satisfies satisfy scenario second set shown simply so solution solutions solve solved solves sorry
    statement statements status step steps sum summarise summarize summary table thank thanks that the their them
    then there therefore these they third this those thus to together true truly truthful type types unique
    uniquely up us valid verified verify was way we were what where which who will with work works yes you your 因此
    所以 最终答案 答案 结论
    """)
)
# Remarks whose words are not harmless in another order.
_REMARKS = re.compile(
    r"\b(?:knights?\s+and\s+(?:the\s+)?knaves?|who\s+is\s+a\s+knight\s+and\s+who\s+(?:is\s+)?a\s+knave|knights?\s*/\s*knaves?|"
    r"knights?\s+or\s+(?:a\s+)?knaves?|only\s+possible|(?:there\s+(?:is|are)\s+)?no\s+(?:other|further|more)\s+"
    r"(?:assignments?|solutions?|possibilit(?:y|ies)|cases?|way)(?:\s+(?:is|are)\s+possible)?|no\s+contradictions?(?:\s+arises?)?|without\s+(?:any\s+)?contradictions?|"
    r"(?:the\s+opposite|any\s+other|every\s+other|all\s+other|other)\s+(?:assignments?|cases?|choices?|combinations?)\s+"
    r"(?:leads?\s+to|gives?|yields?|ends?\s+in|results?\s+in)\s+(?:a\s+)?contradictions?|"
    r"not\s+(?:so|very|too|that)\s+(?:hard|difficult|simple|easy)|let\s+me\s+know(?:\s+if\b.*)?|feel\s+free\b.*|"
    r"if\s+you\s+have\s+(?:any\s+)?(?:further\s+)?questions|(?:who\s+)?always\s+(?:lies|tells\s+the\s+truth)"
    r"|(?:all\s+)?knights\s+(?:always\s+)?tell\s+the\s+truth,?\s+(?:and|while)\s+(?:all\s+)?knaves\s+(?:always\s+)?lie)\b"
    r"|<[^<>\s]{1,20}>|\(\s?(?:a\s+|the\s+)?(?:truth[\s-]teller|liar)\s?\)|\\(?:q?quad|hline|newline|left|right|item|(?:begin|end)[a-z]*)",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|since)\b[^.!?;\n]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;\n]|:(?=\s)")
# Behind a list: here an explanation begins, which may suppose and deny what it likes.
_EXPLAINS = re.compile(
    r"\b(?:because|since|if|when|says|said|claims|claimed|tells|stated|assum\w+|suppos\w+|knaves?\s+(?:lied|lies?))\b"
    r"|^\W*(?:explanations?|reasons?|reasoning|verification|justification|proof|check|steps?|notes?|analysis)\W*$",
    re.IGNORECASE,
)
# In front of a list: words that suppose, deny, doubt, report or offer alternatives.
_UNSURE = re.compile(
    r"\b(?:if|unless|whether|either|or|would|could|might|may|perhaps|maybe|possibly|suppos\w*|assum\w*|imagine|says?|said|"
    r"claim\w*|not|\w+n['’]t|cannot|never|no|none|neither|nor|doubt\w*|false\w*|untrue|wrong\w*|incorrect\w*|mistake\w*|"
    r"impossible|opposite|lies?|reverse\w*|contrary|negation|inverse|inverted|swapp?\w*|exchange\w*|flip\w*|vice|otherwise|"
    r"instead\s+of|anything|hardly|unlikely|kidding)\b",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[.!?;,](?=\s)")
_DOUBT_SIGNS = re.compile(r"[?¬≠✗✘❌✖]")
# A line without a colon that runs on into the list: "If", "It cannot be that", "or".
_RUNS_ON = re.compile(
    r"\W*(?:\w+\W+)?\w+\W*|.*\b(?:if|that|or|nor|not|whether|unless|either|suppose|of|be)\W*", re.IGNORECASE
)
_RUN_ON_END = re.compile(r"[.!?;\n]|\s(?=[A-Z])")  # "Zoey is a knight The opposite is true"


def is_neutral(text: str) -> bool:
    """Whether the text has harmless words only: a heading, a conjunction, "this is the only solution"."""
    rest = _REASON.sub(" ", _REMARKS.sub(" ", text))
    words = (word.casefold().replace("’", "'").removesuffix("'s") for word in _WORD.findall(rest))
    return not _DOUBT_SIGNS.search(rest) and all(word in _NEUTRAL for word in words)


def leads_on(text: str) -> bool:
    """Whether words in front of a statement on its line leave it stated."""
    return _UNSURE.search(_REMARKS.sub(" ", _CLAUSE_END.split(text)[-1])) is None


def introduces(line: str, names: re.Pattern[str]) -> bool:
    """Whether the line above a list leaves it stated; a sentence that has ended says nothing about it."""
    line = line.strip()
    if not line.endswith((":", "：")) and (line.endswith((".", "!", "?")) or names.search(line)):
        return True
    return leads_on(line) or not (line.endswith((":", "：")) or _RUNS_ON.fullmatch(line))


def leaves_standing(text: str, names: re.Pattern[str]) -> bool:
    """Whether what follows the statements leaves them stated: harmless sentences, up to one that begins to explain."""
    end = _RUN_ON_END.search(text)
    own, rest = (text, "") if end is None else (text[: end.start()], text[end.end() :])
    if _UNSURE.search(_REMARKS.sub(" ", own)) or _DOUBT_SIGNS.match(text.lstrip(" )")):
        return False
    for sentence in _SENTENCE_END.split(rest):
        if names.search(sentence) or _EXPLAINS.search(sentence):
            return True
        if not is_neutral(sentence):
            return False
    return True


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
