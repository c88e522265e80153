"""Custom data files containing prompts with answers, solutions, responses or conversations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from posttrain.data.base import Task
from posttrain.data.choices import (
    ChoiceColumns,
    FirstIndex,
    candidate_columns,
    choose_columns,
    describe_near_miss,
    has_options,
    last_question,
    with_choices,
)
from posttrain.data.columns import PROMPT, FormatText, PromptFormat, read_format, refuse_unknown
from posttrain.data.golds import golds_of
from posttrain.data.messages import (
    QUESTION_KEYS,
    REASONING_KEYS,
    add_system,
    read_instruction,
    read_messages,
    read_variables,
    refuse_two_replies,
)
from posttrain.data.reader import CollectedExamples, FileSplit, Share, collect_examples, reads_rows
from posttrain.data.reading import Row, is_only_space, read_file
from posttrain.data.render.rows import split_turns
from posttrain.data.render.templates import split_response
from posttrain.data.repeats import RepeatedPrompts, after_prompt, question_text
from posttrain.errors import UsageError
from posttrain.graders.answers import parse_quantity
from posttrain.graders.grading import Outcome, Submission, grade_submissions
from posttrain.option_types import shorten, shown_with_type
from posttrain.registry import find, register
from posttrain.types import Example, Message, Turn

# Other names of the parts in the common layouts: ShareGPT, Alpaca, prompts with completions.
ALIASES = {
    "messages": ("conversations", "conversation"),
    "prompt": ("instruction", *QUESTION_KEYS),
    "response": ("completion", "output"),
}
LABEL_KEYS = ("label", "labels", "kto_tag")  # in scored responses
ANY = "any_answer"  # grader for multiple accepted answers
# Reasons for dropping responses that were not graded ``right``.
OUTCOMES: dict[Outcome, str] = {
    "wrong": "incorrect answer",
    "no_answer": "no answer found",
    "ungraded": "nothing to grade against",
    "timeout": "grader timeout",
    "crash": "grader crash",
}
# Formulas: LaTeX commands, powers, symbols, equations, tuples, sets, intervals, sums with variables.
_FORMULA = re.compile(
    r"\\[A-Za-z]|[\^√π∞≤≥±∪∩]|\bsqrt\b|\b[a-z]\s*=|\A\s*[\[({][-+\w./ ]+(?:,[-+\w./ ]+)+[\])}]\s*\Z"
    r"|\b\d*[a-z]\s*[-+*/]\s*\d|\d\s*[-+*/]\s*\d*[a-z]\b"
)


@register("task", held_out="validation", splits_file=True)
@reads_rows
def jsonl(
    *,
    path: str,
    split: FileSplit = "train",
    prompt_key: str = "prompt",
    messages_key: str = "messages",
    answer_key: str = "answer",
    solution_key: str = "solution",
    response_key: str = "response",
    choices_key: str | None = None,
    first_index: FirstIndex | None = None,
    prompt_format: FormatText | None = None,
    meta: list[str] | None = None,
    ignore_keys: list[str] | None = None,
    grader: str | None = None,
    validation_share: Share = 0.05,
    test_share: Share = 0.1,
    correct_only: bool = False,
) -> Task:
    """Rows from ``.jsonl``, ``.json``, ``.csv`` or ``.parquet``, in the layouts of TRL, ShareGPT, Alpaca and verl.

    Rows contain a prompt or messages, plus either a gold answer (text or number), optionally with a solution, or a
    response to imitate: complete text, or a final assistant message, which may be a call. Rows with a response need
    no gold answer. Rows containing only ``text`` are raw text for ``prompt.template: document``. ``system`` and
    ``tools`` are added to the prompt, ``chat_template_kwargs`` are passed to the chat template. Messages may use
    tools (``tool_calls``, then one ``tool`` message per result) and ``reasoning_content``. Messages with
    ``weight: 0`` or ``train: false`` are not trained. The template formats responses. All other keys are kept in
    ``meta``, but unread keys that affect training are refused. Prompts repeated in responses are removed (texts only if
    all rows repeat them). Startup lines report this, and text missing from the prompt.

    Multiple choice is detected from a list of options (or one column per option) and a gold answer that is an index,
    letter, or option text in every row. Prompts then show lettered options, gold answers become letters, and the
    grader is ``multiple_choice``.

    Args:
        split: ``validation`` and ``test`` are selected by hashing the prompt through the first user message;
            ``train`` is the rest, ``all`` the complete file.
        prompt_key: text or messages; also ``instruction`` with ``input``, ``question``, ``problem``, ``query``.
            A conversation takes precedence.
        messages_key: key with the conversation; alternatively ``conversations`` or ``conversation``.
        answer_key: key with the gold answer, optionally preceded by a solution and ``####``; alternatively verl's
            ``reward_model.ground_truth``. Set to ``""`` for data without gold answers.
        solution_key: key with the worked solution, excluding the answer. Optional per row.
        response_key: key with the complete response; alternatively ``completion`` or ``output``.
        choices_key: key with multiple choice options, if ambiguous. ``""`` disables detection.
        first_index: index base of gold answers, if it cannot be inferred.
        grader: defaults to ``math`` if any gold answer is a formula, else ``numeric``, which compares words as text.
        correct_only: keep only demonstrations that are graded as correct. Dropped ones are counted.
    """
    if grader is not None:
        find("grader", grader, "task.grader")
    keys = {"prompt": prompt_key, "messages": messages_key, "answer": answer_key}
    keys |= {"solution": solution_key, "response": response_key}
    layout = Layout(keys, read_format(prompt_format), choices_key=choices_key, first_index=first_index)
    collected, layout = _collect(path, f"jsonl/{split}", layout, meta or (), ignore_keys or ())
    warnings = _settle_grader(collected, grader, layout)
    if correct_only:
        _keep_correct(collected, path)
    task = collected.as_task("jsonl", path, split, validation_share, by_opening=True, test_share=test_share)
    return replace(task, warnings=(*warnings, *task.warnings))


def _collect(
    path: str, name: str, layout: Layout, silenced: Sequence[str], ignored: Sequence[str]
) -> tuple[CollectedExamples, Layout]:
    """Read a file's examples, and detect the layout of its rows."""
    rows, layout = _with_choices(read_file(path), layout, frozenset((*silenced, *ignored)))
    if layout.first_index is not None and layout.choices is None:
        raise UsageError(f"task.first_index: rows in {path} are not multiple choice. Remove the option")
    collected = collect_examples(rows, layout.read, path, name=name, carries=True, ignored=ignored, silenced=silenced)
    refuse_unknown(silenced, (key for key, _ in collected.keys), path, "task.meta")
    collected.examples = layout.repeats.remove(collected.examples, collected.dropped)
    return collected, replace(layout, notes=(*layout.notes, *layout.repeats.describe()))


