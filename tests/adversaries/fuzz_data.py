"""Data files that are none, for every task that reads one."""

from __future__ import annotations

import json
from functools import cache, partial
from random import Random
from typing import Any

from fuzz_case import FIFO, FOLDER, SFT, Case, dump, merged

from posttrain import registry

PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3", "score_chosen": 8.5, "score_rejected": 4}
PROBLEM = {"problem": "What is 1+1?", "answer": "2", "solution": "It is \\boxed{2}."}
TALK = "\n\nHuman: {}\n\nAssistant: {}"
STEPS = {
    "question": {"problem": "What is 1+1?"},
    "label": {"steps": [{"completions": [{"text": "It is 2.", "rating": 1}], "chosen_completion": 0}]},
}
# A good row of each task that reads a file, with the keys that it must have. A new task is entered here.
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "aime24": (PROBLEM, ("problem", "answer")),
    "aime25": (PROBLEM, ("problem", "answer")),
    "amc": (PROBLEM, ("problem", "answer")),
    "gsm8k": ({"question": "1+1?", "answer": "1+1=2\n#### 2"}, ("question", "answer")),
    "hh_rlhf": ({"chosen": TALK.format("a", "b"), "rejected": TALK.format("a", "c")}, ("chosen", "rejected")),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def double(n):\n    """Twice n."""\n',
            "entry_point": "double",
            "canonical_solution": "    return 2 * n\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        },
        ("prompt", "entry_point", "test"),
    ),
    "jsonl": ({"prompt": "1+1?", "answer": "2"}, ("prompt", "answer")),
    "judged_solutions": ({"question": "1+1?", "response": "It is 2.", "is_correct": True}, ("question", "response")),
    "math": (PROBLEM | {"level": "Level 1", "type": "Algebra"}, ("problem", "level")),
    "math500": (PROBLEM | {"level": 1, "subject": "Algebra"}, ("problem", "level")),
    "math_shepherd": (
        {"input": "1+1? Step 1: It is 2. ки", "label": "1+1? Step 1: It is 2. +", "task": "GSM8K"},
        ("input", "label"),
    ),
    "mbpp": (
        {
            "task_id": 11,
            "prompt": "Write a function that doubles.",
            "code": "def double(n):\n    return 2 * n",
            "test_imports": [],
            "test_list": ["assert double(2) == 4", "assert double(-1) == -2"],
        },
        ("task_id", "prompt", "code", "test_list"),
    ),
    "minerva_math": (PROBLEM, ("problem", "answer")),
    "mmlu": (
        {"subject": "anatomy", "question": "Which?", "choices": ["a", "b"], "answer": 1},
        ("subject", "question", "choices", "answer"),
    ),
    "olympiad_bench": (PROBLEM, ("problem", "answer")),
    "preferences": (PAIR, ("prompt", "chosen", "rejected")),
    "prm800k": (STEPS, ("question", "label")),
    "refusals": ({"prompt": "How do I knit?", "kind": "benign"}, ("prompt", "kind")),
    "svamp": (
        {"Body": "Ann has 1 and gets 1.", "Question": "How many?", "Answer": 2, "Type": "Addition"},
        ("Body", "Question", "Answer", "Type"),
    ),
    "ultrafeedback": (PAIR, ("prompt", "chosen", "rejected", "score_chosen")),
}
WHOLE = {"split": "all"}  # of a file of one's own, which has a test part
NEEDS = {"split": "test"}
WRONG_VALUES: tuple[Any, ...] = ([], {}, [[1]], {"a": 1}, True, float("nan"), float("inf"), "\ud800", [None])


def path_tasks() -> dict[str, Any]:
    """The registered tasks that read a file of rows."""
    return {
        name: entry for name, entry in registry.entries("task").items() if "path" in entry.options_model.model_fields
    }


