"""Multiple choice: take the last letter stated, unless the response denies it, combines it or takes it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from posttrain.graders.answers import answer_region, word_set
from posttrain.graders.grading import Submission, Verdict, texts_of
from posttrain.graders.signs import fold_letters
from posttrain.registry import register

LETTERS = "ABCDEFGHIJ"
MAX_CHARS = 20_000  # read from the end of a response; conclusions do not come earlier
TAIL_CHARS = 2_000  # max characters checked after a statement
_BEFORE_CHARS = 80

# Letters inside a longer token do not count: D-glucose, C++, F(x), A = 2. B细胞 means cells.
_ALONE = r"(?![A-Za-z0-9'’#(]|[-_][A-Za-z0-9{]|\s*[=+^<>]|(?![因由])[\u3400-\u9fff])"
_FILLER = (
    r"(?:[\s:=>*_`$\"'“‘]|\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{|(?i:for\s+sure|clearly|definitely|therefore|thus|"
    r"then|indeed|simply|probably|likely|actually|obviously|(?:the\s+)?(?:option|choice|letter|answer))\b){0,12}"
)
_IS = r"(?:\*\*|__|\")?\s{0,3}(?:is\b|(?:would|must|should|has\s+to|will)\s+(?:then\s+)?be\b|[:=]|→|->|[-–—]\s)"
# "The answer is", "I choose", "My pick:", followed by a letter or a full choice.
_HEAD = re.compile(
    r"(?i:\banswer(?:\s+choice|\s+to\s+(?:the|this)\s+(?:question|problem))?" + _IS + "|"
    r"\b(?:correct|right|best|my|the|final)\s+(?:(?:own|final|best)\s+)?"
    r"(?:option|choice|one|letter|statement|pick|selection|guess)" + _IS + "|"
    r"\b(?:choose|choosing|pick|picking|select|selecting|go\s+with|going\s+with)\b|"
    r"答案(?:应该|应当|应|就)?(?:是|为|选)?\s?[:：]?|(?<![不没能要果若可])选择?\s?[:：]?)"
)
_LETTER = re.compile(_FILLER + rf"(?:[(\[（]\s*([A-Ja-j])\s*[)\]）]|([A-J]){_ALONE})")
_SMALL_LETTER = re.compile(r"[\s*_`$\"'“‘]{0,12}([a-j])(?=[.*_`$\"'”’]{0,6}\s*(?:\n|$))")  # behind a colon
# Accept "A cat", reject "A because".
_GOES_ON = re.compile(
    r"[ \t]+(?!(?:because|since|as|which|due|so|but|given|for|based|and|or|by|here|not|if|unless|else|maybe)\b)[a-z]",
    re.IGNORECASE,
)
_JUDGED = re.compile(  # "B is the answer", "Option (B) must be right"
    r"(?:[(\[]([A-J])[)\]]|(?<![A-Za-z0-9'’])([A-J]))(?:\*\*)?\s{1,3}(?i:is|would be|must be|has to be)\s{1,3}"
    r"(?i:(?:clearly|therefore|thus|definitely|the|my|only|final|own)\s{1,3}){0,3}"
    r"(?i:(?:correct|right|best)(?:\s{1,3}(?:answer|option|choice|one))?|answer|choice|pick|selection)\b"
    r"(?=\s*$|\s*[.,;!*\n]|\s{1,3}(?:because|since|as|here)\b)"
)
# Conclusions phrased differently: "It is B", "I believe it's B", "So C".
_CONCLUSION = re.compile(
    r"(?:^|[.!?;\n])[\s*_]{0,4}(?:(?i:(?:so|thus|hence|therefore|then|no|yes|wait|rather|actually|sorry|hmm|oh|but|and|"
    r"definitely|clearly|i(?:['’]d|\s{1,3}would)?\s{1,3}(?:\(?(?:personally|really|firmly|do|still|now)\)?\s{1,3})?"
    r"(?:think|believe|guess|say)(?:\s{1,3}that)?)[,:]?\s{1,3}){0,4}"
    r"(?i:it(?:['’]s|\s{1,3}(?:is|must\s{1,3}be|has\s{1,3}to\s{1,3}be)))\s{1,3}"
    r"|(?:(?i:so|thus|hence|therefore|rather|actually|definitely|clearly|i(?:['’]d|\s{1,3}would)?\s{1,3}(?:think|"
    r"believe|guess|say))[,:]?|(?i:no)[,:])\s{1,3})"
    r"(?i:(?:actually|really|clearly|therefore|thus|then|indeed|option|choice|letter)\s{1,3}){0,3}"
    r"[*_`$]{0,3}(?:[(\[]([A-J])[)\]]|([A-J]))[*_`$]{0,3}(?=\s{0,3}(?:[.!;\n]|$))"
)
# Lines starting with a label: "B", "(b)", "B) the tide", "Option B.".
_SHORT = re.compile(
    r"(?i:(?:therefore|thus|hence|so)\b[,:]?\s*)?(?i:(?:the\s+)?(?:correct\s+|final\s+)?(?:option|choice|answer|letter)"
    r"\s*:?\s*)?(?:[(\[]\s*([A-Ja-j])\s*[)\]]|([a-j])\)|([A-J])(?=$|[.):,;!\n。]|\s+(?:[-–—]\s|\()))[.):,;!。]?"
)
_LABEL = re.compile(r"\W*(?:(?i:option|choice)\s+)?[(\[]?([A-J](?=[)\].:])|[a-j](?=[)\]]))")
# In front of a statement, a denial, a condition, a report or another letter makes it none.
_DENIED = re.compile(
    r"(?:(?i:\b(?:not|never|neither|nor|doubt\w*|if|whether|suppose|supposing|assume|assuming|unlikely|hardly|false|"
    r"untrue|impossible|is)|n['’]t)\s{1,3}(?:(?i:think|believe|say|mean|agree|sure|certain|true|clear|that|whether|if|"
    r"the|option|correct|final|right|best|it|is)\s{1,3}){0,5}[(\[*]{0,3}"
    r"|(?i:\b(?:or|nor|and))\s{1,3}(?:(?i:option|choice)\s{1,3})?[(\[]?"
    r"|(?i:\b(?:nobody|no\s?one|none|they|people|some|someone|everyone|many|most|few|others?|another|he|she|who))\s{1,3}"
    r"(?:[a-z]{1,12}\s{1,3}){0,3}(?:say|think|believe|claim|argue|guess|suggest|thought|said)(?:s|d|ed)?\s{1,3}"
    r"(?:that\s{1,3})?(?:(?:the|option|choice|correct|final|right|best)\s{1,3}){0,3}[(\[*]{0,3})$"
)
_SENTENCE = re.compile(r"([^.!?;\n。！？；]+)([.!?;。！？；]?)")
_REASON = re.compile(
    r"\b(?:because|since|as|for|which|due|based|given|here|but\s{1,3}[A-J]\s{1,3}(?:is|was|looks|seems))\b|因为|由于",
    re.IGNORECASE,
)
_OTHER = re.compile(r"(?<![A-Za-z0-9'’+])[(\[*]{0,3}([A-HJ])(?![A-Za-z0-9'’+]|\s*=)")
_WORD = re.compile(r"[^\s,:*_`$\"“”‘()\[\]{}–—（），、：|/&+>→-]+(?:-\w+)*")
_RULED_OUT = re.compile(
    r"\b(?:not|neither|nor|never|\w{1,9}n['’]t|than|unlike|except|exclud\w+|eliminat\w+|rul(?:e|es|ed|ing)\s{1,3}out|wrong|"
    r"incorrect|false)(?!\w)|错",
    re.IGNORECASE,
)
# Filler words. Sentences made up only of these talk about answering, not about the question.
_EMPTY = word_set(
    """
    a again ah all also am and answer are at back be best better but change changed choice choose clear clearly correct
    could even fact final go hence i i'd i'll i'm if in instead is it it's its just letter make may maybe mean meant
    might must my now of oh ok okay on option or perhaps pick possibly quite rather really right said say second should
    so switch take that that's the then therefore this thoughts thus to too unless vs was well were with yes else
    """
)
_DENYING = word_set("not nope nah never isn't wasn't untrue wrong false incorrect mistake mistaken 不 不对 错了 更正")
_DOUBTING = word_set("no wait actually sorry hmm oops scratch nevermind mind back correction kidding joking 等等")
_ABOUT_ANSWER = _EMPTY | _DENYING | _DOUBTING
_DRESS = re.compile(r"[*`$]|\\(?:text|textbf|mathrm|mathbf|boxed)\b|\\[()\[\]]")


@register("grader")
def multiple_choice(submission: Submission) -> Verdict:
    """Correct if the last stated letter matches the gold answer.

    Searches answer tags, then the last box, then any text following the thinking. Accepted forms: a letter (``B``,
    ``(B)``, ``B) text``, ``Option B``), the full text of a choice, or a sentence (``the answer is (B)``,
    ``answer: b``, ``my choice is B``, ``B is the answer``, ``答案是B``; on the final line also ``It is B`` and
    ``So B``). Letters range from A to J, uppercase except in brackets or following a colon.

    Rejected: multiple letters (``A or B``), a letter used as a word (``A cat``), a label paired with a different
    choice's text, answers that are denied, quoted or withdrawn (``B. Wait, no.``), and unfinished thinking.

    ``meta["choices"]`` optionally lists choice texts in order; otherwise only letters are parsed. If a response
    answers immediately and then invents further questions, only line one is graded.
    """
    listed = submission.meta.get("choices")
    if isinstance(listed, Mapping) and listed:
        listed = listed.get("text")
    elif not listed:
        listed = ()
    texts = texts_of(listed)
    if texts is None or submission.answer is None:
        return Verdict("ungraded")
    choices = tuple(map(fold_letters, texts))
    gold = read_gold(fold_letters(submission.answer), choices)
    if gold is None:
        return Verdict("ungraded")
    region = answer_region(submission)
    if region is None:
        return Verdict("no_answer")
    response, _ = region
    chosen = chosen_letter(fold_letters(response[-MAX_CHARS:]), choices)
    if chosen is None:
        return Verdict("no_answer")
    return Verdict("right" if chosen == gold else "wrong", extracted=chosen)


def read_gold(gold: str, choices: Sequence[str] = ()) -> str | None:
    """Parse a gold answer into its letter: ``B``, ``B) text``, a choice's text, or a sentence containing one."""
    text = gold.strip()
    if match := re.match(r"[(\[]?([A-J])(?:[)\].:]|\s|$)", text):
        return match[1]
    if text in choices:
        return LETTERS[choices.index(text)]
    if len(text) == 1 and text.upper() in LETTERS:
        return text.upper()
    letter = None
    for head in _HEAD.finditer(text):
        stated = _LETTER.match(text, head.end())
        if stated is not None:
            letter = _letter(stated)
    return letter


