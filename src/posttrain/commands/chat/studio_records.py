"""The studio's other pages: curves and recipes of runs, and the rollouts that they recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from posttrain.commands.chat.conversation import SpokenToken
from posttrain.commands.interpret.features import page_of
from posttrain.commands.interpret.steering import find_dictionary, has_dictionary
from posttrain.errors import PosttrainError, UsageError
from posttrain.evals.tables import TextTable
from posttrain.interpret.features.search import search_features
from posttrain.reports.charts import NUM_COLORS, Panel, Series
from posttrain.reports.page import draw, render
from posttrain.runs.directory import run_names
from posttrain.runs.models import read_run_recipe
from posttrain.store.metrics import MetricsLog
from posttrain.store.reading import read_text
from posttrain.store.rollouts import RecordedRollout, RolloutStore
from posttrain.types import Message
from posttrain.untrusted import fitting

# What the studio shows, as HTML (``templates/studio.jinja``); nothing in it runs a script.

PAGE = "studio.jinja"
Colouring = Literal["nothing", "probability", "entropy"]
COLOURINGS: tuple[Colouring, ...] = ("nothing", "probability", "entropy")


@cache
def stylesheet() -> str:
    """The reports' style, nested: it holds within the studio's pictures alone, and there before Gradio's."""
    return f".studio.studio {{ {render('style.css').replace(':root', '&')} & {{ color: var(--ink); }} }}"


def draw_conversation(messages: Sequence[Message], reply: str = "") -> str:
    """The turns so far as bubbles; ``reply`` is what ``draw_reply`` made of the last one."""
    return draw(PAGE, "conversation", messages, reply)


def draw_reply(tokens: Sequence[SpokenToken], colouring: Colouring, facts: str = "", opening: str = "") -> str:
    """A reply with a background for each token: red where the model was unsure, green where it was sure.

    ``opening``: the beginning that its template gave it (``<think>``).

    Resting the pointer on a token shows its probability, the entropy, and what else was likely there.
    """
    return draw(PAGE, "reply", [(t.text, _color(t, colouring), _note(t)) for t in tokens if t.text], facts, opening)


def _color(token: SpokenToken, colouring: Colouring) -> str:
    if colouring == "nothing":
        return ""
    sure = math.exp(token.logprob) if colouring == "probability" else math.exp(-token.entropy)
    return f"hsl({120 * sure:.0f} 70% 50% / {0.12 + 0.38 * (1 - sure):.2f})"


def _note(token: SpokenToken) -> str:
    likely = ", ".join(f"{text!r} {math.exp(logprob):.2f}" for text, logprob in token.likely)
    return f"probability {math.exp(token.logprob):.3f}, entropy {token.entropy:.2f} nats. Likely here: {likely}"


def draw_rollouts(groups: Sequence[Sequence[RecordedRollout]], text: str = "", note: str = "") -> str:
    """Each prompt with its samples side by side: reward and, in brackets, advantage; ``text`` is marked."""
    if not groups:
        return draw_note("no rollout fits; widen the filter")
    pattern = re.compile(f"({re.escape(text)})") if text else None
    firsts = [group[0] for group in groups]
    fit = fitting(
        [text for first in firsts for text in (first.example_id, first.prompt, first.answer or "")]
        + [one.transcript for group in groups for one in group]
    )
    return draw(
        PAGE, "rollouts", groups, fit, lambda shown: pattern.split(shown, MAX_MARKS) if pattern else [shown], note
    )


def draw_curves(curves: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]) -> str:
    """One picture for each metric with a line for each run: ``curves[metric][run]`` is (steps, values)."""
    panels = []
    for metric, by_run in curves.items():
        series = [Series(run, steps, values) for run, (steps, values) in by_run.items() if steps][:NUM_COLORS]
        if series:
            panels.append(Panel(metric, "", series))
    if not panels:
        return draw_note("choose runs and metrics")
    most = max(sum(bool(steps) for steps, _ in by_run.values()) for by_run in curves.values())
    note = f"the first {NUM_COLORS} of {most} runs are drawn" if most > NUM_COLORS else ""
    return draw(PAGE, "curves", panels, note)


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    return draw(PAGE, "table", TextTable("", list(head), [list(row) for row in rows], num_labels=len(head)))


