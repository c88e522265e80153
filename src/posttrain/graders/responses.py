"""What a completion says once its thinking is over, and the part of it that is the answer.

For graders that read whole responses (letters of choices, lists of names, instructions). Linear in the length
of the text.
"""

from __future__ import annotations

from posttrain.graders.answers import last_boxed, last_number
from posttrain.graders.grading import Submission, is_blank

_THINKING = ("think", "reasoning")


def final_response(text: str) -> str | None:
    """What stands behind the last ``</think>`` or ``</reasoning>``; the whole text where nothing was thought.

    None where thinking begins and never ends: such a text was cut off, and what it mentions is no answer.
    """
    start = max((text.rfind(f"</{tag}>") + len(tag) + 3 for tag in _THINKING if f"</{tag}>" in text), default=0)
    rest = text[start:]
    return None if any(f"<{tag}>" in rest for tag in _THINKING) else rest


def tagged_response(text: str) -> str | None:
    """``final_response``, or what is between its first ``<answer>`` and the next ``</answer>`` where it has these tags.

    So a prompt template that asks for the tags does not count as part of the response; with nothing between them it
    is empty. Answer tags that are reversed, or of which one is missing, are text.
    """
    response = final_response(text)
    if response is None:
        return None
    inner = _between_tags(response)
    return response if inner is None else inner


def answer_region(submission: Submission) -> tuple[str, bool] | None:
    """The text in which the answer stands, and whether it is marked: nothing but the answer should be in it.

    Marked are the answer tags and the last box of the final response, and what the prompt template found by
    a rule of its own (its last number is no such rule: it may be any number of the explanation). Otherwise it is the
    whole final response. None where the thinking never ends or nothing was written.
    """
    response = final_response(submission.text)
    if response is None:
        return None
    marked = _between_tags(response) or last_boxed(response)
    if marked is None and submission.extracted is not None and submission.extracted != last_number(response):
        marked = submission.extracted
    if marked is not None:
        return marked, True
    return None if is_blank(response) else (response, False)


def _between_tags(response: str) -> str | None:
    """What is between the answer tags, "" where it is blank; None without complete tags."""
    _, opened, rest = response.partition("<answer>")
    inner, closed, _ = rest.partition("</answer>")
    answer = inner.rpartition("<answer>")[2].strip()
    if not (opened and closed):
        return None
    return "" if is_blank(answer) else answer