@dataclass(frozen=True, slots=True)
class Layout:
    """Converts rows to examples. ``keys`` maps parts to row keys."""

    keys: Mapping[str, str]
    prompt_format: PromptFormat | None = None
    choices: ChoiceColumns | None = None
    choices_key: str | None = None  # as given in the recipe
    first_index: FirstIndex | None = None
    question: str = PROMPT  # placeholder used by ``task.prompt_format``
    notes: tuple[str, ...] = ()
    repeats: RepeatedPrompts = field(default_factory=RepeatedPrompts)

    def read(self, row: Row) -> Example:
        """Convert a row to an example.

        Raises:
            DataError: missing key, wrong type, or empty value.
        """
        example = self._read(row)
        columns = _columns_read(row, self.keys)
        prompt = example.messages
        if self.prompt_format is not None or self.choices is not None:
            prompt = _unformatted(row, self.keys)
        answers = [key for key in (_key_of(row, "response", self.keys), self.keys["solution"]) if row.has(key)]
        self.repeats.count(question_text(prompt), answers, in_messages=_repeats_messages(row, self.keys))
        return replace(example, is_conversation=_is_conversation(row, self.keys), columns=columns)

    def _read(self, row: Row) -> Example:
        if self.choices is None:
            return read_example(row, self.keys, self.prompt_format)
        shows_options = self.names_any_of(self.choices.keys)
        options: dict[str, Sequence[str]] = {}
        if shows_options:
            options = {key: self.choices.options_of(row) for key in self.choices.keys}
        example = read_example(row, {**self.keys, "answer": ""}, self.prompt_format, options)
        return with_choices(example, self.choices, row, shows=shows_options)

    def names_any_of(self, columns: Sequence[str]) -> bool:
        """Check if ``task.prompt_format`` contains any of these columns."""
        return self.prompt_format is not None and not set(columns).isdisjoint(self.prompt_format.fields)

    def question_of(self, row: Row) -> str:
        """Build a row's question as shown in its prompt."""
        return last_question(_prompt_messages(replace(row, used=set()), self.keys, self.prompt_format))