def chosen_letter(text: str, choices: Sequence[str] = ()) -> str | None:
    """Find the single letter chosen by a text, or None if it chooses zero or multiple."""
    if by_text := _letter_of_text(text, choices):
        return by_text
    lines = text.strip().splitlines()
    if len(lines) > 1 and {"A", "B"} <= {_label(line) for line in lines[1:]}:
        label = _label(lines[0])
        if label == "A":  # a list
            return None
        first = chosen_letter(lines[0], choices)
        if first is not None or label is not None:  # what follows is another question
            return first
    found = max([*_statements(text, choices), *_openings(text, choices)], default=None)
    if found is None:
        return None
    start, end, letter = found
    if _is_denied(text, start) or not _stands(letter, text[end : end + TAIL_CHARS], choices):
        return None
    return letter


def _is_denied(text: str, start: int) -> bool:
    """Check if words preceding a statement invalidate it."""
    return _DENIED.search(text[max(0, start - _BEFORE_CHARS) : start]) is not None


def _statements(text: str, choices: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, letters) for each sentence stating an answer."""
    for head in _HEAD.finditer(text):
        if _is_denied(text, head.start()):
            continue
        by_text = _choice_of_line(text[head.end() :].partition("\n")[0], choices)
        if by_text is not None:
            length, letter = by_text
            yield head.start(), head.end() + length, letter
            continue
        match = _LETTER.match(text, head.end())
        if match is None and head[0].endswith((":", "：")):
            match = _SMALL_LETTER.match(text, head.end())
        if match is not None and (match[1] or not _GOES_ON.match(text, match.end())):
            yield head.start(), match.end(), _letter(match)
    for match in _JUDGED.finditer(text):
        if not _is_denied(text, match.start()):
            yield match.start(), match.end(), _letter(match)
    for match in _CONCLUSION.finditer(text):
        yield match.start(), match.end(), _letter(match)


def _choice_of_line(line: str, choices: Sequence[str]) -> tuple[int, str] | None:
    """Match a line, or its opening sentence, against choice texts. Returns (length, letter)."""
    for stated in (line, re.split(r"[.;!]\s", line)[0]):
        letter = _letter_of_text(stated, choices)
        if letter is not None:
            return len(stated), letter
    return None


def _openings(text: str, choices: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield first and last lines that begin with a label. Lines listing multiple labels are treated as a list and
    skipped.
    """
    lines = [match for match in re.finditer(r"[^\n]+", text) if match[0].strip()]
    num_bare = len({_bare(line[0]) for line in lines} - {None})
    num_labels = len({_label(line[0]) for line in lines} - {None})
    for line in lines[:1] + lines[-1:]:
        by_text = _letter_of_text(line[0], choices)
        if by_text is not None:
            yield line.start(), line.end(), by_text
            continue
        if _bare(line[0]) is not None:
            is_listed = num_bare > 1
        else:
            is_listed = num_labels > 1 and _label(line[0]) is not None
        plain = _undress(line[0])
        match = _SHORT.match(plain)
        if match is None or is_listed:
            continue
        letter = _letter(match)
        rest = _plain(plain[match.end() :])
        if rest and choices and LETTERS.index(letter) >= len(choices):  # skip the E in "E. coli"
            continue
        end = line.end()
        inside = line[0].find(plain)
        if inside >= 0:
            end = line.start() + inside + match.end()
        yield line.start(), end, letter