@cache
def options_of(task: str) -> tuple[str, ...]:
    return tuple(registry.entries("task")[task].options_model.model_fields)


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def damaged(row: dict[str, Any]) -> list[tuple[str, str, bytes | str]]:
    """(what, name of the file, contents)."""
    good = lines(row, row)
    return [
        ("empty", "rows.jsonl", b""),
        ("null", "rows.jsonl", b"null\n"),
        ("an empty object", "rows.jsonl", b"{}\n"),
        ("other keys", "rows.jsonl", b'{"nonsense": 1}\n'),
        ("cut off", "rows.jsonl", good + lines(row)[:-9]),
        ("a JSON list over lines", "rows.jsonl", json.dumps([row, row], indent=1).encode()),
        ("bad UTF-8", "rows.jsonl", good + b'{"prompt": "\xff\xfe"}\n'),
        ("not gzip", "rows.jsonl.gz", good),
        ("not parquet", "rows.parquet", good),
        ("a folder", "rows.jsonl", FOLDER),
        ("a pipe", "rows.jsonl", FIFO),
        ("nothing", "nowhere.jsonl", ""),
    ]


def data_cases(random: Random) -> list[Case]:
    """Every task that reads a file, with files that cannot be read and rows that cannot be used."""
    cases = []
    for task in path_tasks():
        row, keys = ROWS[task]
        for what, name, content in damaged(row):
            files = {name: content} if content != "" else {}
            cases.append(_ask(random, f"data: {what}", task, name, files))
        for key in keys:
            for value in WRONG_VALUES:
                content = lines(row | {key: value})
                cases.append(_ask(random, "data: wrong value", task, "rows.jsonl", {"rows.jsonl": content}))
            content = lines({k: v for k, v in row.items() if k != key})
            if (task, key) not in OPTIONAL:
                cases.append(_ask(random, "data: key missing", task, "rows.jsonl", {"rows.jsonl": content}))
    return cases


OPTIONAL = {
    ("math", "level"),
    ("math500", "level"),
    ("aime24", "answer"),
    ("aime25", "answer"),
    ("amc", "answer"),
    ("minerva_math", "answer"),
    ("olympiad_bench", "answer"),
    ("svamp", "Type"),
    ("ultrafeedback", "score_chosen"),
    ("preferences", "prompt"),
    ("ultrafeedback", "prompt"),
}


def _ask(random: Random, kind: str, task: str, name: str, files: dict[str, Any]) -> Case:
    fields = options_of(task)
    wanted = WHOLE if task in ("jsonl", "preferences") else NEEDS
    own = {key: value for key, value in wanted.items() if key in fields}
    words = tuple(f"--task.{key}={value}" for key, value in own.items())
    recipe = merged(SFT, {"task": None}) | {"task": {"name": task, "path": name, **own}}
    ways: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("data", "show", task, f"--task.path={name}", *words), {}),
        (("evaluate", "tiny", "--task", task, f"--task.path={name}", *words, "--limit", "2", "--quiet"), {}),
        (("train", "mine.yaml", "--quiet"), {"mine.yaml": partial(dump, recipe)}),
    ]
    way, more = random.choice(ways[:2] if random.random() < 0.8 else ways)
    return Case(kind, way, (name[:60],), {**files, **more})


def good_data_cases(random: Random) -> list[Case]:
    """Good rows of every task, also with what editors add: they are read."""
    cases = []
    for task in path_tasks():
        row, _ = ROWS[task]
        for content in (
            lines(row, row),
            b"\xef\xbb\xbf" + lines(row),
            lines(row, row).replace(b"\n", b"\r\n"),
            b"\n" + lines(row) + b"\n\n",
        ):
            case = _ask(Random(0), "good data", task, "rows.jsonl", {"rows.jsonl": content})
            words = (
                ("data", "show", *case.words[2:])
                if case.words[0] == "data"
                else ("data", "show", task, *case.words[4:-3])
            )
            cases.append(Case("good data", words, (), {"rows.jsonl": content}, good=True))
    return cases
