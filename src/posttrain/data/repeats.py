"""Detect answers that repeat the prompt, and remove the copy, because it would be trained on as an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from posttrain.data.reading import Row, is_only_space
from posttrain.types import Example, Message, Response

MIN_CHARACTERS = 20  # an answer may begin with a shorter prompt by chance
ONLY_PROMPT = "an answer that only repeats the prompt"


@dataclass(slots=True)
class RepeatedPrompts:
    """Counts rows whose answer begins with the prompt.

    One answer may match by chance, so text is removed only if every row matches.

    ``keys``: answer keys for notices. ``num_lists``: rows that repeat messages. ``num_removed`` and ``num_kept``: rows
    that repeat text. Kept copies are counted only for long prompts.
    """

    keys: str = ""
    num_lists: int = 0
    num_removed: int = 0
    num_kept: int = 0
    num_rows: int = 0
    _questions: list[str] = field(default_factory=list)  # original prompt text per example

    def count(self, question: str, keys: Sequence[str], *, in_messages: bool) -> None:
        """Count an example's row. ``question``: see ``question_text``. ``keys``: answer keys."""
        self.keys = self.keys or " and ".join(map(repr, keys))
        self._questions.append(question)
        self.num_lists += in_messages

    def remove(self, examples: Sequence[Example], dropped: Counter[str]) -> list[Example]:
        """Remove prompt text from answers if all examples repeat it. Drop and count answers that become blank.

        ``examples``: one per counted row, in order.
        """
        lengths = []
        for example, question in zip(examples, self._questions, strict=True):
            lengths.append(_length_of_copy(example, question))
        self.num_rows = len(examples)
        has_answers = [length for length in lengths if length is not None]
        shortened = []
        for example, length in zip(examples, lengths, strict=True):
            shortened.append(_shortened(example, length or 0))
        kept = [example for example in shortened if not any(map(is_only_space, _answers_in(example)))]
        if not has_answers or not all(has_answers) or not kept:
            self.num_kept = sum(length is not None and length >= MIN_CHARACTERS for length in lengths)
            return list(examples)
        self.num_removed = len(has_answers)
        if len(kept) < len(examples):
            dropped[ONLY_PROMPT] += len(examples) - len(kept)
        return kept

    def describe(self) -> tuple[str, ...]:
        """Build startup lines about removed and remaining copies."""
        lines = []
        if self.num_lists:
            lines.append(
                f"{self.keys} repeat the prompt's messages in {self.num_lists:,} rows. Each conversation is read once"
            )
        if self.num_removed:
            lines.append(f"{self.keys} repeat the prompt's text in all {self.num_removed:,} rows. The copy was removed")
        if self.num_kept:
            lines.append(
                f"{self.keys} repeat the prompt's text in {self.num_kept:,} of {self.num_rows:,} rows. Other rows "
                "do not, so these prompts are trained on. Remove the copies from the file"
            )
        return tuple(lines)


def question_text(messages: Sequence[Message]) -> str:
    """Find the text of a single-message prompt, ignoring system messages. Empty for longer conversations."""
    questions = [message for message in messages if message.role != "system"]
    if len(questions) == 1 and questions[0].role == "user":
        return questions[0].content
    return ""


def after_prompt(
    row: Row, key: str, prompt: tuple[Message, ...], reply: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Message, ...]] | None:
    """Split a conversation after the prompt: (missing system message, remaining messages). None without a match.

    Raises:
        DataError: no remaining messages, or conflicting system messages.
    """
    own_system, question = _split_system(prompt)
    system, turns = _split_system(reply)
    if not question or turns[: len(question)] != question:
        return None
    if system and own_system and system[0].content.strip() != own_system[0].content.strip():
        raise row.fail(f"{key!r} has a different system message than the prompt; keep only one")
    rest = turns[len(question) :]
    row.refuse_if(not rest, f"{key!r} contains only the prompt's messages; add the answer, or remove the row")
    if own_system:
        system = ()
    return system, rest


def _split_system(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Split into (leading system message, if any; other messages)."""
    if messages and messages[0].role == "system":
        return messages[:1], messages[1:]
    return (), messages


def _answers_in(example: Example) -> Iterator[str]:
    """Yield responses, or else the demonstration or solution if the example is not a conversation."""
    for response in example.responses:
        yield response.text
    if example.responses or example.conversation or not example.messages:
        return
    for text in (example.demonstration, example.solution):
        if text is not None:
            yield text


def _length_of_copy(example: Example, question: str) -> int | None:
    """Count the prompt characters repeated by all answers. None without answers."""
    answers = list(_answers_in(example))
    if not answers:
        return None
    firsts = [response.steps[0] for response in example.responses if response.steps]
    for copy in (question, question.rstrip()):
        is_inside = all(first.startswith(copy) and not is_only_space(first[len(copy) :]) for first in firsts)
        if not is_only_space(copy) and is_inside and all(answer.startswith(copy) for answer in answers):
            return len(copy)
    return 0


def _shortened(example: Example, length: int) -> Example:
    """Remove leading characters from all answers."""
    if example.responses:
        return replace(example, responses=tuple(_shortened_response(one, length) for one in example.responses))
    if example.conversation:
        return example
    demonstration = example.demonstration
    if demonstration is not None:
        demonstration = demonstration[length:]
    solution = example.solution
    if solution is not None:
        solution = solution[length:]
    return replace(example, demonstration=demonstration, solution=solution)


def _shortened_response(response: Response, length: int) -> Response:
    steps = response.steps
    if steps:
        steps = (steps[0][length:], *steps[1:])
    return replace(response, text=response.text[length:], steps=steps)
