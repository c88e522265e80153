"""IFEval (Zhou et al. 2023), prompts about an answer's form: the task ``ifeval:task``, the grader ``ifeval:ifeval``."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from posttrain.data.base import Task
from posttrain.data.reader import Dropped, TestSplit, collect_examples, reads_rows
from posttrain.data.reading import Row, read_file
from posttrain.errors import RecipeError, UnknownComponent, UsageError
from posttrain.graders.answers import tagged_response
from posttrain.graders.grading import Submission, Verdict, is_blank
from posttrain.registry import Entry, explain_validation, register, suggest
from posttrain.types import Example, Message

# The table of verifiable instructions: a pure function of a response for each identifier.
# A function's keyword-only parameters are the instruction's arguments, checked by type when a task is loaded.

Check = Callable[..., bool]
Relation = Literal["at least", "less than"]
Text = Annotated[str, Field(pattern=r"\S")]  # not blank
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]

INSTRUCTIONS: dict[str, Check] = {}


def instruction(identifier: str) -> Callable[[Check], Check]:
    """Enter the decorated function under its identifier (``keywords:existence``)."""

    def add(check: Check) -> Check:
        assert identifier not in INSTRUCTIONS, f"instruction {identifier!r} exists twice"
        INSTRUCTIONS[identifier] = check
        return check

    return add


def holds(count: int, relation: Relation, bound: int) -> bool:
    """``count >= bound`` for "at least", ``count < bound`` for "less than"."""
    return count >= bound if relation == "at least" else count < bound


def read_arguments(identifier: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of an instruction, checked by type; those that are None count as not given.

    (A table with a column for every argument has many that are None.)

    Raises:
        UnknownComponent: no such instruction.
        RecipeError: an argument is missing, unknown or of the wrong type.
    """
    if identifier not in INSTRUCTIONS:
        raise UnknownComponent(f"there is no instruction {identifier!r}.{suggest(identifier, INSTRUCTIONS)}")
    kwargs = {name: value for name, value in (arguments or {}).items() if value is not None}
    model = _arguments_model(identifier)
    try:
        checked = model(**kwargs)
    except ValidationError as error:
        label = f"instruction {identifier!r}"
        raise RecipeError(explain_validation(error, list(model.model_fields), label, label)) from None
    return {name: getattr(checked, name) for name in model.model_fields}


@cache
def _arguments_model(identifier: str) -> type[BaseModel]:
    return Entry("instruction", identifier, INSTRUCTIONS[identifier], {}).options_model


# Which language a text is written in: the one place that knows ``langdetect``.

MAX_CHARS = 10_000  # as many as the detector looks at


def detect_language(text: str) -> str | None:
    """The ISO 639-1 code of the likeliest language (``zh-cn``, ``zh-tw`` of Chinese); None where there are no letters.

    A function of the text alone: the detector draws its samples with a fixed seed. It reads lower case,
    because it skips words in capitals. Short texts are guesses.

    Source: langdetect, a port of Shuyo's language-detection (2010), which the reference of IFEval uses.

    Raises:
        UsageError: ``langdetect`` is not installed.
    """
    factory = _load_factory()
    from langdetect.lang_detect_exception import LangDetectException

    detector = factory.create()
    detector.append(text[:MAX_CHARS].lower())
    try:
        code: str = detector.detect()
    except LangDetectException:
        return None
    return None if code == detector.UNKNOWN_LANG else code


def known_languages() -> frozenset[str]:
    """The codes that ``detect_language`` may give.

    Raises:
        UsageError: ``langdetect`` is not installed.
    """
    return frozenset(_load_factory().get_lang_list())


@cache
def _load_factory() -> Any:
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError:
        raise UsageError(
            "telling languages apart (ifeval) needs the package langdetect: pip install langdetect"
        ) from None
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