def _with_choices(rows: Iterable[Row], layout: Layout, excluded: frozenset[str]) -> tuple[Iterable[Row], Layout]:
    """Detect multiple choice columns. Rows are held in memory only if needed for detection."""
    following = iter(rows)
    first = next(following, None)
    if first is None:
        return (), layout
    keys = {part: _key_of(first, part, layout.keys) for part in ("prompt", "messages", "solution", "response")}
    if first.has(keys["prompt"]) and not first.has(keys["messages"]):
        layout = replace(layout, question=keys["prompt"])
    excluded |= {*keys.values(), *ALIASES["response"], "system", "tools"}
    answer_key = layout.keys["answer"]
    if not _may_be_choice(first, layout, excluded):
        return chain((first,), following), layout
    kept = [first, *following]
    seen = kept
    if answer_key == "answer" and not first.has(answer_key) and all(map(_has_ground_truth, kept)):
        seen = [_with_ground_truth(row) for row in kept]
        answer_key = "ground_truth"
    candidates = candidate_columns(seen, answer_key, excluded, layout.choices_key, layout.first_index)
    if not candidates:
        return kept, replace(layout, notes=describe_near_miss(seen, answer_key, excluded))
    found = choose_columns(seen, candidates, layout.question_of, layout.first_index)
    are_texts = len(found.keys) > 1 and layout.names_any_of(found.keys)
    if are_texts and not found.is_shown:  # the format uses individual columns, without lettering
        return kept, layout
    return seen, replace(layout, choices=found)


def _may_be_choice(first: Row, layout: Layout, excluded: frozenset[str]) -> bool:
    """Check if a file may be multiple choice given its first row. Detection then loads all rows."""
    answer_key = layout.keys["answer"]
    if layout.choices_key == "" or not answer_key:
        return False
    has_response = first.has(_key_of(first, "response", layout.keys)) or _ends_with_reply(first, layout.keys)
    if has_response and not first.has(answer_key):  # needs no gold answer, so skip detection
        return False
    return layout.choices_key is not None or has_options(first, answer_key, excluded)


def _ends_with_reply(row: Row, keys: Mapping[str, str]) -> bool:
    """Check if the row is a conversation ending with an assistant message."""
    for part in ("messages", "prompt"):
        key = _key_of(row, part, keys)
        value = row.peek(key)
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):
            role = str(value[-1].get("role", value[-1].get("from")))
            if role in ("assistant", "gpt", "chatgpt"):
                return True
    return False


def _settle_grader(collected: CollectedExamples, grader: str | None, layout: Layout) -> tuple[str, ...]:
    """Set the grader for each example, and return startup lines about grader, choices and columns."""
    lines: tuple[str, ...] = ()
    if layout.choices is not None:
        chosen = grader or "multiple_choice"
        lines = (layout.choices.describe(),)
    elif grader is not None:
        chosen = grader
    else:
        chosen, lines = choose_grader(collected.examples)
    several = [example for example in collected.examples if example.grader == ANY]
    if several and grader not in (None, "math", ANY):
        raise UsageError(
            f"task.grader: {grader} supports a single gold answer, but {several[0].id} has "
            f"{len(several[0].meta['answers'])}. Unset it to use {ANY}, or keep one answer per row"
        )
    if several:
        how_many = f"{len(several):,} of {len(collected.examples):,} examples"
        lines += (f"task.grader: {ANY} for {how_many} with multiple accepted answers",)
    ids = {example.id for example in several}
    collected.examples = [
        example if example.id in ids else replace(example, grader=chosen) for example in collected.examples
    ]
    return (*lines, *layout.notes, *collected.unshown.describe(layout.question))


def _key_of(row: Row, part: str, keys: Mapping[str, str]) -> str:
    """Find a part's key in a row. Aliases apply only if the option was left at its default."""
    named = keys[part]
    others: Sequence[str] = ()
    if named == part and not row.has(named):
        others = ALIASES.get(part, ())
    if part == "response":  # ``output`` is a response only in Alpaca rows
        if row.has(_key_of(row, "messages", keys)):
            others = ()
        elif not row.has("instruction"):
            others = others[:1]
    return next((key for key in others if row.has(key)), named)


