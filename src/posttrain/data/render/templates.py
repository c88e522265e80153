"""Built-in prompt formats, and how they extract answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.data.render.encoding import Piece, Tokenizer
from posttrain.data.render.template import Template, chat_pieces, check_messages, spell
from posttrain.errors import UsageError
from posttrain.graders.answers import last_boxed, last_number
from posttrain.graders.grading import is_blank
from posttrain.registry import register
from posttrain.types import Example, Message

_CLOSING = re.compile(r"</(think|reasoning)>")
_OPENING = re.compile(r"\s*<(think|reasoning)>")
_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>analysis", "<|channel|>final<|message|>"))
# Final answer of a worked solution without tags or boxes: GSM8K's ``####``, or the usual instruction data sentence.
_LAST_LINE = re.compile(
    r"(?:\A|\n)####[ \t]*(\S[^\n]*)\s*\Z|(?i:\bthe (?:final )?answer is):?[ \t]*(\S[^\n]*?)\.?\s*\Z"
)
# Line breaks that any reader may recognize, and whitespace within a line.
_BREAK = "[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"
_SPACE = rf"(?:(?!{_BREAK})\s)*"

R1_ZERO_PREAMBLE = (
    "This is a conversation between a user and an assistant. The user asks a question, and the assistant "
    "answers it. Before answering, the assistant works the problem out in its mind, step by step. It writes "
    "its reasoning between <think> and </think> and then its final answer between <answer> and </answer>, "
    "that is: <think> the reasoning </think> <answer> the final answer </answer>."
)
XML_SYSTEM = (
    "Work the problem out step by step, then give the final answer. Write exactly in this format:\n"
    "<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
)
CODE_INSTRUCTION = "Write the whole program in one block of Python code between ``` marks."
BOXED_INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
Variables = Mapping[str, Any] | None


def tagged_answer(text: str, reasoning: str) -> str | None:
    """Extract the first complete ``<answer>`` after the reasoning closes; if nested, the innermost.

    None if ``</reasoning>`` is missing or the answer is blank. Tags inside the reasoning are ignored.
    """
    _, closed, rest = text.partition(f"</{reasoning}>")
    if closed:
        return _first_complete(rest)
    return None


def _first_complete(text: str) -> str | None:
    for part in text.split("</answer>")[:-1]:
        _, opened, answer = part.rpartition("<answer>")
        if opened:
            return _unless_blank(answer)
    return None


def _unless_blank(answer: str) -> str | None:
    """Strip whitespace. None if nothing visible remains."""
    if is_blank(answer):
        return None
    return answer.strip()


def behind_thinking(text: str) -> str | None:
    """Drop the thinking. None if truncated inside it."""
    for opening, closing in _THOUGHTS:
        _, _, text = text.rpartition(closing)
        if opening in text:
            return None
    return text


def boxed_answer(text: str) -> str | None:
    """Extract the last complete ``\\boxed{…}``. None if missing or blank."""
    answer = last_boxed(text)
    if answer is None or is_blank(answer):
        return None
    return answer


def _behind_thinking(*ways: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Build a function that drops the thinking, then tries each extractor in order."""

    def extract(text: str) -> str | None:
        rest = behind_thinking(text)
        if rest is None:
            return None
        for way in ways:
            answer = way(rest)
            if answer:
                return answer
        return None

    return extract


