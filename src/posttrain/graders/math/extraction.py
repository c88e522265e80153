"""Locate the answer in a solution: tags, boxes, "the answer is", the last formula, the last number.

Picks a single candidate, never the best match: listing many answers gives no extra chances. Pure, linear in text
length.
"""

from __future__ import annotations

import re

from posttrain.graders.answers import NUMBER, final_response, find_boxes, last_boxed, last_number, parse_quantity

MAX_TAIL_CHARS = 4000  # read from the end of untagged solutions; earlier text cannot be the conclusion
MAX_BARE_CHARS = 400
MAX_BARE_WORDS = 3  # beyond this many words of prose it is a sentence, not an answer

# Joins two boxes into one answer: "\boxed{1} and \boxed{2}", "\boxed{-2} \quad \text{and} \quad y = \boxed{1}".
_GLUE = re.compile(
    r"(?:[\s$.]|\\[()\[\],;: ]|\\q?quad)*(?:,|;|&|(?:\\text\s*\{\s*)?,?\s*\b(?:and|or)\b\s*\}?)"
    r"(?:[\s$]|\\[()\[\],;: ]|\\q?quad|[A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)*"
)
_MAX_GLUE_CHARS = 60
_PHRASE = re.compile(
    r"(?:\banswers?\b|\br[ée]ponse\b|答案)\s*(?:(?:\*\*|__)\s*)?"
    r"(?P<verb>is\b|are\b|(?:should|would|will|must|has\s+to|can\s+only)\s+be\b|est\b|[:：=]|是|为)?\s*[:：]?"
    r"(?:\s*(?:exactly|simply|just|approximately|about|equal\s+to)\b)?",
    re.IGNORECASE,
)
_INTRODUCTION = re.compile(
    r"(?:so\s+|thus\s+|therefore,?\s+)?(?:the\s+)?(?:final\s+)?answer\s*(?:is\b:?|:)\s*", re.IGNORECASE
)
_FINAL = re.compile(r"\bfinal\s+answer\s*(?P<verb>is\b|:)\s*[:：]?", re.IGNORECASE)
_WITHIN_LINE = re.compile(r"\w[^\n]*\Z")
_RUNS_ON = re.compile(r"[ \t*]*(?:[.,;!?)]|(?:in|as|by|with|now|works?|and|but|because|since|so)\b)", re.IGNORECASE)
_JUDGEMENTS = frozenset(("correct", "right", "valid", "consistent", "reasonable"))  # marks answers given earlier
_HOPE = re.compile(r"\.?\s*I hope (?:it|this)|<\||\n\n")
_SENTENCE_END = re.compile(r"[.!?。]\s+(?=[A-Z\"'(\[*])|[.!?。]?\s*$|。")
_IS = re.compile(r"\b(?:is|are|equals?|est)\b:?")
_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]{1,500})\$\$|(?<![\\$])\$(?P<b>[^$]{1,500})\$|\\\((?P<c>(?:[^\\]|\\[^()]){1,500})\\\)"
    r"|\\\[(?P<d>(?:[^\\]|\\[^\[\]]){1,800})\\\]"
)
_AND = re.compile(r"\s*(?:,|,?\s*\b(?:and|or)\b)\s*")
_COMMAND = re.compile(r"\\[A-Za-z]+|\{[^{}]*matrix\}")
_TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{[^{}]*\}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_SENTENCE = re.compile(
    r"(?:^|\s)(?:is|are|the|so|then|thus|therefore|hence|we|that|here|it)(?=[\s,.:;]|$)", re.IGNORECASE
)
_FOREIGN = re.compile(r"[\u0400-\u10ff\u3040-\ud7ff]")  # scripts that do not write formulas; no Greek
_NAMES_ONLY = re.compile(r"[\s$\\()\[\]]*[A-Za-z](?:_\{?\w\}?)?(?:\([A-Za-z]\))?[\s$\\()\[\]]*")


def find_answer(text: str, extracted: str | None) -> str | None:
    """Extract the graded answer, or None.

    An answer found by the prompt template's own tags or rule takes priority, unless that rule merely took the last
    box or number. Otherwise search, in order: a complete ``<answer>``; the last box, or multiple boxes joined by
    "and" or a comma; text introduced by "the answer is"; finally, unless the text is nothing but an answer, its last
    formula or number. Unfinished thinking, reversed tags and incomplete tags give None.
    """
    response = final_response(text)
    if response is None:
        return None
    if "<answer>" in response or "</answer>" in response:
        return _read_tags(response, extracted)
    found_anywhere = {rule(part) for rule in (last_boxed, last_number) for part in (text, response)}
    if extracted is not None and extracted not in found_anywhere:
        return extracted.strip() or None
    return read_solution(response)


def _read_tags(response: str, extracted: str | None) -> str | None:
    contents = []
    for part in response.split("</answer>")[:-1]:
        _, opened, content = part.rpartition("<answer>")
        if opened:
            contents.append(content.strip())
    answer = next(iter(contents), None)
    if extracted in contents:
        answer = extracted
    if not answer:
        return None
    boxes = read_boxes(answer)
    if boxes is not None:
        return ", ".join(boxes[0]) or None
    introduced = _INTRODUCTION.match(answer)
    if introduced:
        return answer[introduced.end() :].strip() or None
    return answer