def choose_grader(examples: Sequence[Example]) -> tuple[str, tuple[str, ...]]:
    """Choose a grader that suits all gold answers, with a line explaining why (if there are any)."""
    golds = [(example.id, example.answer) for example in examples if example.answer is not None]
    not_numbers = [(name, gold) for name, gold in golds if parse_quantity(gold) is None]
    formulas = [(name, gold) for name, gold in not_numbers if _FORMULA.search(gold)]
    if formulas:
        name, first = formulas[0]
        how_many = f"{len(formulas):,} of {len(golds):,} gold answers are formulas"
        return "math", (f"task.grader: math, because {how_many}, such as {shorten(first)} ({name})",)
    if not golds:
        return "numeric", ()
    words = ""
    if not_numbers:
        words = f" or words ({len(not_numbers):,}, such as {shorten(not_numbers[0][1])})"
    return "numeric", (f"task.grader: numeric, because all {len(golds):,} gold answers are numbers{words}",)


def read_example(
    row: Row,
    keys: Mapping[str, str],
    prompt_format: PromptFormat | None = None,
    options: Mapping[str, Sequence[str]] | None = None,
) -> Example:
    """Convert a row to an example. ``keys`` are the key options, by part.

    ``prompt_format`` formats the question, with multiple choice ``options`` as lettered lines.

    Raises:
        DataError: missing key, wrong type, or empty value.
    """
    if prompt_format is None and _is_text_alone(row, keys):
        return Example("", (), answer=None, demonstration=row.text("text"), meta=row.meta())
    messages = add_system(row, _prompt_messages(row, keys, prompt_format, options))
    solution = row.text(keys["solution"]) if row.has(keys["solution"]) else None
    given: dict[str, str] = {}  # responses to imitate, by location
    response_key = _key_of(row, "response", keys)
    if row.has(response_key):
        if row.is_text(response_key):
            given[repr(response_key)] = _read_response(row, response_key)
        else:  # conversational completion
            messages = _with_reply(row, response_key, messages, _unformatted(row, keys))
    conversation: tuple[Message, ...] = ()
    turns: tuple[Turn, ...] = ()
    if messages[-1].role == "assistant":
        given[f"a final assistant message in {_conversation_key(row, keys)!r}"] = _reply_text(messages[-1])
        conversation = messages
        messages, turns = _before_reply(row, keys, messages)
    places = list(given)
    if solution is not None:
        places.insert(0, repr(keys["solution"]))
    if len(places) > 1:
        raise row.fail(f"got both {' and '.join(places)}; remove one, or ignore it with task.ignore_keys")
    demonstration = None
    if given:
        demonstration = given[places[0]]
        _refuse_reasoning(row)
        _refuse_judged(row, response_key)
    working, golds = _gold_answers(row, keys["answer"], needed=not given)
    if not places:
        solution = working or None
    meta = row.meta()
    grader = "numeric"
    if len(golds) > 1:
        meta["answers"] = golds
        grader = ANY
    return Example(
        "",
        messages,
        answer=next(iter(golds), None),
        solution=solution,
        demonstration=demonstration,
        turns=turns,
        conversation=conversation,
        variables=read_variables(row),
        meta=meta,
        grader=grader,
    )


def _with_reply(row: Row, key: str, messages: tuple[Message, ...], given: tuple[Message, ...]) -> tuple[Message, ...]:
    """Append a reply to the prompt, without its copy of the prompt. ``given``: the prompt as the row has it."""
    reply = read_messages(row, key, before=messages, ends_with_calls=True)
    found = after_prompt(row, key, given, reply)
    if found is None:
        return (*messages, *reply)
    system, rest = found
    return (*system, *messages, *rest)


def _repeats_messages(row: Row, keys: Mapping[str, str]) -> bool:
    """Check if the row's response is a message list that begins with its prompt."""
    key = _key_of(row, "response", keys)
    value = row.peek(key)
    if not isinstance(value, list):
        return False
    given = _unformatted(row, keys)
    reply = read_messages(replace(row, used=set()), key, before=given, ends_with_calls=True)
    return after_prompt(row, key, given, reply) is not None


def _columns_read(row: Row, keys: Mapping[str, str]) -> dict[str, Any]:
    """Original values of all keys read from the row, except the conversation."""
    excluded = {_key_of(row, part, keys) for part in ("prompt", "messages", "response")}
    return {key: row.as_written(row.data[key]) for key in row.data if key in row.used - excluded}


