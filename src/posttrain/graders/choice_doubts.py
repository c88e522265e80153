"""What takes back a choice: a denial or a retraction behind it, another letter stated behind it, a report in front."""

from __future__ import annotations

import re
from collections.abc import Callable

TAIL_CHARS = 2_000  # of what follows an answer
SEPARATOR = re.compile(r"^[\s.):,;\]]*(?:[-–—]\s+)?")
# A sentence that takes back the one in front of it. "No, because" and "Wait for it" may be the texts of choices.
TAKEN_BACK = re.compile(
    r"(?:^|[.!?;\n。！？；，])[\s*_]{0,4}(?:(?:oh|but|ah|well|ok|okay)\b[,.]?\s{1,3}){0,2}(?:"
    r"wait\b(?=\s{0,3}(?:[,.!:;…–—-]|$|no\b))|no\b[,.!]?\s{0,3}(?=$|wait\b|sorry\b|actually\b|that\b|it\b|i\b)|hmm|"
    r"actually\b|sorry\b|correction\b|scratch\s{1,3}that\b|never\s?mind\b|on\s{1,3}second\s{1,3}thoughts?\b|"
    r"no\b[,.!]?\s{0,3}(?=[(\[]?(?-i:[A-J])[)\]]?\s{0,3}(?:[.,?!;]|$|or\b|maybe\b|perhaps\b))|"
    r"不(?:对|是)?\s?(?:[,，。!！]|$)|等等|错了|更正|"
    r"i\s{1,3}(?:was|am)\s{1,3}(?:wrong|mistaken)\b|i\s{1,3}take\s{1,3}(?:that|it|this)\s{1,3}back\b|"
    r"(?:that|this|it)(?:['’]s|\s{1,3}(?:is|was))\s{1,3}(?:wrong|incorrect|false|a\s{1,3}mistake|not\s{1,3}(?:right|correct|true))\b"
    r"(?!\s{1,3}(?:to|that)\b))",
    re.IGNORECASE,
)
# What others say: "Nobody says A is the answer", "They think the answer is".
REPORTED = re.compile(
    r"\b(?:nobody|no\s?one|none|they|people|some|someone|somebody|everyone|everybody|many|most|few|others?|another|he|she|who)"
    r"\s{1,3}(?:[a-z]{1,12}\s{1,3}){0,3}(?:say|think|believe|claim|argue|guess|suggest|insist|answer|thought|said)(?:s|d|ed)?"
    r"\s{1,3}(?:that\s{1,3})?(?:(?:the|option|choice|correct|final|right|best)\s{1,3}){0,3}[(\[*]{0,3}$"
    r"|\b(?:false|untrue|unlikely|hardly|impossible|no\s{1,3}way)\s{1,3}(?:that\s{1,3})?(?:(?:the|option|choice)\s{1,3}){0,2}$",
    re.IGNORECASE,
)
# Words without contents. A sentence of these and another letter states that letter; of these and a denial, it denies.
_STATING = frozenset(
    re.findall(
        r"\S+",
        """
    actually again ah all and answer at be best better but change changed choice choose correct correction could fact
    final go hence hmm i i'd i'll in instead is it it's its just letter make may maybe mean meant might must my no now
    oh ok okay oops option or perhaps pick possibly quite rather really right said say should so sorry switch that
    that's the then therefore this thus to wait was well with yes kidding joking
    """,
    )
)
_DENYING = frozenset(("not", "nope", "nah", "never", "isn't", "wasn't", "kidding", "joking", "untrue"))
_JUDGING = frozenset(("false", "wrong", "incorrect"))
_RULED_OUT = re.compile(
    r"\b(?:not|neither|nor|never|\w{1,9}n['’]t|than|unlike|except|exclud\w+|eliminat\w+|rul(?:e|es|ed|ing)\s{1,3}out|wrong|"
    r"incorrect|false|no(?=\s{1,3}[A-J]\b))(?!\w)",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"([^.!?;\n。！？；]+)([.!?;。！？；]?)")
_CLAUSE_END = re.compile(r"[,:，：–—]|\s-\s|\bbut\b", re.IGNORECASE)
_WORD = re.compile(r"[^\s,:*_`$\"“”‘()\[\]{}–—]+")


def takes_back(letter: str, following: str, letter_of: Callable[[str], str | None], *, has_texts: bool) -> bool:
    """Whether what follows an answer takes it back, or states another letter: "Not.", "I mean B.", "Just kidding, B."

    Args:
        letter: the answer.
        following: the text behind it.
        letter_of: the letter of a choice's text.
        has_texts: whether the texts of the choices are known; else "A. False" may be a label with its text.
    """
    if TAKEN_BACK.search(SEPARATOR.sub("", following)):
        return True
    asked = False
    following = following[:TAIL_CHARS]
    for sentence in _SENTENCE.finditer(following):
        was_asked, asked = asked, sentence[2] in "?？" and bool(sentence[2])
        if asked:
            continue
        if not was_asked and _denies(sentence[1], sentence.start() == 0, has_texts):
            return True
        at_line = sentence.start() > 0 and following[sentence.start() - 1] == "\n"
        label = at_line and following[sentence.end() :].partition("\n")[0].strip() != ""
        if _stated_letter(sentence[1], letter_of, may_be_label=label) not in (None, letter):
            return True
    return False


def _denies(sentence: str, first: bool, has_texts: bool) -> bool:
    """Whether a sentence, or the first clause behind an answer, says no and nothing else."""
    text = _CLAUSE_END.split(sentence.lstrip(" ,:)]}*_`$\"'”’"))[0] if first else sentence
    words = [_fold(word) for word in _WORD.findall(text)]
    if first and not has_texts and len(words) == 1 and words[0] in _JUDGING:
        return False
    denying = _DENYING | _JUDGING
    return any(word in denying for word in words) and all(word in _STATING or word in denying for word in words)


def _stated_letter(sentence: str, letter_of: Callable[[str], str | None], *, may_be_label: bool) -> str | None:
    """The letter that a sentence ends with, among words without contents: "rather B", "no: B", "I mean the oak"."""
    ends = list(_CLAUSE_END.finditer(sentence))
    front, joint, clause = (
        ("", "", sentence)
        if not ends
        else (sentence[: ends[-1].start()], ends[-1][0].lower(), sentence[ends[-1].end() :])
    )
    if _RULED_OUT.search(clause) or (joint != "but" and _RULED_OUT.search(front)):
        return None
    before = _WORD.findall(front)
    leads = (joint == "but" and _RULED_OUT.search(front) is not None) or all(
        _fold(word) in _STATING or _is_letter(word) for word in before
    )
    words = list(_WORD.finditer(clause))
    others = [word for word in words if not _is_letter(word[0])]
    if len(words) - len(others) == 1 and all(_fold(word[0]) in _STATING for word in others):
        stated = next(word[0] for word in words if _is_letter(word[0]))
        return stated if others or (leads and not (may_be_label and not before)) else None
    for word in words:
        if _fold(word[0]) not in _STATING:
            break
        if stated_text := letter_of(clause[word.end() :]):
            return stated_text
    return letter_of(clause) if before and leads else None


def _is_letter(word: str) -> bool:
    return len(word) == 1 and word in "ABCDEFGHJ"  # I is a pronoun here


def _fold(word: str) -> str:
    return word.lower().replace("’", "'")