def draw_problem(text: str) -> str:
    """What went wrong, in the place where it would have been shown."""
    return draw(PAGE, "problem", text)


def draw_note(text: str) -> str:
    """A line in grey: what could be done here."""
    return draw(PAGE, "note", text)


TRAINING = "training"
# What is drawn first where a run has it.
FAVOURITES = ("accuracy", "reward", "loss", "num_tokens", "entropy")
MAX_GROUPS = 40
MAX_HITS = 8 * MAX_GROUPS
MAX_MARKS = 200  # of one text


def check_offered(name: Any, offered: Sequence[str], kind: str) -> str:
    """The name, if the page offers it: a request is not bound to what a menu shows.

    Raises:
        UsageError: it does not.
    """
    if not isinstance(name, str) or name not in offered:
        raise UsageError(f"{name!r}: this page offers no {kind} of that name; start the studio with it")
    return name


class Archive:
    """The runs below one folder, as the pages show them. Nothing is written."""

    def __init__(self, runs_dir: str | Path) -> None:
        self.runs_dir = Path(runs_dir)

    def names(self) -> list[str]:
        """The runs by name, those first in which something was written last."""
        return sorted(run_names(self.runs_dir), key=lambda name: (-_last_written(self.runs_dir / name), name))

    def newest_with_rollouts(self) -> str | None:
        """The first of ``names`` that has rollouts to show."""
        return next((name for name in self.names() if self._has_rollouts(name)), None)

    def _has_rollouts(self, name: str) -> bool:
        try:
            return any(self.steps(name, kind) for kind in self.evaluations(name))
        except PosttrainError:  # none, or a file that cannot be read: said when it is chosen
            return False

    def folder(self, run: str) -> Path:
        """The directory of a run that is offered; a path to any other place is none.

        Raises:
            UsageError: no run of that name.
        """
        return self.runs_dir / check_offered(run, self.names(), "run")

    def metrics(self, runs: Sequence[str]) -> list[str]:
        """The metrics that any of the runs has."""
        names = {name for run in runs for row in self._log(run) for name in row.metrics}
        return sorted(names)

    def draw_curves(self, runs: Sequence[str], metrics: Sequence[str]) -> str:
        """A picture for each metric with a line for each run."""
        rows = {run: self._log(run) for run in runs}
        chosen = metrics or [name for name in FAVOURITES if name in self.metrics(runs)]
        curves = {
            metric: {
                run: (
                    [float(row.step) for row in own if metric in row.metrics],
                    [row.metrics[metric] for row in own if metric in row.metrics],
                )
                for run, own in rows.items()
            }
            for metric in chosen
        }
        return draw_curves(curves)

    def recipe_text(self, run: str) -> str:
        """The resolved recipe of a run, as it is stored."""
        return read_text(self.folder(run) / "recipe.yaml")

    def evaluations(self, run: str) -> list[str]:
        """What the rollouts of a run belong to: training, and its evaluations."""
        with self._store(run) as store:
            return [TRAINING, *dict.fromkeys(name for name, _ in store.count_evaluations())]

    def steps(self, run: str, kind: str) -> list[int]:
        """The steps of which there are rollouts."""
        with self._store(run) as store:
            if kind == TRAINING:
                return sorted(store.count_training())
            return sorted(step for name, step in store.count_evaluations() if name == kind)

    def draw_rollouts(
        self, run: str, kind: str, step: int | None, low: float | None, high: float | None, text: str
    ) -> str:
        """The prompts of which a sample fits the filter, each with all samples of its group side by side."""
        asked: dict[str, Any] = {"min_reward": low, "max_reward": high, "text": text or None}
        with self._store(run) as store:
            read = store.training if kind == TRAINING else lambda step, **rest: store.evaluations(kind, step, **rest)
            hits = read(step, **asked, limit=MAX_HITS, newest_first=step is None)
            wanted = list(dict.fromkeys(_group_of(hit) for hit in hits))
            more = len(wanted) > MAX_GROUPS or len(hits) == MAX_HITS
            note = "more prompts fit than are shown here; filter further to see the others" if more else ""
            wanted = wanted[:MAX_GROUPS]
            groups = [_whole(read(own), wanted) for own in sorted({key[0] for key in wanted}, reverse=True)]
        return draw_rollouts([group for of_step in groups for group in of_step], text, note)

    def _log(self, run: str) -> list[Any]:
        return list(MetricsLog(self.folder(run) / "metrics.jsonl").read())

    def _store(self, run: str) -> RolloutStore:
        path = self.folder(run) / "rollouts.db"
        if not path.is_file():
            raise UsageError(f"run {run!r} has no rollouts: it learnt from given data and was not evaluated by answers")
        return RolloutStore(path, read_only=True)


