"""Multiple choice: which letter a response chooses, by rules that hedging and stuffing do not satisfy."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from posttrain.graders.answers import answer_region
from posttrain.graders.grading import Submission, Verdict
from posttrain.registry import register

# What takes back a choice: a denial or a retraction behind it, another letter stated behind it, a report in front.

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


LETTERS = "ABCDEFGHIJ"
MAX_CHARS = 20_000  # of a response: what comes before is no conclusion
MAX_STATEMENTS = 100  # "the answer is": the last ones

# What may stand between "the answer is" and the letter.
_FILLER = (
    r"(?:[\s:=>*_`$\"'“‘]|\\boxed\s*\{|\\(?:text|textbf|mathrm|mathbf)\s*\{|"
    r"(?i:for\s+sure|clearly|definitely|therefore|thus|then|indeed|simply|most\s+likely|probably|likely|actually|"
    r"definitively|obviously|(?:the\s+)?(?:option|choice|letter|answer))\b){0,12}"
)
_IS = r"(?:\*\*|__|\")?\s{0,3}(?:is\b|(?:would|must|should|has\s+to|will)\s+(?:then\s+)?be\b|[:=]|→|->|[-–—]\s)"
_HEAD = re.compile(
    r"(?i:\banswer(?:\s+choice|\s+to\s+(?:the|this)\s+(?:question|problem))?" + _IS + "|"
    r"\b(?:correct|right|best)\s+(?:option|choice|one|letter|statement)" + _IS + "|"
    r"\b(?:my|the|final)\s+(?:(?:own|final|best)\s+)?(?:choice|pick|selection|guess)" + _IS + "|"
    r"\b(?:choose|choosing|pick|picking|select|selecting|go\s+with|going\s+with)\b|"
    r"答案(?:应该|应当|应|就)?(?:是|为|选)?\s?[:：]?|(?<![不没能要果若可])选择?\s?[:：]?)"
)
# A letter that is part of something longer (D-glucose, C++, F(x), A = 2) is none.
_ALONE = r"(?![A-Za-z0-9'’#(]|[-_][A-Za-z0-9{]|\s*[=+^<>])"
_CJK = r"[\u3400-\u9fff]"  # B细胞 are cells
_LETTER = re.compile(_FILLER + rf"(?:[(\[（]\s*([A-Ja-j])\s*[)\]）]|([A-J])(?!(?![因由]){_CJK})" + _ALONE + ")")
# Behind a colon a small letter is meant as one, if the line ends with it.
_SMALL_LETTER = re.compile(r"[\s*_`$\"'“‘]{0,12}([a-j])(?=[.*_`$\"'”’]{0,6}\s*(?:\n|$))")
_JUDGED = re.compile(
    r"(?:(?i:option|choice|answer)\s{1,3})?(?:\*\*)?(?:[(\[]([A-J])[)\]]|(?<![A-Za-z0-9'’])([A-J]))(?:\*\*)?\s{1,3}"
    r"(?i:is|would be|must be|has to be)\s{1,3}(?i:(?:clearly|therefore|thus|definitely)\s{1,3})?"
    r"(?:(?i:the\s{1,3})?(?i:only\s{1,3})?(?i:correct|right|best)\b"
    r"(?=\s*$|\s*[.,;!*\n]|\s{1,3}(?i:answer|option|choice|one|because|since|as)\b)"
    r"|(?i:(?:the|my)\s{1,3}(?:(?:only|final|own)\s{1,3}){0,2}(?:answer|choice|pick|selection))\b"
    r"(?=\s*$|\s*[.,;!*\n]|\s{1,3}(?i:because|since|as|here)\b))"
)
# Behind a choice that was judged right: another one, as in ", or maybe C" and ". Or is it C?"
_OR_ANOTHER = re.compile(
    r"[\s.,;!*]*(?i:or|maybe|perhaps|possibly|but|although|though|unless)\b[\s(,]*"
    r"(?:(?i:or|maybe|perhaps|possibly|also|even|either|could|might|may|it|be|is|its|it['’]s|option|choice|answer|the)\b[\s(:,]*){0,8}"
    r"[(\[]?([A-J])(?![A-Za-z0-9'’])(?!\s+(?i:is|was|are|were|would|seems?|looks?|has|can|cannot|may|might|does|did)\b)"
)
# What takes back a statement that follows it.
_DENIED = re.compile(
    r"(?:(?i:\b(?:not|never|doubt\w*)|n['’]t)\s{1,3}(?:(?i:think|believe|say|mean|agree|sure|certain|true|clear|that|whether|if|the|"
    r"correct|final|right|best)\s{1,3}){0,5}"
    r"|(?i:\b(?:if|whether|suppose|supposing|assume|assuming))\s{1,3}(?:(?i:that|the|correct|final|right|best)\s{1,3}){0,3}"
    r"|(?i:\b(?:or|nor|and))\s{1,3}(?:(?i:option|choice)\s{1,3})?[(\[]?)$"
)
_DENIED_CHARS = 80
# Behind a letter: a further letter makes it a hedge, where a word joins the two or nothing stands between them.
_HEDGE = re.compile(
    r"[\s.,;:!?/|&+()\]}*_\"'’”$-]*"
    r"(?:(?:(?i:or|and|maybe|perhaps|possibly|also|even|either|but|could|might|may|it|be|is|option|choice|answer|the)\b"
    r"[\s(:,]*){1,8}[(\[]?([A-J])(?![A-Za-z0-9'’])"
    r"|[(\[]?([A-J])(?=\s*(?:[.,;:!?/|&+)\]}]|$|\n|(?i:or|and)\b))"
    r"|[），。；]*(?:、|或者?|和|与|及|还是|也?可能是?)\s*[（]?([A-J])(?![A-Za-z0-9'’]))"
)
_LISTED = re.compile(r"\s([A-J])\)\s")  # a further label on the same line
_FURTHER_LABEL = re.compile(r"\s[(\[]?([A-J])[.):\]]\s+(?=\S)")
_NEXT_WORD = re.compile(r"[ \t]+([A-Za-z][A-Za-z’']*)")
_REASONS = frozenset(
    ("because", "since", "as", "which", "due", "so", "but", "given", "for", "based", "and", "or", "by", "here", "not")
)
_SHORT = re.compile(
    r"(?i:(?:therefore|thus|hence|so)\b[,:]?\s*)?"
    r"(?i:(?:the\s+)?(?:correct\s+|final\s+)?(?:option|choice|answer|letter)\s*:?\s*)?"
    r"(?:[(\[]\s*([A-Ja-j])\s*[)\]]|([a-j])\)|([A-J])(?=$|[.):,;!\n。]|\s+(?:[-–—]\s|\()))[.):,;!。]?"
)
_LABEL = re.compile(r"\W*(?:(?i:option|choice)\s+)?[(\[]?([A-J](?=[)\].:])|[a-j](?=[)\]]))")
_DRESS = re.compile(r"[*`$]|\\(?:text|textbf|mathrm|mathbf|boxed)\b|\\[()\[\]]")
_SPACE = re.compile(r"\s+")
# Sentences that conclude without the word answer: "It is B", "I believe it's B", "So C".
_CONCLUSION = re.compile(
    r"(?:^|[.!?;\n])[\s*_]{0,4}(?:"
    r"(?:(?i:so|thus|hence|therefore|then|no|yes|wait|rather|actually|sorry|hmm|oh|but|and|"
    r"i(?:['’]d|\s{1,3}would)?\s{1,3}(?:\(?(?:personally|really|firmly|do|still|now)\)?\s{1,3})?(?:think|believe|guess|say)"
    r"(?:\s{1,3}that)?)[,:]?\s{1,3}){0,4}"
    r"(?P<verb>(?i:it(?:['’]s|\s{1,3}(?:is|must\s{1,3}be|has\s{1,3}to\s{1,3}be))))\s{1,3}"
    r"(?:(?i:actually|really|clearly|therefore|thus|then|indeed|option|choice|letter)\s{1,3}){0,3}"
    r"|(?:(?i:so|thus|hence|therefore|rather|actually|definitely|clearly|i(?:['’]d|\s{1,3}would)?\s{1,3}(?:think|believe|guess|say))"
    r"[,:]?|(?i:no)[,:])\s{1,3}(?:(?i:option|choice|letter)\s{1,3})?"
    r")[*_`$]{0,3}(?:[(\[]([A-J])[)\]]|([A-J]))[*_`$]{0,3}(?=\s{0,3}(?:[.!,;\n]|$))"
)
_CLOSING = " \t\n.!*_`$\"'”’"
_HEDGED = "?"


@register("grader")
def multiple_choice(submission: Submission) -> Verdict:
    """Right if the one letter that the response chooses is that of the gold answer.

    The answer is read in the answer tags or the last box, else in the response behind the thinking: as a letter
    (``B``, ``(B)``, ``B.``, ``B) text``, ``\\text{B}``, ``Option B``), as the full text of a choice, or in a sentence
    (``the answer is (B)``, ``answer: b``, ``my choice is B``, ``B is the answer``, ``B is correct``, ``答案是B``;
    at the end also ``It is B`` and ``So B``), of which the last counts. Letters are A to J, capitals save in brackets
    and behind a colon. No answer: ``A or B``, ``A B C D``, a letter that is a word (``A cat``), a label with another
    choice's text, an answer that is taken back (``B. Wait, no.``), and thinking that never ends.

    ``meta["choices"]``, the texts in order, is optional; without it only letters are read. A response that answers at
    once and then makes up further questions is graded by its first line.
    """
    choices = tuple(str(choice) for choice in submission.meta.get("choices") or ())
    gold = None if submission.answer is None else read_gold(submission.answer, choices)
    if gold is None:
        return Verdict("ungraded")
    region = answer_region(submission)
    chosen = None if region is None else chosen_letter(region[0][-MAX_CHARS:], choices)
    if chosen is None:
        return Verdict("no_answer")
    return Verdict("right" if chosen == gold else "wrong", extracted=chosen)


def read_gold(gold: str, choices: Sequence[str] = ()) -> str | None:
    """The letter of a gold answer: a letter alone or in front of its text, a choice's text, or a sentence with it."""
    text = gold.strip()
    if match := re.match(r"[(\[]?([A-J])(?:[)\].:]|\s|$)", text):
        return match[1]
    if text in choices:
        return LETTERS[choices.index(text)]
    statements = [_LETTER.match(text, head.end()) for head in _HEAD.finditer(text)]
    letters = [(letter[1] or letter[2]).upper() for letter in statements if letter]
    return letters[-1] if letters else None