def _stands(letter: str, tail: str, choices: Sequence[str]) -> bool:
    """Check if a statement survives the text following it."""
    first_line, _, further_lines = tail.partition("\n")
    line = _plain(re.sub(r"^[\s.):,;\]]*(?:[-–—]\s+)?", "", first_line))
    owners = [own for own, choice in zip(LETTERS, choices, strict=False) if _plain(choice) == line]
    if owners:
        if letter not in owners:
            return False  # label and text belong to different choices
        tail = "\n" + further_lines
    if tail[:1] in ("?", "？"):
        return False
    sentences = list(_SENTENCE.finditer(tail))
    return not any(_takes_back(letter, sentence, place == 0) for place, sentence in enumerate(sentences))


def _takes_back(letter: str, sentence: re.Match[str], is_first: bool) -> bool:
    """Check if a sentence following the statement of ``letter`` denies it, doubts it, or names a different letter."""
    text = _REASON.split(sentence[1])[0]
    words = [word.lower().replace("’", "'") for word in _WORD.findall(text)]
    others = {match[1] for match in _OTHER.finditer(text)} - {letter}
    if sentence[2] in ("?", "？"):
        return words[:1] in (["or"], ["maybe"]) and bool(others)
    if not _is_about_answer(words):
        return is_first and bool(others) and not _RULED_OUT.search(text)
    if not words:
        return False
    if not _DENYING.isdisjoint(words):
        return not others or letter.lower() in words or "i" in words  # "I was wrong: it is B"
    is_whole = text == sentence[1]  # no "No, because"
    return bool(others) or (is_whole and not _DOUBTING.isdisjoint(words))