def _unless_cut_off(way: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Build a function that searches the full text, unless truncated inside its thinking."""

    def extract(text: str) -> str | None:
        if behind_thinking(text) is None:
            return None
        return way(text)

    return extract


def split_response(text: str) -> tuple[str, str | None]:
    """Split a response into (reasoning, answer). The answer is None if not marked.

    After thinking, this is the first complete ``<answer>``, else the last box, else everything. Without thinking, it
    is an ``<answer>``, the last box (also kept in the reasoning), or the final line's result (``#### 42``,
    ``The answer is 42.``). Unclosed thinking means truncation: None.
    """
    opening = _OPENING.match(text)
    closing = _CLOSING.search(text)
    if closing is not None:
        start = 0  # the opening tag may be missing, if it ends the prompt
        if opening is not None and opening[1] == closing[1]:
            start = opening.end()
        rest = text[closing.end() :]
        answer = _first_complete(rest) or boxed_answer(rest) or _unless_blank(rest)
        return text[start : closing.start()].strip(), answer
    if opening is not None:
        return text.strip(), None
    tagged = _first_complete(text)
    if tagged is not None:
        return text.partition("<answer>")[0].strip(), tagged
    boxed = boxed_answer(text)
    last = _LAST_LINE.search(text)
    if boxed is not None or last is None:
        return text.strip(), boxed
    return text[: last.start()].strip(), (last[1] or last[2]).strip()


@dataclass(frozen=True)
class Dialogue:
    """Plain-text conversations for models without turn markers, one paragraph per message.

    Lines that look like a turn header are escaped with ``>``, which is reversible.
    """

    user: str
    assistant: str
    separator: str

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Render one paragraph per message. Names are trusted, contents are not.

        Raises:
            UsageError: no messages, a blank message, an unknown role, or a trailing assistant message.
        """
        check_messages(messages)
        names = {"system": "System", "user": self.user, "assistant": self.assistant}
        pieces: list[Piece] = []
        for message in spell(messages):
            before = f"{names[message.role]}: "
            if pieces:
                before = self.separator + before
            pieces += [_ours(before), _theirs(self.quote(message.content))]
        return pieces

    def quote(self, content: str) -> str:
        """Prefix lines that look like a turn header (``Assistant: …``) with ``>``."""
        start = rf">*{_SPACE}(?:System|{self.user}|{self.assistant}){_SPACE}:"
        return re.sub(f"({_BREAK})(?={start})", r"\1>", content, flags=re.IGNORECASE)


PARAGRAPHS = Dialogue("User", "Assistant", "\n")
TRANSCRIPT = Dialogue("Human", "Assistant", "\n\n")


@register("template")
def r1_zero(*, preamble: str = R1_ZERO_PREAMBLE) -> Template:
    """Base-model prompt of R1-Zero: preamble, ``User: question``, ``Assistant: <think>``.

    Demonstrations continue with `` reasoning </think> <answer> 42 </answer>``. Given responses are split and
    rewritten this way, using their answer, else the gold answer; without either they are dropped and counted. Grading
    uses the first complete ``<answer>`` after the first ``</think>``. Lines that look like a turn header are escaped.

    Args:
        preamble: text before the conversation (trusted). May be empty.

    Source: DeepSeek-R1 (Guo et al. 2025), table 1; reworded here.
    """

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
        if any(message.is_rendered for message in messages):
            return _rendered(messages, "<think>")
        pieces = [*PARAGRAPHS.pieces(messages), _ours("\nAssistant: <think>")]
        if preamble:
            pieces.insert(0, _ours(f"{preamble}\n"))
        return pieces

    def response(example: Example) -> list[Piece]:
        solution, answer = _parts_of(example)
        if not answer:
            return []
        pieces = [_ours(" </think> <answer> "), _theirs(answer), _ours(" </answer>")]
        if solution:
            pieces = [_ours(" "), _theirs(solution), *pieces]
        return pieces

    extract = partial(tagged_answer, reasoning="think")
    frame = ("\nUser: ", "\nAssistant: <think>")
    tags = ("think", "answer")
    return Template("r1_zero", "<think>", tags, prompt, response, extract, frame=frame, quote=PARAGRAPHS.quote)


@register("template")
def xml_reasoning(*, system: str = XML_SYSTEM) -> Template:
    """System prompt asking for ``<reasoning>`` and ``<answer>`` blocks, with each tag on a separate line.

    Grading uses the first complete ``<answer>`` after the first ``</reasoning>``. Needs a chat template.

    Args:
        system: system message (trusted). May be empty.

    Source: format of the widely shared GSM8K GRPO notebooks; reworded here.
    """

    def response(example: Example) -> list[Piece]:
        solution, answer = _parts_of(example)
        if not answer:
            return []
        pieces = [_ours("<reasoning>\n")]
        if solution:
            pieces += [_theirs(solution), _ours("\n")]
        return [*pieces, _ours("</reasoning>\n<answer>\n"), _theirs(answer), _ours("\n</answer>")]

    extract = partial(tagged_answer, reasoning="reasoning")
    tags = ("reasoning", "answer")
    return Template("xml_reasoning", "", tags, _question_of(system, chat=True), response, extract, chat=True)


