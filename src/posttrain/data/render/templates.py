"""The prompt templates that a recipe may name, and the rules by which an answer is found in a text."""

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
# The end of a worked solution without tags or boxes: GSM8K's mark, and the sentence of most instruction data.
_LAST_LINE = re.compile(
    r"(?:\A|\n)####[ \t]*(\S[^\n]*)\s*\Z|(?i:\bthe (?:final )?answer is):?[ \t]*(\S[^\n]*?)\.?\s*\Z"
)
# The end of a line for any reader, and space within one.
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
    """Return the first complete ``<answer>`` after the reasoning closes, of nested ones the innermost.

    None without a ``</reasoning>``, and of a blank answer; tags inside the reasoning do not count.
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
    """The answer without white space around it; None if nothing can be seen in it."""
    if is_blank(answer):
        return None
    return answer.strip()


def behind_thinking(text: str) -> str | None:
    """The text that follows the thinking; None of a text that was cut off within it."""
    for opening, closing in _THOUGHTS:
        _, _, text = text.rpartition(closing)
        if opening in text:
            return None
    return text


def boxed_answer(text: str) -> str | None:
    """The content of the last complete ``\\boxed{…}``; a blank one is no answer."""
    answer = last_boxed(text)
    if answer is None or is_blank(answer):
        return None
    return answer


def _behind_thinking(*ways: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """A function that looks in these ways, one after the other, for an answer behind the thinking."""

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
    """A function that looks for an answer in the whole text, unless it was cut off within its thinking."""

    def extract(text: str) -> str | None:
        if behind_thinking(text) is None:
            return None
        return way(text)

    return extract


def split_response(text: str) -> tuple[str, str | None]:
    """Split a whole response into (reasoning, answer), however it marks the two; the answer is None where it does not.

    After the thinking the answer is the first complete ``<answer>``, else the last box, else everything. Without
    thinking it is an ``<answer>``, the last box (which stays in the reasoning), or what the last line states
    (``#### 42``, ``The answer is 42.``). Thinking that never closes was cut off: no answer.
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
    """Conversations as plain text, one paragraph for each message, for models without turn markers.

    A line of a message that looks like the start of a turn is quoted with ``>``, which can be undone exactly.
    """

    user: str
    assistant: str
    separator: str

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """One paragraph per message; the names are trusted, the contents are not.

        Raises:
            UsageError: no messages, a blank one, an unknown role, or the last is the assistant's.
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
        """``content`` with ``>`` before each line that looks like the start of a turn (``Assistant: …``)."""
        start = rf">*{_SPACE}(?:System|{self.user}|{self.assistant}){_SPACE}:"
        return re.sub(f"({_BREAK})(?={start})", r"\1>", content, flags=re.IGNORECASE)


PARAGRAPHS = Dialogue("User", "Assistant", "\n")
TRANSCRIPT = Dialogue("Human", "Assistant", "\n\n")


@register("template")
def r1_zero(*, preamble: str = R1_ZERO_PREAMBLE) -> Template:
    """Base-model prompt of R1-Zero: preamble, ``User: question``, ``Assistant: <think>``.

    A demonstration continues `` reasoning </think> <answer> 42 </answer>``; a given response is taken apart and written
    so (its own answer, else the gold one; without either it is dropped and counted). The answer is the first complete
    ``<answer>`` after the first ``</think>``. A line of a message that looks like the start of a turn is quoted.

    Args:
        preamble: stands above the conversation (trusted). May be empty.

    Source: DeepSeek-R1 (Guo et al. 2025), table 1; the wording is ours.
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
    """A system prompt asks for ``<reasoning>`` and ``<answer>`` blocks, each tag on a line of its own.

    The answer is the first complete ``<answer>`` after the first ``</reasoning>``. Needs a chat template.

    Args:
        system: the system message (trusted). May be empty.

    Source: the format of the widely shared GSM8K GRPO notebooks; the wording is ours.
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
    """The question, an instruction, and the answer in ``\\boxed{}``: the last complete box of the text.

    A demonstration is the solution; a box with the answer is added unless it ends in that box. A given response
    stands as it is, with the gold answer in a box behind it where it has none.

    Args:
        instruction: follows the last message (trusted). May be empty.
        chat: render with the tokenizer's chat template; the instruction is then its system message.

    Source: the prompt of MATH evaluations (Hendrycks et al. 2021; Qwen2.5-Math); the wording is ours.
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
    """The question, and an instruction to answer with a program in a fenced block: the last complete one of Python.

    A demonstration or a given response stands as it is. The grader ``code_tests`` prefers the last block that defines
    the function which the tests call.

    Args:
        instruction: the system message (trusted), or the text after the last message. May be empty.
        chat: render with the tokenizer's chat template; ``false`` for a model that has none.

    Source: the wording is ours.
    """
    from posttrain.graders.code.grader import last_program  # nobody else's prompts need it

    prompt = _question_of(instruction, chat)
    extract = _unless_cut_off(last_program)
    return Template("code", "", (), prompt, lambda example: [_theirs(_response_text(example))], extract, chat=chat)


@register("template")
def chat(*, system: str = "", variables: dict[str, Any] | None = None) -> Template:
    """The tokenizer's own chat template.

    The answer is the first complete ``<answer>`` of what follows the thinking, else its last number. A demonstration is
    the solution, then ``The answer is 42.`` on a line of its own where there is a gold answer. A given response stands
    as it is; the tags of its thinking are the tokenizer's own.

    Args:
        system: a system message (trusted) above the data's own. May be empty.
        variables: for the chat template, such as ``enable_thinking: false``; its date, where it prints today's.
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
    """The question on its own line, then the text; the answer is the last number in it.

    A demonstration is the solution and ``The answer is 42.``, on one line, or a given response as it is. Gold answers
    that are no numbers are never found: use another template for them.
    """

    prompt = _question_of("", chat=False)
    extract = _behind_thinking(last_number)
    return Template("plain", "", (), prompt, lambda example: _concluded(example, " "), extract)


@register("template")
def dialogue() -> Template:
    """A transcript for models without a chat template: ``Human: …``, ``Assistant: …``, a blank line between.

    The model goes on behind the assistant's name; a demonstration is the solution, or else the answer. The whole reply
    is the answer. A line of a message that looks like the start of a turn is quoted with ``>``.

    Source: the transcripts of HH-RLHF (Bai et al. 2022).
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
    """Text to read, for pretraining with ``data.train_on: all``: the tokenizer's BOS (or EOS) token, then the solution.

    The whole text is trusted: markers and tags in it become the tokenizer's own tokens. Messages are ignored. The
    answer is the last number.
    """

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
        start = tokenizer.bos_token or tokenizer.eos_token
        if start is None:
            raise UsageError("template document: the tokenizer has neither bos_token nor eos_token to begin with")
        return [_ours(start)]

    def response(example: Example) -> list[Piece]:
        text = example.demonstration or example.solution
        if not text or not text.strip():
            raise UsageError(f"example {example.id!r}: template document trains on the solution, and there is none")
        return [_ours(text)]

    return Template("document", "", (), prompt, response, last_number, turns="last", takes_rendered=True)


@register("template")
def as_is() -> Template:
    """Prompts that are already rendered, as they stand; a demonstration is the response as it stands.

    Both are trusted whole: use it only with files that were rendered for this model. BOS and the end token are added
    where they are missing. The answer is the first complete ``<answer>``, else the last box, else the last number, of
    what follows the thinking.
    """

    def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
        check_messages(messages)
        if len(messages) > 1:
            raise UsageError(
                f"template as_is: a rendered prompt is one text, and this one has {len(messages)} messages; use chat, "
                "which renders them"
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
    """A prompt that is rendered already; no more of it is trusted than the template's opening at its end."""
    check_messages(messages)
    if len(messages) > 1:
        raise UsageError(
            "a prompt that is rendered already takes no instructions about tools; use rollout.show_tools: false, or "
            "questions that are not rendered"
        )
    return [_theirs(messages[0].content.rstrip().removesuffix(opening)), _ours(opening)]


def _response_text(example: Example) -> str:
    """The given response, else the solution, else the answer."""
    return example.demonstration or example.solution or _answer_of(example)


def _concluded(example: Example, separator: str) -> list[Piece]:
    """The given response, or the solution with the answer in a sentence behind it."""
    if example.demonstration is not None:
        return [_theirs(example.demonstration)]
    pieces = [_ours("The answer is "), _theirs(_answer_of(example)), _ours(".")]
    if example.solution:
        pieces = [_theirs(example.solution), _ours(separator), *pieces]
    return pieces


def _parts_of(example: Example) -> tuple[str | None, str | None]:
    """(reasoning, answer) to write between tags; of a demonstration its own answer, else the gold one, else None."""
    if example.demonstration is None:
        return example.solution, _answer_of(example)
    reasoning, answer = split_response(example.demonstration)
    is_cut_off = answer is None and reasoning.startswith("<")
    if not answer and not is_cut_off:
        answer = example.answer
    return reasoning, answer


def _question_of(instruction: str, chat: bool, own: Variables = None) -> Callable[..., list[Piece]]:
    """The prompt with an instruction: as the system message of a chat, or after the last message."""

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
        raise UsageError(f"example {example.id!r} has no answer, so there is nothing to demonstrate")
    return example.answer