# How many words, capital words and sentences a text has, by rules without dictionaries. Linear in its length.

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:[-.][^\W_]+)*")
# Marks that end a sentence, with what closes behind them. Full-width marks need no space behind.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_]*+(?=\s|$)|(?<![。！？｡।؟۔])[。！？｡।؟۔]++[\"'”’»)\]」』]*+")
_NEXT = re.compile(r"\s*[\"'“‘«(\[*_]*(\S)")
_LAST_WORD = re.compile(r"(\S+)$")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*(?:[-*•][ \t]+)?\(?(?:[0-9]{1,3}|[A-Za-z]|[ivxIVX]{1,4})$")
# Those behind which a sentence does not end even if a capital follows.
_ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "mt", "rev", "hon", "gen", "col", "capt", "lt", "sgt", "gov", "sen", "rep",
     "pres", "vs", "cf", "approx", "dept", "fig", "figs", "eq", "nos", "vol", "pp", "ed", "eds", "jan", "feb", "aug",
     "sept", "oct", "nov", "dec")
)  # fmt: skip
_CONTEXT_CHARS = 40


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores: "don't" is two, "well-known" is two."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Words all of whose letters are capitals. An apostrophe parts a word, a hyphen or full stop inside does not."""
    return sum(match[0].isupper() for match in _TOKEN.finditer(text))


def count_sentences(text: str) -> int:
    """Sentences, by the marks that end them.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` (any number, with closing quotes and brackets) before white space
    or at the end, and at a full-width mark (``。``) anywhere. It goes on where a small letter follows; behind a
    known abbreviation (``Dr.``), a single capital (``J. Smith``), letters with stops (``U.S.``) before a word,
    and the number of a list's item (``1.`` at the start of a line). New lines end nothing, as in the tokenizer of the
    IFEval reference. What stands behind the last mark is a sentence, if it has a letter or digit.
    """
    count, scanned, begun = 0, 0, False
    for match in _END.finditer(text):
        begun = begun or _WORD.search(text, scanned, match.start()) is not None
        scanned = match.end()
        if begun and not _goes_on(text, match):
            count, begun = count + 1, False
    return count + (begun or _WORD.search(text, scanned) is not None)


def _goes_on(text: str, match: re.Match[str]) -> bool:
    """Return whether the sentence goes on after the mark."""
    following = _NEXT.match(text, match.end(), match.end() + _CONTEXT_CHARS)
    if following is None:
        return False
    if following[1].islower():
        return match[0][0] in ".…" or match[0][-1] not in "!?"  # '"Stop!" he said.' is one sentence
    if match[0] != ".":
        return False
    before = text[max(0, match.start() - _CONTEXT_CHARS) : match.start()]
    if _LIST_NUMBER.search(before):
        return True
    last = _LAST_WORD.search(before)
    word = last[1].strip("\"'“‘«([*_") if last is not None else ""
    if len(word) == 1 and word.isupper():
        return word != "I"
    if "." in word and all(len(part) == 1 for part in word.split(".")):
        return True
    return word.lower() in _ABBREVIATIONS


# What a response says: keywords, letters, language, case, first and last words (IFEval, table 4).

# Those that need to know the language of a response.
READ_LANGUAGE = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)


@instruction("keywords:existence")
def has_keywords(response: str, *, keywords: Texts) -> bool:
    """Every keyword stands in the response, in any case, also inside of a word."""
    lowered = response.lower()
    return all(keyword.lower() in lowered for keyword in keywords)