def chosen_letter(text: str, choices: Sequence[str] = ()) -> str | None:
    """The letter that a text chooses, or None where it names none or more than one."""
    if whole := _read_short(text, choices):
        return None if whole == _HEDGED else whole
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    first = _read_opening(lines[0], choices)
    if first in tuple(LETTERS) and _lists_choices(lines[1:]):
        return first  # what follows is another question, which has its own answer
    last = _read_line(lines[-1], lines, choices)
    stated = _last_statement(text, choices)
    if last is None or (stated is not None and stated[0] > text.rstrip().rfind("\n")):
        last = stated[1] if stated is not None else _read_line(lines[0], lines, choices)
        if stated is None and last is not None and _is_doubted(last, "\n" + "\n".join(lines[1:]), choices):
            return None
    return None if last == _HEDGED else last


def _last_statement(text: str, choices: Sequence[str]) -> tuple[int, str] | None:
    """Where the last readable statement begins, and its letter."""
    statements: list[tuple[int, str]] = []
    for head in deque(_HEAD.finditer(text), maxlen=MAX_STATEMENTS):
        tail = text[head.end() : head.end() + TAIL_CHARS].lstrip()
        if not _is_denied(text, head.start()) and (read := _read_tail(tail, choices, head[0])):
            statements.append((head.start(), read))
    for match in deque(_JUDGED.finditer(text), maxlen=MAX_STATEMENTS):
        if not _is_denied(text, match.start()):
            following = text[match.end() : match.end() + TAIL_CHARS]
            letter = match[1] or match[2]
            another = _OR_ANOTHER.match(following)
            doubted = _is_doubted(letter, following, choices) or (another and another[1] != letter)
            statements.append((match.start(), _HEDGED if doubted else letter))
    return max([*statements, *_conclusions(text, max(statements, default=None))], default=None)


