"""Given answers with their worth, from any file: pairs, judged answers, solutions with labelled steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.errors import DataError, UsageError
from posttrain.registry import register, suggest
from posttrain.tasks.base import Task
from posttrain.tasks.preference_rows import Dropped, read_pair, read_prompt, read_text, score_keys
from posttrain.tasks.reading import Row, read_file
from posttrain.tasks.splits import Split, choose_split
from posttrain.types import Example, Message, Response

Layout = Literal["pair", "judged", "steps"]
# What a row of each layout has beside the prompt.
LAYOUTS: dict[Layout, tuple[str, str]] = {
    "pair": ("chosen", "rejected"),
    "judged": ("completion", "label"),
    "steps": ("completions", "labels"),
}
Parts = tuple[tuple[Message, ...], tuple[Response, ...]]


@register("task", held_out="validation")
def preferences(
    *,
    path: str,
    split: Split = "train",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    num_classes: Literal[2, 3] = 2,
    neutral: Literal["good", "bad"] | None = None,
    step_separator: str = "\n",
) -> Task:
    """Rows of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file in one of three layouts, told by the first row's keys.

    Pairs: ``prompt``, ``chosen``, ``rejected``; each is text or a list of messages. Conversations that share
    their first turns need no prompt: those turns are the prompt. Scores may come with them
    (``score_chosen`` and ``score_rejected``, or ``chosen_score``, ``chosen_rating``, ``rating_chosen``): if the first
    row has them, every row must, and their difference is the pair's margin. Without scores, chosen has 1
    and rejected 0.

    Judged answers (KTO): ``prompt``, ``completion``, ``label`` (true or 1: desirable; false or 0: not).

    Steps: ``prompt``, ``completions`` (a list of steps) and ``labels`` (one for each). With two classes true and 1
    are good (class 1), false and 0 are bad (class 0). With three, −1 is negative (class 0), 0 neutral (class 1) and
    1 positive (class 2); true and false are then the outer two.

    A row with a part that is missing or blank, or that could teach nothing, is dropped and counted by its reason.

    Args:
        path: the file.
        split: ``validation`` is a part of the prompts chosen by a hash, and ``train`` is the rest, so that all
            rows of a prompt stand on one side; ``test`` is the whole file.
        validation_share: share of the prompts that is held out.
        num_classes: of steps; the same as that of the objective ``process``.
        neutral: reads labels −1, 0, 1 as two classes: 1 is good, −1 is bad, and 0 is what is said here.
        step_separator: stands between two steps.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        UsageError: ``neutral`` with three classes.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    classes = step_classes(num_classes, neutral)
    read: Callable[[Row], Parts] | None = None
    for row in read_file(path):
        if read is None:
            read = choose_reader(row, classes, step_separator)
        try:
            messages, responses = read(row)
        except Dropped as reason:
            dropped[str(reason)] += 1
        else:
            examples.append(Example(f"preferences/{split}/{row.line}", messages, responses=responses))
    if not examples and dropped:
        raise DataError(path, f"no row can be used: {', '.join(f'{n} × {reason}' for reason, n in dropped.items())}")
    return Task("preferences", split, choose_split(examples, split, validation_share, path), dict(dropped))


def choose_reader(first: Row, classes: dict[int, int], separator: str) -> Callable[[Row], Parts]:
    """What reads all rows of a file that begins with ``first``."""
    layout, scores = detect_layout(first), score_keys(first)

    def read(row: Row) -> Parts:
        if not any(key in row.data for key in LAYOUTS[layout]):
            raise Dropped("a row of another layout than the first")
        if layout == "pair":
            return read_pair(row, scores=scores)
        return read_judged(row) if layout == "judged" else read_steps(row, classes=classes, separator=separator)

    return read


def detect_layout(row: Row) -> Layout:
    """The layout whose keys the row has.

    Raises:
        DataError: none, or more than one.
    """
    found = [layout for layout, keys in LAYOUTS.items() if all(key in row.data for key in keys)]
    if len(found) == 1:
        return found[0]
    wanted = "; ".join(f"{', '.join(('prompt', *keys))}" for keys in LAYOUTS.values())
    known = {"prompt"} | {key for keys in LAYOUTS.values() for key in keys}
    near = next((hint for key in row.data if key not in known and (hint := suggest(key, known))), "")
    what = "of no known layout" if not found else f"of more than one layout ({', '.join(found)})"
    raise row.fail(f"the row is {what}. It has the keys {', '.join(row.data) or 'none'}.{near} Known layouts: {wanted}")


def read_judged(row: Row) -> Parts:
    """A prompt with one answer that is desirable or not."""
    messages = read_prompt(row)
    text = read_text(row, "completion")
    if not row.has("label"):
        raise Dropped("'label' is missing")
    label = row.data["label"]
    if label not in (0, 1):  # True and False are 1 and 0
        raise row.fail(f"'label' must be true, false, 1 or 0; got {label!r}")
    return messages, (Response(text, float(label)),)


def step_classes(num_classes: int, neutral: str | None) -> dict[int, int]:
    """From a number in the file to a class."""
    if num_classes == 3:
        if neutral is not None:
            raise UsageError("task preferences: neutral says what 0 is of two classes; with num_classes 3 leave it out")
        return {-1: 0, 0: 1, 1: 2}
    return {0: 0, 1: 1} if neutral is None else {-1: 0, 0: int(neutral == "good"), 1: 1}


def read_steps(row: Row, *, classes: dict[int, int], separator: str) -> Parts:
    """A prompt with one solution in steps, each with its class. The score is 1 where no step is in the lowest class."""
    messages = read_prompt(row)
    steps, labels = (_read_list(row, key) for key in LAYOUTS["steps"])
    if len(steps) != len(labels):
        raise row.fail(f"{len(steps)} 'completions' and {len(labels)} 'labels'; each step has one label")
    texts: list[str] = []
    found: list[int] = []
    for number, (step, label) in enumerate(zip(steps, labels, strict=True), start=1):
        if step is None or (isinstance(step, str) and not step.strip()):
            raise Dropped("a blank step")
        if label is None:
            raise Dropped("a step without a label")
        texts.append((separator if texts else "") + row.checked(step, f"completions {number}"))
        found.append(_class_of(row, label, number, classes))
    return messages, (Response("".join(texts), float(min(found) > 0), tuple(texts), tuple(found)),)


def _class_of(row: Row, label: Any, number: int, classes: dict[int, int]) -> int:
    if isinstance(label, bool):
        return classes[1] if label else min(classes.values())
    if isinstance(label, int | float) and label in classes:
        return classes[int(label)]
    hint = ""
    if label == -1:
        hint = (
            ". For −1, 0 and 1 set task.num_classes to 3 (and objective.num_classes), or say by task.neutral what 0 is"
        )
    raise row.fail(f"'labels' {number} must be true, false or one of {sorted(classes)}; got {label!r}{hint}")


def _read_list(row: Row, key: str) -> Sequence[Any]:
    if not row.has(key):
        raise Dropped(f"{key!r} is missing")
    value = row.data[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise row.fail(f"{key!r} must be a list; got {value!r}"[:200])
    if not value:
        raise Dropped(f"{key!r} is empty")
    return value
