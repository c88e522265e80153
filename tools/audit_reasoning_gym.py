"""Audit the scorers of the installed reasoning-gym: write the table that the task goes by, and the document about it.

For every data set: does its scorer evaluate text as code (read from its source), and what does it pay for answers that
answer nothing (found by scoring them on 40 questions)? A quarter of an hour on two cores; name data sets to try only
these and write nothing. The first part is also a test.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from reasoning_gym.factory import DATASETS

from posttrain.graders.scored import WorkerScorer
from posttrain.tasks.verifiable import reasoning_gym_probes
from posttrain.tasks.verifiable.reasoning_gym import sample_dataset
from posttrain.tasks.verifiable.reasoning_gym_probes import Asked, Payment, pays, probe

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "posttrain" / "tasks" / "verifiable" / "reasoning_gym_audit.py"
DOCUMENT = ROOT / "docs" / "reasoning_gym.md"
UNUSABLE = ("composite",)  # it is made of others, which no recipe can name
EVALUATORS = tuple(getattr(builtins, name) for name in ("eval", "exec", "compile", "__import__"))
SYMPY_EVALUATORS = frozenset(("parse_expr", "sympify", "parse_latex", "parse_mathematica", "S", "lambdify"))
MAX_SHOWN = 30
_INDENTED: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "    ", "break_on_hyphens": False}
Evaluated = Literal["answers", "questions"]


def evaluated_text(dataset: type) -> Evaluated | None:
    """Whether the scorer of a data set evaluates text as code: the answer, or only the question's own text."""
    scorer = dataset.score_answer  # type: ignore[attr-defined]
    seen = list(_evaluations(scorer, frozenset(("answer",)), dataset, set()))
    return None if not seen else "answers" if any(seen) else "questions"


def _evaluations(
    function: Callable[..., Any], tainted: frozenset[str], dataset: type, visited: set[tuple[str, frozenset[str]]]
) -> Iterator[bool]:
    """For each call of an evaluator below ``function``, whether its text depends on the ``tainted`` parameters."""
    key = (function.__module__ + "." + function.__qualname__, tainted)
    if key in visited:
        return
    visited.add(key)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = _spread(tree, tainted)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        target = _resolve(call.func, function, dataset)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if _evaluates(target):
            yield any(_mentions(argument, names) for argument in arguments)
        for inner, skipped in _functions(target, call.func):
            parameters = list(inspect.signature(inner).parameters)[skipped:]
            by_name = {keyword.arg: keyword.value for keyword in call.keywords}
            passed = {**dict(zip(parameters, call.args, strict=False)), **by_name}
            handed = frozenset(str(name) for name, value in passed.items() if _mentions(value, names))
            yield from _evaluations(inner, handed, dataset, visited)


