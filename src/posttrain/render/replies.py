"""Replies between a model's turns, as ids behind those that it wrote.

No text is encoded again. In a chat the frame around a reply is the difference between the tokenizer's
template with and without the turn, found once with placeholders; a template that writes earlier turns otherwise once
another follows (one that drops what was thought, say) is refused: a model would read other texts than it was
trained on. A template without turn markers has a frame of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UsageError
from posttrain.render.assistant import behind_prompt
from posttrain.render.calls import CallForm, write_calls
from posttrain.render.encoding import Piece, encode_pieces
from posttrain.render.template import Template, end_id
from posttrain.render.template_calls import call_form
from posttrain.render.turns import mark, render_history, turn_end
from posttrain.types import Turn

# Kinds of turns that a model may write: a plain text, and one with thinking before it.
_PROBES = ("{}", "<think>\n{}\n</think>\n\n{}")


@dataclass(frozen=True)
class ReplyFrame:
    """The texts before, between and behind the results of a turn (trusted).

    Attributes:
        end: the id that ends a turn, with which ``before`` begins; it is not repeated behind a turn that has it.
        strips: the template strips contents.
        wrapped: it marks results as such by itself.
    """

    before: str
    between: str
    after: str
    end: int | None
    strips: bool
    wrapped: bool

    def encode(
        self, tokenizer: Any, template: Template, results: Sequence[str], tags: tuple[str, str], last: int | None
    ) -> list[int]:
        """The ids of a reply behind a turn whose last id is ``last``; no text of a result becomes a special token.

        Args:
            tags: around a result where the template does not mark it.
        """
        opening, closing = ("", "") if self.wrapped else tags
        pieces = [Piece(self.before, trusted=True)]
        for number, result in enumerate(results):
            said = template.quote(result.strip() if self.strips else result)
            pieces.append(Piece((self.between if number else "") + opening, trusted=True))
            pieces += [Piece(said, trusted=False), Piece(closing, trusted=True)]
        ids = encode_pieces(tokenizer, [*pieces, Piece(self.after, trusted=True)])
        return ids[1:] if self.end is not None and last == self.end and ids[:1] == [self.end] else ids


def encode_turns(
    tokenizer: Any, template: Template, turns: Sequence[Turn], answered: bool, prompt: Sequence[int] = ()
) -> tuple[list[int], list[bool]]:
    """Turns of a demonstration as they would be played: the ids, and which of them the model is to write.

    Args:
        answered: an answer follows; otherwise the last call ended the episode, and its results were not heard.

    Raises:
        UsageError: the chat template rewrites history, or the tokenizer has no end token.
    """
    frame, form = reply_frame(tokenizer, template), call_form(tokenizer, template)
    ids: list[int] = []
    own: list[bool] = []
    for number, turn in enumerate(turns, start=1):
        written = encode_turn(tokenizer, template, turn, form, [*prompt, *ids])
        results = [call.result for call in turn.calls]
        is_heard = answered or number < len(turns)
        heard = frame.encode(tokenizer, template, results, form.results, written[-1]) if is_heard else []
        ids += [*written, *heard]
        own += [True] * len(written) + [False] * len(heard)
    return ids, own


def encode_turn(
    tokenizer: Any, template: Template, turn: Turn, form: CallForm, prompt: Sequence[int] = ()
) -> list[int]:
    """The ids of a turn as a model would write it behind a prompt, the end included: its text, its calls.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    pieces = [Piece(" " if template.opening else "", trusted=True), Piece(turn.text, trusted=False)]
    if turn.text or form.end is None:  # a call that ends otherwise than an answer is a message of its own
        pieces = behind_prompt(tokenizer, template, pieces, prompt)
    if turn.calls:
        pieces = [*pieces, *write_calls(turn.calls, form, bool(turn.text))]
    end = form.end if turn.calls and form.end is not None else end_id(tokenizer, template)
    return [*encode_pieces(tokenizer, pieces), end]


def reply_frame(tokenizer: Any, template: Template, roles: Sequence[str] = ("tool", "user")) -> ReplyFrame:
    """The frame of a template with a tokenizer, in a chat for the first of the roles that the template has.

    Raises:
        UsageError: the chat template rewrites history; the message shows where.
    """
    if not template.chat:
        before, after = template.frame
        return ReplyFrame(before, "\n", after, None, strips=False, wrapped=False)
    refusals = []
    for role in roles:
        try:
            return _by_difference(tokenizer, template.variables, role)
        except UsageError as error:
            refusals.append(error)
    raise refusals[-1] if "rewrites" in str(refusals[-1]) else refusals[0]


def _by_difference(tokenizer: Any, variables: Mapping[str, Any], role: str) -> ReplyFrame:
    """The frame for replies in a role; equal for every turn, whatever it says."""

    def render(*turns: tuple[str, str]) -> str:
        return render_history(tokenizer, [("user", mark(20)), *turns], variables, prompt=True)

    heard = [mark(10), mark(11)]
    tails = set()
    for probe in _PROBES:
        said = [probe.format(mark(2 * i), mark(2 * i + 1)) for i in range(2)]
        history, before = list[tuple[str, str]](), render()
        for turn, reply in zip(said, heard, strict=True):
            history += [("assistant", turn), (role, reply)]
            after = render(*history)
            if not after.startswith(before + turn):
                raise UsageError(_rewrites(before + turn, after))
            opening, shown, closing = after[len(before + turn) :].partition(reply)
            if not shown or reply in closing:
                raise UsageError(f"the tokenizer's chat template does not show a message of the role {role!r} once")
            tails.add((opening, closing))
            before = after
    if len(tails) > 1:
        raise UsageError(_rewrites(*sorted("".join(tail) for tail in tails)[:2]))
    ((opening, closing),) = tails
    strips = f" {heard[0]} " not in render(("assistant", mark(0)), (role, f" {heard[0]} "))
    between = "\n"  # where the template takes only one message
    try:
        both = render(("assistant", mark(0)), (role, heard[0]), (role, heard[1]))
        found = both.partition(opening + heard[0])[2].partition(heard[1])
        between = found[0] if found[1] and found[2] == closing else between
    except UsageError:
        pass
    return ReplyFrame(opening, between, closing, turn_end(tokenizer), strips, wrapped=role == "tool")


def _rewrites(expected: str, written: str) -> str:
    """The message about a template that changes what was said before, with the difference."""
    texts = [re.sub(mark(0).replace("0", r"(\d+)"), r"TEXT\1", text) for text in (expected, written)]
    lines, others = texts[0].splitlines(), texts[1][: len(texts[0]) + 80].splitlines()
    shown = difflib.unified_diff(lines, others, "said", "rendered", n=1, lineterm="")
    return (
        "the tokenizer's chat template rewrites history: once a turn follows, what was said before is rendered "
        "otherwise, so a model would be trained on texts that it never reads again. Give the tokenizer a template that "
        "keeps it, or choose a prompt.template that needs none (r1_zero, plain, boxed). The difference:\n"
        + "\n".join(list(shown)[:16])
    )