@register("template")
def boxed(*, instruction: str = BOXED_INSTRUCTION, chat: bool = False) -> Template:
    """Question plus instruction, answered in ``\\boxed{}``. Grading uses the last complete box.

    Demonstrations contain the solution, plus a box unless its last box already holds the gold answer. Given responses
    are unchanged, except that a missing box is appended with the gold answer.

    Args:
        instruction: appended after the last message (trusted). May be empty.
        chat: use the tokenizer's chat template, with the instruction as system message.

    Source: prompts for MATH evaluations (Hendrycks et al. 2021; Qwen2.5-Math); reworded here.
    """

    def response(example: Example) -> list[Piece]:
        answer = example.answer
        if example.demonstration is not None:
            text = example.demonstration
            has_box = answer is None or boxed_answer(text) is not None
        else:
            text = example.solution or ""
            answer = _answer_of(example)
            has_box = last_boxed(text) == answer
        pieces: list[Piece] = []
        if text:
            pieces.append(_theirs(text))
        if has_box:
            return pieces
        if pieces:
            pieces.append(_ours("\n"))
        return [*pieces, _ours("\\boxed{"), _theirs(answer), _ours("}")]

    extract = _unless_cut_off(boxed_answer)
    return Template("boxed", "", (), _question_of(instruction, chat), response, extract, chat=chat)


@register("template")
def code(*, instruction: str = CODE_INSTRUCTION, chat: bool = True) -> Template:
    """Question plus instruction to answer with a fenced program. Grading uses the last complete Python block.

    Demonstrations and given responses are unchanged. The grader ``code_tests`` prefers the last block that defines the
    tested function.

    Args:
        instruction: system message, or text after the last message (trusted). May be empty.
        chat: use the tokenizer's chat template; ``false`` if the tokenizer lacks one.

    Source: worded here.
    """
    from posttrain.graders.code.grader import last_program  # only needed by this template

    prompt = _question_of(instruction, chat)
    extract = _unless_cut_off(last_program)
    return Template("code", "", (), prompt, lambda example: [_theirs(_response_text(example))], extract, chat=chat)


@register("template")
def chat(*, system: str = "", variables: dict[str, Any] | None = None) -> Template:
    """The tokenizer's chat template.

    Grading uses the first complete ``<answer>`` after the thinking, else the last number. Demonstrations contain the
    solution, then ``The answer is 42.`` on a separate line if a gold answer exists. Given responses are unchanged,
    except that thinking tags become special tokens if the tokenizer defines them.

    Args:
        system: system message (trusted), placed before any system message from the data. May be empty.
        variables: chat template variables, such as ``enable_thinking: false``, or a fixed date if it prints today's.
    """

    def response(example: Example) -> list[Piece]:
        if example.demonstration is None and example.answer is None and example.solution:
            return [_theirs(example.solution)]
        return _concluded(example, "\n")

    own = variables or {}
    prompt = _question_of(system, chat=True, own=own)
    extract = _behind_thinking(_first_complete, last_number)
    return Template(
        "chat", "", (), prompt, response, extract, chat=True, variables=own, system=system, turns="rendered"
    )


@register("template")
def plain() -> Template:
    """The question followed by a line break. Grading uses the last number.

    Demonstrations contain the solution and ``The answer is 42.`` on one line, or a given response unchanged. Grading
    never finds non-numeric gold answers; use a different template for them.
    """

    prompt = _question_of("", chat=False)
    extract = _behind_thinking(last_number)
    return Template("plain", "", (), prompt, lambda example: _concluded(example, " "), extract)


@register("template")
def dialogue() -> Template:
    """Transcript for models without a chat template: ``Human: …`` and ``Assistant: …``, separated by blank lines.

    The model continues after the assistant's name. Demonstrations are the solution, else the gold answer. Grading
    uses the full reply. Lines that look like a turn header are escaped with ``>``.

    Source: transcripts of HH-RLHF (Bai et al. 2022).
    """

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
        if any(message.is_rendered for message in messages):
            return _rendered(messages, "")
        return [*TRANSCRIPT.pieces(messages), _ours("\n\nAssistant:")]

    def response(example: Example) -> list[Piece]:
        text = _response_text(example)
        if text[0].isspace():
            return [_theirs(text)]
        return [_ours(" "), _theirs(text)]

    extract = _unless_cut_off(_unless_blank)
    frame = ("\n\nHuman: ", "\n\nAssistant:")
    return Template("dialogue", "", (), prompt, response, extract, frame=frame, quote=TRANSCRIPT.quote, space=" ")