def _is_conversation(row: Row, keys: Mapping[str, str]) -> bool:
    """Check if the row's prompt consists of messages."""
    if row.has(_key_of(row, "messages", keys)):
        return True
    key = _key_of(row, "prompt", keys)
    return key in row.used and row.has(key) and not row.is_text(key)


def _read_response(row: Row, key: str) -> str:
    """Read a response, preceded by the row's reasoning if given separately."""
    thoughts = [name for name in REASONING_KEYS if row.has(name) and not is_only_space(str(row.data[name]))]
    reasoning = None
    if thoughts:
        reasoning = row.text(thoughts[0])
    return Message("assistant", row.text(key), reasoning).text


def _conversation_key(row: Row, keys: Mapping[str, str]) -> str:
    """Find the conversation's key: messages, or a prompt containing messages."""
    messages_key = _key_of(row, "messages", keys)
    if row.has(messages_key):
        return messages_key
    return _key_of(row, "prompt", keys)


def _before_reply(
    row: Row, keys: Mapping[str, str], messages: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Turn, ...]]:
    """Split off the final assistant message: return the prompt and preceding tool turns."""
    row.refuse_if(
        len(messages) == 1,
        f"{keys['messages']!r} contains only an assistant message; add a prompt before it",
    )
    refuse_two_replies(row, messages)
    return split_turns(messages[:-1])


def _reply_text(message: Message) -> str:
    """Format the final assistant message as text, with one line per call."""
    calls = [f"{call.tool} {call.raw_arguments}" for call in message.calls]
    return "\n".join([message.text, *calls]).lstrip()


def _refuse_reasoning(row: Row) -> None:
    """Refuse separate reasoning that was not read, because it belongs to a text response."""
    unread = next((key for key in REASONING_KEYS if row.has(key) and key not in row.used), None)
    row.refuse_if(
        unread is not None, f"the key {unread!r} applies only to text responses; move it into the last message"
    )


def _refuse_judged(row: Row, of_response: str) -> None:
    """Refuse labeled responses, since a scored response may be bad."""
    labels = [value for key, value in row.data.items() if key in LABEL_KEYS and value is not None]
    in_layout = of_response in ALIASES["response"] and (row.has("label") or row.has("labels"))
    row.refuse_if(
        in_layout or any(isinstance(label, bool) for label in labels),
        f"{of_response!r} has a label, so it is a scored response, not a demonstration; use task preferences (label)",
    )


def _gold_answers(row: Row, of_answer: str, *, needed: bool) -> tuple[str, list[str]]:
    """Split a gold answer into (solution, gold answers) at GSM8K's ``####``. The solution may be empty."""
    if of_answer == "answer" and not row.has(of_answer) and _has_ground_truth(row):
        row = _with_ground_truth(row)
        of_answer = "ground_truth"
    if not of_answer or not (needed or row.has(of_answer)):
        return "", []
    otherwise = 'task.answer_key, or set it to "" for data without answers; for complete responses, task.response_key'
    if row.has("chosen"):
        otherwise += "; for pairs, task preferences"
    row.need(of_answer, f". Set {otherwise}")
    golds = golds_of(row, of_answer)
    if len(golds) > 1:
        return "", golds
    (answer,) = golds
    before, _, behind = answer.rpartition("####")
    result = behind.partition("\n")[0].strip()
    if behind != answer and parse_quantity(result) is not None:  # may be within a line, or followed by other text
        return before.strip(), [result]
    if before.strip() and before.endswith("\n") and result:
        return before.strip(), [behind.strip()]
    return "", golds


def _is_text_alone(row: Row, keys: Mapping[str, str]) -> bool:
    """Check for rows of raw ``text``, without other parts and with default key options."""
    are_named = keys["prompt"] != "prompt" or keys["messages"] != "messages" or keys["answer"] not in ("answer", "")
    if are_named or not row.has("text"):
        return False
    others = {"label", "labels", "reward_model", *(_key_of(row, part, keys) for part in keys)}
    return not any(row.has(key) for key in others)


def _has_ground_truth(row: Row) -> bool:
    """Check for verl's layout, without marking the key as used."""
    for key, value in row.data.items():
        if key == "reward_model":
            return isinstance(value, Mapping | str) and "ground_truth" in value
    return False