def _evaluates(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return target in EVALUATORS or (module.startswith("sympy") and target.__name__ in SYMPY_EVALUATORS)


def _resolve(function: ast.expr, where: Callable[..., Any], dataset: type) -> Any:
    """The object that a call names, or None."""
    space = inspect.unwrap(where).__globals__
    if isinstance(function, ast.Name):
        return space.get(function.id, getattr(builtins, function.id, None))
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = dataset if function.value.id in ("self", "cls") else space.get(function.value.id)
        return getattr(owner, function.attr, None)
    return None


def _functions(target: Any, called: ast.expr) -> Iterator[tuple[Callable[..., Any], int]]:
    """The functions of reasoning-gym behind a call, and how many first parameters the call does not pass."""
    if not (getattr(target, "__module__", None) or "").startswith("reasoning_gym"):
        return
    if inspect.isclass(target):
        yield from ((member, 1) for member in vars(target).values() if inspect.isfunction(member))
    elif inspect.ismethod(target):
        yield target.__func__, 1
    elif inspect.isfunction(target):
        of_self = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"
        yield target, int(of_self and next(iter(inspect.signature(target).parameters), "") == "self")


def _spread(tree: ast.AST, tainted: frozenset[str]) -> frozenset[str]:
    """The names that depend on the tainted ones, through assignments and loops."""
    names = set(tainted)
    while True:
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                source, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
            elif isinstance(node, ast.For | ast.comprehension):
                source, targets = node.iter, [node.target]
            else:
                continue
            if source is not None and _mentions(source, frozenset(names)):
                names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if len(names) == before:
            return frozenset(names)


def _mentions(node: ast.AST, names: frozenset[str]) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def main(names: list[str]) -> int:
    evaluated = {name: evaluated_text(dataset) for name, (dataset, _) in sorted(DATASETS.items())}
    paid: dict[str, tuple[list[Payment], list[Asked]]] = {}
    for name in names or [name for name in evaluated if name not in UNUSABLE]:
        sample = [_permit(asked, compiles=evaluated[name] is not None) for asked in sample_dataset(name, {})]
        paid[name] = (probe(sample), sample)
        print(f"{name}: {paid[name][0][0]}", flush=True)
    if not names:
        TABLE.write_text(write_table(evaluated, {name: best[0] for name, (best, _) in paid.items()}), encoding="utf-8")
        DOCUMENT.write_text(write_document(evaluated, paid), encoding="utf-8")
    return 0


def _permit(asked: Asked, *, compiles: bool) -> Asked:
    """The question with a scorer that may evaluate text, whatever the table at hand says."""
    assert isinstance(asked.scorer, WorkerScorer)
    return replace(asked, scorer=replace(asked.scorer, limits=replace(asked.scorer.limits, compiles=compiles)))


def write_table(evaluated: dict[str, Evaluated | None], paid: dict[str, Payment]) -> str:
    """The module that the task imports."""
    lines = [
        '"""What tools/audit_reasoning_gym.py found out about the scorers of reasoning-gym; written by it."""', "",
        "from posttrain.tasks.verifiable.reasoning_gym_probes import Payment", "",
        f'VERSION = "{version("reasoning_gym")}"', "# The scorer evaluates the answer as code.",
        _write_names("EVALUATES_ANSWERS", [name for name, kind in evaluated.items() if kind == "answers"]),
        "# The scorer evaluates text that the data set wrote, and not the answer.",
        _write_names("EVALUATES_QUESTIONS", [name for name, kind in evaluated.items() if kind == "questions"]),
        "# No answer that answers nothing was paid for.",
        f"PAID = dict.fromkeys({_listed([name for name, best in sorted(paid.items()) if not best.rate])}",
        '), Payment("", "", 0.0))  # fmt: skip', "# Of the others the best of these answers.", "PAID |= {",
    ]  # fmt: skip
    lines += [
        f'    "{name}": Payment("{best.kind}", {json.dumps(_cut(best.pattern))}, {best.rate:.3f}, {best.score:.3f}),'
        for name, best in sorted(paid.items())
        if best.rate
    ]
    return "\n".join([*lines, "}", ""])


def _write_names(variable: str, names: list[str]) -> str:
    return f"{variable} = frozenset({_listed(names)}\n))  # fmt: skip"


def _listed(names: list[str]) -> str:
    """An opened tuple of names, as many as fit on a line."""
    return "(\n" + textwrap.fill(", ".join(json.dumps(name) for name in names), 119, **_INDENTED)


def _cut(pattern: str) -> str:
    return pattern if len(pattern) <= MAX_SHOWN else pattern[:MAX_SHOWN] + "..."


def majority(sample: Sequence[Asked]) -> float:
    """The share of the commonest gold answer: what an honest constant gets."""
    golds = Counter(one.gold for one in sample if one.gold is not None)
    return max(golds.values(), default=0) / len(sample)


def write_document(evaluated: dict[str, Evaluated | None], paid: dict[str, tuple[list[Payment], list[Asked]]]) -> str:
    """The results for all data sets as Markdown."""
    refused = [name for name, (best, _) in paid.items() if pays(best[0])]
    code = [name for name, kind in evaluated.items() if kind == "answers"]
    lines = [
        "# The data sets of reasoning-gym", "",
        f"Written by `python tools/audit_reasoning_gym.py` with reasoning-gym {version('reasoning_gym')}.", "",
        "The task `reasoning_gym` asks a data set's own scorer whether an answer is right, in worker processes with",
        "limits (`docs/grading.md`). Not every scorer can be trusted with what a model writes:", "",
        f"- {len(code)} **evaluate the answer as code** and are refused without `task.accept_code_scorer: true`:",
        f"  {', '.join(code)}.",
        "  Even then the code has limits, no environment and no folder, and it is no sandbox.",
        f"- {len(refused)} **call answers right that answer nothing** and are refused without",
        f"  `task.accept_exploitable: true`: {', '.join(refused)}.", "",
        f"On {reasoning_gym_probes.SAMPLE} questions of each data set constants, the copied question, listings of all",
        "gold answers and hedges (the gold answer beside another question's) are scored. *Right* is the share of",
        "questions on which the best of them gets the full score **where the gold answer says something else**: a data",
        "set of yes and no pays `yes` for half of its questions, and that is not counted. More than",
        f"{reasoning_gym_probes.MAX_RATE:.0%}",
        "is refused. *Commonest gold* is what the best honest constant gets. *Partial* is the most that an answer made",
        "without the gold answer gets on average of the reward `task_score`: where that is much, use `correct`. Blank",
        "answers are not in the table: they never reach a scorer.", "",
        "| data set | right | with | commonest gold | partial | evaluates |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, (payments, sample) in sorted(paid.items()):
        best = payments[0]
        partial = max(one.score for one in payments if one.kind != "hedge")
        shown = f"{best.kind} `{_cut(best.pattern)}`".replace("\n", "↵").replace("|", "\\|") if best.rate else ""
        mark = "**" if pays(best) else ""
        lines.append(
            f"| `{name}` | {mark}{best.rate:.0%}{mark} | {shown} | {majority(sample):.0%} | {partial:.2f} "
            f"| {evaluated[name] or ''} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