def _conclusions(text: str, stated: tuple[int, str] | None) -> list[tuple[int, str]]:
    """Where "It is B" and "So B" stand: an answer at the very end, and elsewhere a doubt about another answer."""
    conclusions: list[tuple[int, str]] = []
    for match in deque(_CONCLUSION.finditer(text), maxlen=MAX_STATEMENTS):
        letter = match[2] or match[3]
        if not text[match.end() :].strip(_CLOSING):
            conclusions.append((match.start(), letter))
        elif match["verb"] and (stated is None or stated[1] != letter):
            conclusions.append((match.start(), _HEDGED))
    return conclusions


def _is_denied(text: str, start: int) -> bool:
    before = text[max(0, start - _DENIED_CHARS) : start]
    return _DENIED.search(before) is not None or REPORTED.search(before) is not None


def _is_doubted(letter: str, following: str, choices: Sequence[str]) -> bool:
    return takes_back(letter, following, lambda text: _letter_of_text(text, choices), has_texts=bool(choices))


def _read_tail(tail: str, choices: Sequence[str], head: str) -> str | None:
    """What "the answer is" (``head``) is followed by: a choice's text, or a letter that no other word claims."""
    line = tail.partition("\n")[0]
    for own in (line, re.split(r"[.;!]\s", line)[0]):
        if by_text := _letter_of_text(own, choices):
            return _HEDGED if _is_doubted(by_text, tail[len(own) :], choices) else by_text
    match = _LETTER.match(tail)
    if match is None:
        small = _SMALL_LETTER.match(tail) if head.endswith((":", "：")) else None
        return small and _letter_with(small[1].upper(), tail[small.end() :], choices)
    letter = (match[1] or match[2]).upper()
    following = tail[match.end() :]
    word = None if match[1] else _NEXT_WORD.match(following)
    if word is not None and word[1].lower() not in _REASONS:
        return None
    return _letter_with(letter, following, choices)