def _is_about_answer(words: Sequence[str]) -> bool:
    """Check if words are pure filler, hence unrelated to the question."""
    return all(word in _ABOUT_ANSWER or (len(word) == 1 and word.upper() in LETTERS) for word in words)


def _letter(match: re.Match[str]) -> str:
    """Extract the letter captured by a match's last group."""
    return str(match[match.lastindex or 0]).upper()


def _bare(line: str) -> str | None:
    """Parse a line consisting solely of a label."""
    match = _SHORT.fullmatch(_undress(line))
    if match:
        return _letter(match)
    return None


def _label(line: str) -> str | None:
    match = _LABEL.match(line)
    if match:
        return match[1].upper()
    return None


def _letter_of_text(text: str, choices: Sequence[str]) -> str | None:
    """Find the only choice with this text. Single-letter texts are parsed as labels."""
    wanted = _plain(text)
    if len(wanted) < 2 and not wanted.isdigit():
        return None
    same = [letter for letter, choice in zip(LETTERS, choices, strict=False) if _plain(choice) == wanted]
    if len(same) == 1:
        return same[0]
    return None


def _undress(text: str) -> str:
    return _DRESS.sub("", text).strip(" \t\n{}\"'“”‘’_#>")


def _plain(text: str) -> str:
    return " ".join(_undress(text).split()).strip(" .;,{}\"'“”‘’").casefold()