class Offers:
    """What the menus of the page offer now, and all that a request may ask for: runs that come later come in.

    Args:
        models, dictionaries: what the studio was started with, besides the runs.
    """

    def __init__(self, archive: Archive, models: Sequence[str], dictionaries: Sequence[str]) -> None:
        self.archive = archive
        self.models = models
        self.named_dictionaries = dictionaries
        self._trains_scorer: dict[tuple[str, int], bool | None] = {}  # by run and the time of its recipe

    def speakers(self) -> list[str]:
        """Models that write answers."""
        return list(dict.fromkeys([*self.models, *self._runs(False), "tiny"]))

    def judges(self) -> list[str]:
        """Runs that trained a reward model."""
        return self._runs(True)

    def dictionaries(self) -> list[str]:
        """Dictionaries of features, those of runs included."""
        known = [name for name in self.archive.names() if has_dictionary(self.archive.runs_dir / name)]
        return list(dict.fromkeys([*self.named_dictionaries, *known]))

    def _runs(self, trains_scorer: bool) -> list[str]:
        return [name for name in self.archive.names() if self._kind(name) is trains_scorer]

    def _kind(self, name: str) -> bool | None:
        """Whether a run trained a reward model; None where its recipe cannot be read."""
        folder = self.archive.runs_dir / name
        key = (name, _time_of(folder / "recipe.yaml"))
        if key not in self._trains_scorer:
            try:
                self._trains_scorer[key] = read_run_recipe(folder).trains_scorer
            except PosttrainError:
                self._trains_scorer[key] = None
        return self._trains_scorer[key]


def draw_found_features(dictionary: str, query: str, runs_dir: str | Path) -> str:
    """A table of the features that fit a query, out of what `posttrain sae features` wrote of the dictionary.

    Raises:
        UsageError: there is no such dictionary, or nothing was written of it yet.
    """
    if not dictionary or not query.strip():
        return draw_note("choose a dictionary, and type what its features are to be found by")
    page = page_of(find_dictionary(dictionary, runs_dir))
    if not page.with_suffix(".json").is_file():
        raise UsageError(f"no features were read of it yet; make them with: posttrain sae features {dictionary}")
    hits, count = search_features(page.with_suffix(".json"), query)
    if not hits:
        return draw_note("no feature fits")
    head = ["feature", "promotes", "strongest context", "active on", "largest"]
    rows = [[str(x.number), " ".join(x.speaks_for), x.context, f"{x.density:.2%}", f"{x.largest:.3g}"] for x in hits]
    first = hits[0]
    note = f"{len(hits)} of {count} that fit. To try one: {first.number}={first.largest:.3g}, or {first.number}=off. "
    return draw_note(f"{note}All of it: {page}#feature-{first.number}") + draw_table(head, rows)


def _last_written(folder: Path) -> int:
    return max(_time_of(folder / name) for name in ("metrics.jsonl", "recipe.yaml"))


def _time_of(path: Path) -> int:
    """In nanoseconds since 1970; 0 where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _group_of(rollout: RecordedRollout) -> tuple[int, int, int]:
    return rollout.step, rollout.epoch, rollout.prompt_index


def _whole(rows: Sequence[RecordedRollout], wanted: Sequence[tuple[int, int, int]]) -> list[list[RecordedRollout]]:
    """Of the rows of one step, the wanted groups with all of their samples."""
    kept = sorted((row for row in rows if _group_of(row) in wanted), key=lambda r: (_group_of(r), r.rollout_index))
    return [list(group) for _, group in groupby(kept, key=_group_of)]