def _read_short(text: str, choices: Sequence[str]) -> str | None:
    """A text that is nothing but an answer: a choice's text, or a letter with maybe something behind it."""
    if by_text := _letter_of_text(text, choices):
        return by_text
    cleaned = _undress(text)
    match = _SHORT.match(cleaned)
    if match is None:
        return None
    letter = (match[1] or match[2] or match[3]).upper()
    following = cleaned[match.end() :]
    if match[3] and _is_word(letter, match[0], following, choices):
        return None
    if "\n" not in following.strip():
        return _letter_with(letter, following, choices)
    # a text of several lines that begins with a letter may conclude otherwise; its lines are looked at one by one
    return None if _letter_with(letter, following, choices, several=True) == letter else _HEDGED


def _is_word(letter: str, label: str, following: str, choices: Sequence[str]) -> bool:
    """Whether the capital that a line begins with is no label: the pronoun I, or the E of "E. coli" among A to D."""
    rest, own = _plain(following.partition("\n")[0]), LETTERS.index(letter)
    if not rest:
        return False
    if choices and own >= len(choices):
        return True
    return letter == "I" and label[-1] not in "):" and (not choices or rest != _plain(choices[own]))


def _read_opening(line: str, choices: Sequence[str]) -> str | None:
    """The answer with which a response begins: ``B``, or ``Answer: B``."""
    head = _HEAD.match(line.lstrip(" *_"))
    return _read_short(line, choices) or (
        _read_tail(line.lstrip(" *_")[head.end() :], choices, head[0]) if head else None
    )


def _read_line(line: str, lines: Sequence[str], choices: Sequence[str]) -> str | None:
    """A line that is an answer by itself, and not one item of a list among ``lines``."""
    read = _read_short(line, choices)
    if read is None or read == _HEDGED:
        return read
    if _read_bare(line):
        bare = {letter for other in lines if (letter := _read_bare(other))}
        return read if bare == {read} else _HEDGED
    labels = {match[1].upper() for other in lines if (match := _LABEL.match(other))}
    return read if labels <= {read} or not _LABEL.match(line) else None


def _read_bare(line: str) -> str | None:
    match = _SHORT.fullmatch(_undress(line))
    return (match[1] or match[2] or match[3]).upper() if match else None


def _lists_choices(lines: Sequence[str]) -> bool:
    labels = [match[1].upper() for line in lines if (match := _LABEL.match(line))]
    return any(pair == ("A", "B") for pair in pairwise(labels))


def _letter_with(letter: str, following: str, choices: Sequence[str], *, several: bool = False) -> str:
    """The letter, if what stands behind it leaves it standing; of several lines the later ones may answer anew."""
    rest = _plain(SEPARATOR.sub("", following.partition("\n")[0]))
    own = LETTERS.index(letter)
    if rest and own < len(choices) and rest == _plain(choices[own]):
        return letter
    if rest and any(rest == _plain(choice) for choice in choices):
        return _HEDGED  # the label of one choice with the text of another
    if TAKEN_BACK.search(SEPARATOR.sub("", following)) or (not several and _is_doubted(letter, following, choices)):
        return _HEDGED
    if _lists_another(letter, following.partition("\n")[0], choices):
        return _HEDGED
    hedge = _HEDGE.match(following) or _LISTED.search(following.partition("\n")[0])
    return _HEDGED if hedge is not None and letter not in hedge.groups() else letter


def _lists_another(letter: str, line: str, choices: Sequence[str]) -> bool:
    """Whether the choices are copied on one line: "A. a wolf B. the tide"."""
    for label in _FURTHER_LABEL.finditer(line):
        other = LETTERS.index(label[1])
        if other < len(choices):
            start = label.end()
            own = _plain(choices[other])
            if own and label[1] != letter and _plain(line[start : start + len(choices[other]) + 20]).startswith(own):
                return True
        elif not choices and other == LETTERS.index(letter) + 1:
            return True
    return False


def _letter_of_text(text: str, choices: Sequence[str]) -> str | None:
    """The letter of the one choice whose text this is; a text of one letter is read as a label."""
    wanted = _plain(text)
    if len(wanted) < 2 and not wanted.isdigit():
        return None
    same = [letter for letter, choice in zip(LETTERS, choices, strict=False) if _plain(choice) == wanted]
    return same[0] if len(same) == 1 else None


def _undress(text: str) -> str:
    return _DRESS.sub("", text).strip(" \t\n{}\"'“”‘’_#>")


def _plain(text: str) -> str:
    return _SPACE.sub(" ", _undress(text)).strip(" .;,{}\"'“”‘’").casefold()