def read_solution(text: str) -> str | None:
    """Extract the concluding answer from an untagged solution."""
    tail = text[-MAX_TAIL_CHARS:]
    boxes = read_boxes(text)
    if boxes is not None:
        contents, end = boxes
        final = _read_phrase(_FINAL, text[end:][-MAX_TAIL_CHARS:])
        if final is not None and _states_value(final):
            return final or None
        return ", ".join(contents) or None
    phrase = _read_phrase(_PHRASE, tail)
    if phrase is not None:
        return phrase
    whole = text.strip()
    if is_bare(whole):
        return whole or None
    return _last_value(_HOPE.sub(" ", tail)) or whole[-MAX_TAIL_CHARS:]


def read_boxes(text: str) -> tuple[list[str], int] | None:
    """Contents of the last box plus any boxes joined to it by "and" or a comma, with the end position.

    None without boxes. Duplicates (equal numbers or texts) are merged.
    """
    boxes = find_boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first:
        between = text[boxes[first - 1].stop : boxes[first].begin]
        if len(between) > _MAX_GLUE_CHARS or _GLUE.fullmatch(between) is None:
            break
        first -= 1
    contents = [text[box.start : box.end].strip() for box in boxes[first:]]
    if len(contents) > 1:
        distinct = {parse_quantity(one) or one: one for one in dict.fromkeys(contents)}
        contents = list(distinct.values())
    return contents, boxes[-1].stop


def _read_phrase(phrase: re.Pattern[str], text: str) -> str | None:
    """Extract text introduced by the last phrase. "So our answer is correct" and "an answer in radians" introduce
    nothing.
    """
    passed = False  # a mere mention; earlier phrases must be more explicit
    for part in reversed(_HOPE.split(text)):
        for match in reversed(list(phrase.finditer(part))):
            answer = _read_statement(part[match.end() :])
            if answer is None or _is_mention(match, part, answer):
                passed = True
            elif not passed or (match["verb"] and is_bare(answer)):
                return answer
            if not passed:
                break
    return None


def _is_mention(match: re.Match[str], part: str, answer: str) -> bool:
    """Check if a phrase merely mentions or judges an answer without stating it."""
    if answer.casefold().rstrip(".!") in _JUDGEMENTS:
        return True
    if match["verb"] or _states_value(answer):
        return False
    runs_on = _WITHIN_LINE.search(part[: match.start()]) and _RUNS_ON.match(part, match.end())
    return runs_on is not None


def _states_value(statement: str) -> bool:
    """Check if a statement is more than prose such as "positive, because ..."."""
    return any(character.isdigit() or character == "\\" for character in statement) or not _WORD.search(statement)


def _read_statement(text: str) -> str | None:
    """Extract text following "the answer is"."""
    rest = text.strip()
    if not rest.startswith(("\\(", "\\[")):
        rest = text.strip(' \t\n:*"\\`')
    if not rest:
        return None
    if formula := _FORMULA.match(rest):
        return _join_formulas(rest, formula)
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0].partition("\n")[0].strip()
    if not sentence or is_bare(sentence):
        return sentence or None
    return _first_value(_IS.split(sentence)[-1]) or _last_value(sentence) or sentence


def _join_formulas(text: str, first: re.Match[str]) -> str:
    """Formulas that stand in a row: ``$12$ and $13$``."""
    formulas = [_inner(first)]
    end = first.end()
    while (glue := _AND.match(text, end)) and (formula := _FORMULA.match(text, glue.end())):
        formulas.append(_inner(formula))
        end = formula.end()
    return ", ".join(formulas)


def _inner(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def is_bare(text: str) -> bool:
    """Check if a text is a bare answer, not a sentence: one line, few words outside LaTeX commands."""
    if len(text) > MAX_BARE_CHARS or "\n\n" in text:
        return False
    prose = _COMMAND.sub(" ", _TEXT.sub(" ", text))
    words = [word for word in _WORD.findall(prose) if not (word.isupper() or word in ("and", "or"))]
    if not any(character.isdigit() or character in "\\$=<>" for character in text):
        return len(words) <= 12
    if words and "\n" in text.strip() and "\\begin" not in text:  # a calculation, line by line
        return False
    formula = _FORMULA.search(text)
    introduced = formula is not None and _WORD.search(text[: formula.start()]) is not None
    return len(words) <= MAX_BARE_WORDS and not introduced and not (_SENTENCE.search(text) or _FOREIGN.search(text))


def _first_value(text: str) -> str | None:
    """First formula beyond a mere name, or first number."""
    formula = next((match for match in _FORMULA.finditer(text) if not _NAMES_ONLY.fullmatch(_inner(match))), None)
    number = NUMBER.search(text)
    if formula is not None and (number is None or formula.start() <= number.start()):
        return _join_formulas(text, formula)
    if number is not None:
        return number[0]
    return None


def _states_formula(inner: str) -> bool:
    """Reject bare names and prose between dollar amounts (``$5 and then pays $``)."""
    words = _WORD.findall(_COMMAND.sub(" ", _TEXT.sub(" ", inner)))
    return not _NAMES_ONLY.fullmatch(inner) and sum(word.islower() for word in words) < 2


def _last_value(text: str) -> str | None:
    """Last formula beyond a mere name, or a number following it. None if the text has no words."""
    formulas = [match for match in _FORMULA.finditer(text) if _states_formula(_inner(match))]
    if not formulas and not _WORD.search(_COMMAND.sub(" ", text)):
        return None
    start = formulas[-1].end() if formulas else 0
    values = list(NUMBER.finditer(text, start))
    if values:
        return values[-1][0]
    if not formulas:
        return None
    first = len(formulas) - 1
    while first and _AND.fullmatch(text[formulas[first - 1].end() : formulas[first].start()]):
        first -= 1
    return _join_formulas(text, formulas[first])