def _with_ground_truth(row: Row) -> Row:
    """Copy ``ground_truth`` from verl's ``reward_model`` to the top level."""
    inside = row.nested("reward_model")
    row.refuse_if(not isinstance(inside, Mapping), f"'reward_model' must be an object; got {shown_with_type(inside)}")
    row.refuse_if(
        row.has("ground_truth"), "duplicate 'ground_truth', both top-level and in 'reward_model'; keep only one"
    )
    return replace(row, data={**row.data, "ground_truth": inside.get("ground_truth")})


def _prompt_messages(
    row: Row,
    keys: Mapping[str, str],
    prompt_format: PromptFormat | None,
    options: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Message, ...]:
    """Build a row's prompt. ``prompt_format`` rewrites the last user message, or the entire prompt if there are no
    messages.
    """
    if prompt_format is None:
        return _given_messages(row, keys)
    prompt_key = _key_of(row, "prompt", keys)
    has_messages = row.has(_key_of(row, "messages", keys))
    has_prompt = row.has(prompt_key)
    if not has_prompt and not has_messages:
        return (Message("user", prompt_format.fill(row, None, options)),)
    if has_messages or not row.is_text(prompt_key):
        return prompt_format.rewrite(row, _given_messages(row, keys), (prompt_key,), options)
    question = None
    if not {PROMPT, prompt_key}.intersection(prompt_format.fields):
        row.used.discard(prompt_key)  # not shown in the prompt
    elif PROMPT in prompt_format.fields and prompt_key != PROMPT:
        question = row.text(prompt_key)
    return (Message("user", prompt_format.fill(row, question, options)),)


def _unformatted(row: Row, keys: Mapping[str, str]) -> tuple[Message, ...]:
    """Read a row's prompt as given, without marking keys as used. Empty if ``task.prompt_format`` makes it from other
    columns.
    """
    if not any(row.has(_key_of(row, part, keys)) for part in ("prompt", "messages")):
        return ()
    unmarked = replace(row, used=set())
    return add_system(unmarked, _given_messages(unmarked, keys))


def _given_messages(row: Row, keys: Mapping[str, str]) -> tuple[Message, ...]:
    """Read a row's original conversation or prompt."""
    messages_key = _key_of(row, "messages", keys)
    prompt_key = _key_of(row, "prompt", keys)
    if row.has(messages_key):
        return read_messages(row, messages_key, ends_with_calls=True)
    if prompt_key == "instruction":
        return read_instruction(row)
    option = f"task.prompt_key (for conversations: task.messages_key, now {keys['messages']!r})"
    row.need(prompt_key, f". Set {option}")
    value = row.data[prompt_key]
    if isinstance(value, str):
        is_conversation = not row.is_text(prompt_key)
    else:
        is_list = isinstance(value, list) and bool(value)
        is_conversation = is_list and all(isinstance(one, Mapping) for one in value)
    if is_conversation:
        return read_messages(row, prompt_key, ends_with_calls=True)
    return (Message("user", row.text(prompt_key)),)


def _keep_correct(collected: CollectedExamples, place: str) -> None:
    """Grade demonstrations and keep only correct ones. Dropped examples are counted by outcome."""
    graded = [e for e in collected.examples if e.demonstration is not None and e.answer is not None]
    if not graded:
        raise UsageError(
            f"{place}: task.correct_only requires rows with both response and gold answer, but found none; set "
            "task.response_key and task.answer_key"
        )
    submissions = []
    for example in graded:
        text = example.demonstration or ""
        _, extracted = split_response(text)
        submissions.append(Submission(text, extracted, example.answer, example.meta))
    outcomes: list[Outcome] = ["ungraded"] * len(graded)
    for grader in dict.fromkeys(example.grader for example in graded):
        own = [number for number, example in enumerate(graded) if example.grader == grader]
        verdicts = grade_submissions(grader, [submissions[number] for number in own])
        for number, verdict in zip(own, verdicts, strict=True):
            outcomes[number] = verdict.outcome
    left_over = len(collected.examples) - len(graded)
    if left_over:
        collected.dropped["correct_only: missing response or gold answer"] += left_over
    collected.dropped.update(f"correct_only: {OUTCOMES[outcome]}" for outcome in outcomes if outcome != "right")
    collected.examples = [e for e, outcome in zip(graded, outcomes, strict=True) if outcome == "right"]
    collected.require_examples(place)
