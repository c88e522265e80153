"""Text that would steer a terminal, and files of a stranger that are full of it."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import yaml

# Between letters, so that what passed on its own can be told from what rich wrote.
CONTROLS = [
    "\x1b]52;c;AAAA\x07", "\x1b[2J", "\x1b[8m", "\x1b]8;;http://evil.example\x1b\\", "\x9b2J", "\x9d0;x\x9c", "\r",
    "\x08\x08", "\x7f", "\x0b", "\x0c", "\x85", "\u202e", "\u2066", "\u200b", "\u2028", "\ufeff", "\U000e0041",
]  # fmt: skip
HOSTILE = "q" + "q".join(CONTROLS) + "q[red]q[/red][link=file:///etc]q[/link][/]q:smile:"
SEEN = "\\x1b[2J"  # how it is shown
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
# What rich itself writes: colours (never hidden ones, never links), and the steps of a live display.
OWN = re.compile(r"\x1b\[(?!8m)[0-9;]*m|\r?\x1b\[2K|\r?\x1b\[1A|\x1b\[\?25[lh]|\r(?=\x1b\[)|\r(?=\n)")

RECIPE: dict[str, Any] = {
    "description": "one step",
    "model": {"name": "tiny"},
    "task": {"name": "stories", "size": 16, "max_steps": 1},
    "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
    "rewards": ["correct"],
    "rollout": {"num_prompts": 2, "group_size": 2, "max_tokens": 4},
    "objective": "grpo",
    "train": {"steps": 1},
    "eval": {"every": 1, "num_examples": 2},
}


def leaks(shown: str, *, in_terminal: bool = False) -> list[str]:
    """The raw characters that a command let through, each with its surroundings."""
    text = OWN.sub("", shown) if in_terminal else shown
    return [ascii(text[max(0, m.start() - 30) : m.end() + 30]) for m in RAW.finditer(text)]


def poison(value: Any, *, keep: tuple[str, ...] = ()) -> Any:
    """Plain data with the hostile text behind every string and, in mappings, under a key of its own."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, list):
        return [poison(item, keep=keep) for item in value]
    if isinstance(value, dict):
        return {key: item if key in keep else poison(item, keep=keep) for key, item in value.items()}
    return value


def poison_json(path: Path, *, keep: tuple[str, ...] = (), **more: Any) -> None:
    """The same for every line of a file of JSON."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = [json.dumps(poison(json.loads(line), keep=keep) | more) for line in text.splitlines()]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(poison(json.loads(text), keep=keep) | more, ensure_ascii=False), encoding="utf-8")


def poison_database(path: Path) -> None:
    """Every text of the rollouts; what is JSON gets a hostile name in it."""
    with sqlite3.connect(path) as database:
        for table, extra in (("rollouts", ""), ("evaluation_rollouts", ", evaluation = evaluation || ?")):
            parts = json.dumps({HOSTILE: 1.0, "correct": 1.0})
            values = [HOSTILE] * 6 + [parts] + ([HOSTILE] if extra else [])
            database.execute(
                f"UPDATE {table} SET example_id = example_id || ?, prompt = prompt || ?, completion = ?, answer = ?, "
                f"extracted = ?, finish = finish || ?, parts = ?{extra}",
                values,
            )
    database.close()


def poison_run(honest: Path, target: Path) -> Path:
    """A copy of a run that a stranger could have made: it reads well, and every text in it is hostile."""
    shutil.copytree(honest, target, symlinks=True)
    poison_json(
        target / "status.json", keep=("state", "host", "primary_metric", "held_out"), message=HOSTILE, state="failed"
    )
    poison_json(target / "env.json", keep=("created", "started"))
    poison_json(target / "results.json", keep=("state", "host", "objective"))
    recipe = yaml.safe_load((target / "recipe.yaml").read_text(encoding="utf-8"))
    recipe |= {"description": HOSTILE}
    recipe["prompt"]["template"]["preamble"] = HOSTILE
    recipe["model"]["name"] = str(honest / "checkpoints" / HOSTILE)
    (target / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    metrics = [json.loads(line) for line in (target / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in metrics:
        for part in row.values():
            if isinstance(part, dict):
                part[HOSTILE] = 1.0
    (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
    (target / "log.txt").write_text(HOSTILE, encoding="utf-8")
    poison_database(target / "rollouts.db")
    for state in target.glob("checkpoints/*/state.json"):
        poison_json(state)
    return target


def break_run(honest: Path, target: Path) -> Path:
    """A copy of a run of which nothing can be read, so that the errors quote it."""
    shutil.copytree(honest, target, symlinks=True)
    for name in ("status.json", "env.json", "results.json", "metrics.jsonl"):
        (target / name).write_text(json.dumps({HOSTILE: HOSTILE, "state": HOSTILE}), encoding="utf-8")
    recipe = {"task": {"name": HOSTILE}, HOSTILE: {HOSTILE: HOSTILE}, "objective": HOSTILE}
    (target / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    (target / "rollouts.db").unlink()
    return target


def write_recipes(folder: Path) -> list[str]:
    """Recipes that are refused, each for another reason, with hostile words in the reason."""
    recipes: dict[str, Any] = {
        "key": RECIPE | {HOSTILE: 1},
        "inner_key": RECIPE | {"train": {"steps": 1, HOSTILE: 1}},
        "value": RECIPE | {"train": {"steps": HOSTILE}},
        "word": RECIPE | {"objective": HOSTILE},
        "option": RECIPE | {"objective": {"name": "grpo", HOSTILE: 2}},
        "task": RECIPE | {"task": {"name": HOSTILE}},
        "reward": RECIPE | {"rewards": [HOSTILE]},
        "template": RECIPE | {"prompt": {"template": {"name": HOSTILE}}},
        "model": RECIPE | {"model": {"name": HOSTILE}},
        "extends": RECIPE | {"extends": HOSTILE},
        "module": RECIPE | {"objective": f"{HOSTILE}:{HOSTILE}"},
        "sweep": {"start": HOSTILE, "base": RECIPE | {"description": HOSTILE}, "rows": {HOSTILE: HOSTILE}},
        "dictionary": {"activations": {"folder": HOSTILE, HOSTILE: 1}, "dictionary": HOSTILE},
        "list": [HOSTILE],
    }
    for name, content in recipes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    (folder / "raw.yaml").write_text(f"train: {{steps: 1}}\n{HOSTILE}: 2\n", encoding="utf-8")
    (folder / "syntax.yaml").write_text(f'train: {{steps: "{HOSTILE.replace(chr(0x1B), " ")}\n', encoding="utf-8")
    (folder / "c1.yaml").write_text("train: {steps: 1}\n\u202etask: \u200b[\n", encoding="utf-8")
    return sorted(f"{name}.yaml" for name in (*recipes, "raw", "syntax", "c1"))