@instruction("keywords:frequency")
def keyword_frequency(response: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """The keyword stands there so many times, in any case, also inside of a word."""
    return holds(response.lower().count(keyword.strip().lower()), relation, frequency)


@instruction("keywords:forbidden_words")
def lacks_words(response: str, *, forbidden_words: Texts) -> bool:
    """None of the words stands there as a word of its own, in any case."""
    return not any(_stands_alone(word, response) for word in forbidden_words)


@instruction("keywords:letter_frequency")
def letter_frequency(response: str, *, letter: Text, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter (or another character) stands there so many times, in any case."""
    return holds(response.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("language:response_language")
def in_language(response: str, *, language: Text) -> bool:
    """The response is written in the language, by its code.

    Departure: the reference counts a response without letters as followed; here it is not.
    """
    return detect_language(response) == language


@instruction("change_case:english_capital")
def in_capitals(response: str) -> bool:
    """English, without small letters.

    Departure: the reference's detector reads no word in capitals, so that any language passes; here it reads
    them in lower case.
    """
    return response.isupper() and detect_language(response) == "en"


@instruction("change_case:english_lowercase")
def in_lower_case(response: str) -> bool:
    """English, without capitals."""
    return response.islower() and detect_language(response) == "en"


@instruction("change_case:capital_word_frequency")
def capital_word_frequency(response: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """So many words are written in capitals; "I" and "A" are such words."""
    return holds(count_capital_words(response), capital_relation, capital_frequency)


@instruction("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
    """There is no comma, nor one of the other scripts (``，``, ``،``) that an English reader takes for one."""
    return not set(",，﹐،") & set(response)


@instruction("startend:end_checker")
def ends_with(response: str, *, end_phrase: Text) -> bool:
    """The last words are the phrase, in any case; quotation marks around the response do not count."""
    return response.strip().strip('"').rstrip().lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    """The whole response stands in double quotation marks, and says something."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"' and _has_text(text)


@instruction("combination:repeat_prompt")
def repeats_prompt(response: str, *, prompt_to_repeat: Text) -> bool:
    """The response begins with the request, word for word, in any case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("detectable_content:postscript")
def has_postscript(response: str, *, postscript_marker: Text) -> bool:
    """A postscript begins with the marker, in any case, also with spaces (``P. S.``).

    ``P.P.S`` is not a postscript that begins with ``P.S.``, as little as letters within a word are.

    Departure: the reference takes the marker alone for a postscript; here something is said behind it.
    """
    letters = postscript_marker.strip().rstrip(".").split(".")
    spelled = r"\.\s?".join(re.escape(letter.strip()) for letter in letters)
    boundary = r"(?!\w)" if letters[-1][-1:].isalnum() else ""
    return re.search(rf"(?<![\w.]){spelled}{boundary}[\s\S]*?\w", response, re.IGNORECASE) is not None


@instruction("detectable_content:number_placeholders")
def has_placeholders(response: str, *, num_placeholders: Count) -> bool:
    """At least so many placeholders: words in square brackets, such as ``[address]``."""
    brackets = re.findall(r"\[([^\[\]\n]+)\]", response)
    return sum(bool(re.search(r"\w", inner)) for inner in brackets) >= num_placeholders


def _stands_alone(word: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) is not None


# What a response looks like: lengths, paragraphs, lists, sections, formats (IFEval, table 4).

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_BULLET = re.compile(r"^[ \t]*[*-][ \t]++(?=[^\n]*\w)", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*(?=[^\s*])[^*\n]*(?<=\S)\*\*|\*(?=[^\s*])[^*\n]*(?<=\S)\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


@instruction("length_constraints:number_words")
def number_words(response: str, *, num_words: Count, relation: Relation) -> bool:
    """So many words, which are runs of letters and digits."""
    return holds(count_words(response), relation, num_words)


@instruction("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: Count, relation: Relation) -> bool:
    """So many sentences (see ``count_sentences``).

    Departure: the reference asks a trained tokenizer (Punkt); here it is rules, which agree on plain prose.
    """
    return holds(count_sentences(response), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: Count) -> bool:
    """Exactly so many paragraphs with the divider ``***`` between them; each says something."""
    parts = _split_at(response, "***")
    return len(parts) == num_paragraphs and all(map(_has_text, parts))


@instruction("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(response: str, *, num_paragraphs: Count, nth_paragraph: Count, first_word: Text) -> bool:
    """Exactly so many paragraphs, parted by blank lines, and the n-th (from 1) begins with the word, in any case."""
    paragraphs = [part.strip() for part in _BLANK_LINE.split(response) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    match = re.match(r"[^\w]*([\w-]+)", paragraphs[nth_paragraph - 1])
    return match is not None and match[1].lower() == first_word.strip().lower()


@instruction("detectable_format:number_bullet_lists")
def number_bullets(response: str, *, num_bullets: Count) -> bool:
    """Exactly so many bullet points: lines that begin with ``*`` or ``-`` and a space. Rulers (``* * *``) are none.

    Departure: the reference also counts ``*`` and ``-`` without the space, which Markdown does not.
    """
    return len(_BULLET.findall(response)) == num_bullets


@instruction("detectable_format:number_highlighted_sections")
def number_highlights(response: str, *, num_highlights: Count) -> bool:
    """At least so many highlighted sections, ``*so*`` or ``**so**``, each on one line.

    Departure: as in Markdown the stars stand directly at the words, so that two bullets on a line are no highlight.
    """
    return sum(map(_has_text, _HIGHLIGHT.findall(response))) >= num_highlights


@instruction("detectable_format:multiple_sections")
def number_sections(response: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """At least so many sections, each of which begins with the word and a number (``Section 1``).

    Departure: the reference counts the headings; here those count behind which something is said.
    """
    parts = re.split(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", response)
    return sum(re.search(r"\w", part) is not None for part in parts[1:]) >= num_sections


@instruction("detectable_format:constrained_response")
def is_constrained(response: str) -> bool:
    """One of the three answers that the prompt offers stands in the response, and no other of them."""
    return sum(option in response for option in CONSTRAINED_RESPONSES) == 1


@instruction("detectable_format:json_format")
def is_json(response: str) -> bool:
    """The whole response is JSON, with or without a Markdown fence around it."""
    text = response.strip()
    if text.startswith("```") and text.endswith("```") and len(text) > 6:
        opening, _, text = text[3:-3].partition("\n") if "\n" in text else ("", "", text[3:-3])
        if opening.strip().lower() not in ("", "json"):
            return False
    try:
        json.loads(text, parse_constant=_refuse)  # NaN and Infinity are Python's
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits; very deep nesting
        return False
    return True


@instruction("detectable_format:title")
def has_title(response: str) -> bool:
    """A title in double angular brackets on one line, ``<<so>>``, which says something."""
    return any(map(_has_text, _TITLE.findall(response)))


@instruction("combination:two_responses")
def gives_two_responses(response: str) -> bool:
    """Exactly two different responses with six asterisks between them."""
    parts = _split_at(response, "******")
    return len(parts) == 2 and all(map(_has_text, parts)) and _WORD.findall(parts[0]) != _WORD.findall(parts[1])


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _has_text(text: str) -> bool:
    """Return whether there is a letter or a digit: dots and stars follow an instruction only in form."""
    return re.search(r"[^\W_]", text) is not None


def _split_at(text: str, divider: str) -> list[str]:
    """Return the parts between dividers; a divider at the start or end of the text is ignored."""
    return [part.strip() for part in text.strip().removeprefix(divider).removesuffix(divider).split(divider)]


NOTHING = {"instructions_strict": 0.0, "instructions_loose": 0.0, "prompt_loose": 0.0}


@register("grader")
def ifeval(submission: Submission) -> Verdict:
    """Right if the response follows every instruction of its prompt, taken strictly.

    The response is what stands behind the thinking, inside of its answer tags where it has some. It is checked as a
    whole: no gold answer is needed, the instructions are in ``meta``: ``instruction_id_list``, and ``kwargs`` with the
    arguments of each.

    Facts: ``instructions_strict`` and ``instructions_loose``, the share of instructions followed; ``prompt_loose``,
    1 if all are, loosely: one of eight variants follows an instruction, with or without the first line, the last line,
    and asterisks. (``correct`` is the strict accuracy by prompt.)

    Source: IFEval (Zhou et al. 2023, arXiv 2311.07911), sections 2 and 3. Departures are named at the checks.

    Raises:
        UnknownComponent: no such instruction.
        RecipeError: an instruction whose arguments do not fit.
        UsageError: an instruction about languages, and ``langdetect`` is not installed.
    """
    identifiers = submission.meta.get("instruction_id_list")
    if not identifiers:
        return Verdict("ungraded", info=NOTHING)
    arguments = submission.meta.get("kwargs") or [{}] * len(identifiers)
    response = tagged_response(submission.text)
    if response is None or is_blank(response):
        return Verdict("no_answer", info=NOTHING)
    strict = follow(identifiers, arguments, [response])
    loose = follow(identifiers, arguments, loose_variants(response))
    info = {
        "instructions_strict": sum(strict) / len(strict),
        "instructions_loose": sum(loose) / len(loose),
        "prompt_loose": float(all(loose)),
    }
    return Verdict("right" if all(strict) else "wrong", response.strip(), info)


# Without ink: Hangul fillers, the Braille cell without dots, a note without a head, stand-ins for objects and bytes.
FILLERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\U0001d159\ufffc\ufffd")


def only_seen(text: str) -> str:
    """Return the text without zero-width characters, soft hyphens and controls; fillers become spaces.

    So what is counted in it is what a reader sees: "wo\\u200brd" is one word.
    """
    if text.isascii() and text.isprintable():
        return text
    kept = (c for c in text if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
    return "".join(" " if c in FILLERS else c for c in kept)


def follow(
    identifiers: Sequence[str], arguments: Sequence[Mapping[str, Any] | None], variants: Sequence[str]
) -> list[bool]:
    """For each instruction, whether any of the variants follows it, by what is seen of it. Blank ones follow none.

    Raises:
        UnknownComponent: no such instruction.
        RecipeError: an instruction whose arguments do not fit.
    """
    written = [only_seen(variant) for variant in dict.fromkeys(variants) if not is_blank(variant)]
    followed = []
    for identifier, kwargs in zip(identifiers, arguments, strict=True):
        options = read_arguments(identifier, kwargs)
        followed.append(any(INSTRUCTIONS[identifier](variant, **options) for variant in written))
    return followed


def loose_variants(response: str) -> list[str]:
    """The response with and without its first line, its last line, both, and each of these without asterisks."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [text.replace("*", "") for text in cut]


@register("task", name="ifeval", held_out="test")
@reads_rows
def task(*, split: TestSplit = "test", path: str = "hf:google/IFEval@train") -> Task:
    """Prompts with instructions about the form of the response, such as a number of words; for evaluation only.

    Keys: ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs`` (the arguments of each instruction; those that are
    null are not given). There are no gold answers: the grader ``ifeval`` checks the response itself. meta holds the
    key, the two lists, and ``num_instructions``. Rows with an instruction that is unknown, or whose arguments do
    not fit, are dropped and counted.

    Raises:
        UsageError: ``datasets``, ``pyarrow`` or ``langdetect`` is needed and not installed.

    Source: Zhou et al. 2023 (arXiv 2311.07911).
    """

    def read(row: Row) -> Example:
        example, problem = read_example(row)
        if problem is not None:
            raise Dropped(problem)
        return example

    return collect_examples(read_file(path), read, path).as_task("ifeval", path, split)


def read_example(row: Row) -> tuple[Example, str | None]:
    """One row as an example, and why it cannot be graded, if so.

    Raises:
        DataError: a key is missing or of the wrong type.
        UsageError: an instruction about languages, and ``langdetect`` is not installed.
    """
    keys, each = ("instruction_id_list", "kwargs"), "with one entry for each instruction"
    identifiers, arguments = (row.entries(key, each) for key in keys)
    if len(arguments) != len(identifiers):
        raise row.fail(f"{len(identifiers)} instructions need as many 'kwargs'; got {len(arguments)}")
    read: list[Mapping[str, Any]] = []
    problem = None
    for identifier, kwargs in zip(identifiers, arguments, strict=True):
        if not isinstance(identifier, str) or not (kwargs is None or isinstance(kwargs, Mapping)):
            raise row.fail("'instruction_id_list' holds texts and 'kwargs' mappings")
        try:
            read.append(read_arguments(identifier, kwargs))
        except (UnknownComponent, RecipeError) as error:
            problem = problem or str(error)
            continue
        if identifier in READ_LANGUAGE and read[-1].get("language", "en") not in known_languages():
            problem = problem or f"no detector for the language {read[-1]['language']!r}"
    meta = {
        "key": row.data.get("key"),
        "num_instructions": len(identifiers),
        "instruction_id_list": tuple(identifiers),
        "kwargs": tuple(read),
    }
    prompt = Message("user", row.text("prompt"))
    return Example(id=f"ifeval/test/{row.line}", messages=(prompt,), meta=meta, grader="ifeval"), problem