@register("template")
def document() -> Template:
    """Raw text for pretraining with ``data.train_on: all``: BOS (or EOS), then the solution.

    Everything is trusted: markers and tags become special tokens. Messages are ignored. Grading uses the last number.
    """

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
        start = tokenizer.bos_token or tokenizer.eos_token
        if start is None:
            raise UsageError(
                "template document: the tokenizer defines neither bos_token nor eos_token to start a document"
            )
        return [_ours(start)]

    def response(example: Example) -> list[Piece]:
        text = example.demonstration or example.solution
        if not text or not text.strip():
            raise UsageError(f"example {example.id!r}: template document trains on the solution, which is missing")
        return [_ours(text)]

    return Template("document", "", (), prompt, response, last_number, turns="last", takes_rendered=True)


@register("template")
def as_is() -> Template:
    """Already rendered prompts and responses, used unchanged.

    Both are fully trusted: use this only with files rendered for this model. Missing BOS and end tokens are added.
    Grading uses the first complete ``<answer>`` after the thinking, else the last box, else the last number.
    """

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
        check_messages(messages)
        if len(messages) > 1:
            raise UsageError(
                f"template as_is: expected a single rendered prompt, got {len(messages)} messages; use template chat "
                "to render them"
            )
        return [_ours(messages[0].content)]

    def response(example: Example) -> list[Piece]:
        return [_ours(_response_text(example))]

    extract = _behind_thinking(_first_complete, boxed_answer, last_number)
    return Template("as_is", "", (), prompt, response, extract, turns="last", takes_rendered=True)


def _ours(text: str) -> Piece:
    return Piece(text, trusted=True)


def _theirs(text: str | None) -> Piece:
    return Piece(text or "", trusted=False)


def _rendered(messages: Sequence[Message], opening: str) -> list[Piece]:
    """Convert an already rendered prompt, trusting only the template's opening at its end."""
    check_messages(messages)
    if len(messages) > 1:
        raise UsageError(
            "tool instructions cannot be added to a prompt which is rendered already; use rollout.show_tools: false, "
            "or plain questions"
        )
    return [_theirs(messages[0].content.rstrip().removesuffix(opening)), _ours(opening)]


def _response_text(example: Example) -> str:
    """Choose the given response, else the solution, else the gold answer."""
    return example.demonstration or example.solution or _answer_of(example)


def _concluded(example: Example, separator: str) -> list[Piece]:
    """Choose the given response, or build the solution plus a sentence stating the gold answer."""
    if example.demonstration is not None:
        return [_theirs(example.demonstration)]
    pieces = [_ours("The answer is "), _theirs(_answer_of(example)), _ours(".")]
    if example.solution:
        pieces = [_theirs(example.solution), _ours(separator), *pieces]
    return pieces


def _parts_of(example: Example) -> tuple[str | None, str | None]:
    """(reasoning, answer) to write between tags. Given responses without an answer use the gold answer."""
    if example.demonstration is None:
        return example.solution, _answer_of(example)
    reasoning, answer = split_response(example.demonstration)
    is_cut_off = answer is None and reasoning.startswith("<")
    if not answer and not is_cut_off:
        answer = example.answer
    return reasoning, answer


def _question_of(instruction: str, chat: bool, own: Variables = None) -> Callable[..., list[Piece]]:
    """Build a prompt function adding an instruction: system message in a chat, else after the last message."""

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer, variables: Variables = own) -> list[Piece]:
        if chat:
            return chat_pieces(messages, tokenizer, instruction, variables)
        check_messages(messages)
        closing = "\n"
        if instruction:
            closing = f"\n{instruction}\n"
        if len(messages) == 1 and messages[0].name is None:
            return [_theirs(messages[0].content), _ours(closing)]
        return [*PARAGRAPHS.pieces(messages), _ours(closing)]

    return prompt


def _answer_of(example: Example) -> str:
    if example.answer is None or not example.answer.strip():
        raise UsageError(f"example {example.id!r}: missing answer, nothing to demonstrate")
    return example.answer
