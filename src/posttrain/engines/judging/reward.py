"""The reward that a judge gives: a language model reads the answer, by a rubric or beside another one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from posttrain.engines.judging.asking import KEY_VARIABLE, RUBRIC, Judge, LocalJudge, Opinion, RemoteJudge, rate
from posttrain.engines.judging.opinions import Opinions, check_failures, describe_bias, match
from posttrain.engines.models import ModelSource, OpenedModel, open_model
from posttrain.errors import RecipeError
from posttrain.graders.grading import Measured
from posttrain.recipes.document import parse_yaml, recipe_text
from posttrain.recipes.sections import Word
from posttrain.registry import find, register
from posttrain.store.rollouts import prompt_text
from posttrain.types import Example

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=256)]


@cache
def _open_local(model: str, template: str) -> OpenedModel:
    return open_model(ModelSource(model, model, model), Word(name=template))


def build_judge(
    url: str | None,
    model: str | None,
    template: str = "chat",
    structured: bool = True,
    temperature: float | None = 0.0,
    max_tokens: int = 1024,
    key_variable: str = KEY_VARIABLE,
    concurrency: int = 8,
    retries: int = 4,
    timeout_seconds: float = 120.0,
) -> Judge:
    """Who judges: with ``url`` a model behind a server, else ``model``, loaded here.

    Raises:
        RecipeError: neither is named.
        UsageError: the URL or the name of the key's variable is none.
    """
    if url is not None:
        return RemoteJudge(
            url, model, structured, temperature, max_tokens, key_variable, concurrency, retries, timeout_seconds
        )
    if model is None:
        raise RecipeError("judge: say who judges: url, where a server answers, or model, which is loaded here")
    return LocalJudge(model, lambda: _open_local(model, template), max_tokens)


@cache
def _opinions(folder: Path | None, *who: Any) -> Opinions:
    return Opinions(build_judge(*who), folder)


def prepare(*, scale: tuple[int, int] = (1, 10), **options: Any) -> None:
    """Find out whether the judge can be asked before anything is sampled.

    Raises:
        UsageError: it cannot.
    """
    if not scale[0] < scale[1] <= scale[0] + 100:
        raise RecipeError(f"judge.scale: {list(scale)}: the lowest score, then the highest, at most 100 above it")
    left = ("rubric", "pairwise", "known_answer", "max_failures")
    build_judge(**{name: value for name, value in options.items() if name not in left}).check()


@register("reward", batched=True, asks_a_model=True, prepare=prepare)
def judge(
    example: Sequence[Example],
    text: Sequence[str],
    folder: Sequence[Path | None],
    *,
    url: str | None = None,
    model: str | None = None,
    rubric: str = RUBRIC,
    scale: tuple[int, int] = (1, 10),
    pairwise: bool = False,
    known_answer: bool = True,
    template: str = "chat",
    structured: bool = True,
    temperature: Annotated[float, Field(ge=0)] | None = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] = 1024,
    key_variable: str = KEY_VARIABLE,
    concurrency: Count = 8,
    retries: Annotated[int, Field(ge=0, le=20)] = 4,
    timeout_seconds: Annotated[float, Field(gt=0)] = 120.0,
    max_failures: Share = 0.1,
) -> list[Measured]:
    """What a language model thinks of the answer, from 0 to 1.

    By a rubric ``r = (score − lowest) / (highest − lowest)``. With ``pairwise`` the answers to a prompt stand in a
    ring, each is compared with its two neighbours in both orders, and ``r`` is its mean worth there (1 better, ½ tie).
    An unjudged answer gets the mean of the others to its prompt; its outcome is ``timeout`` or ``crash`` where no gold
    answer decides that. ``judge_length``: the correlation of reward and length in the batch; docs/judges.md says more.

    Args:
        url: where a server answers that knows OpenAI's chat endpoint.
        model: its name there; without a url, a model that is loaded here.
        template: the prompt template of a model that is loaded here.
        rubric: by what is judged.
        scale: the lowest and the highest score of a rubric.
        known_answer: show the judge the gold answer where there is one (not with ``pairwise``).
        structured: send the schema of the reply along; false for servers that refuse it.
        temperature: of the judge; null leaves it to the server.
        max_tokens: of the judge's reply.
        key_variable: the environment variable with the server's key; its name ends with _API_KEY.
        concurrency: questions under way at a time.
        retries: how often a question is asked again, with growing pauses.
        timeout_seconds: how long one attempt may take.
        max_failures: the share of a batch that may go unjudged; above it the run ends.

    Source: LLM-as-a-judge (Zheng et al. 2023), both orders of a pair as in section 4; the wording is ours.

    Raises:
        UsageError: the judge cannot be asked. RunFailure: more of it failed than may.
    """
    who = (url, model, template, structured, temperature, max_tokens, key_variable, concurrency, retries)
    opinions = _opinions(folder[0], *who, timeout_seconds)
    groups = _groups(example)
    if pairwise:
        told = _compared(opinions, groups, example, text, rubric)
    else:
        golds = [one.answer if known_answer else None for one in example]
        asked = zip(example, text, golds, strict=True)
        told = opinions.ask([rate(prompt_text(e), t, rubric=rubric, scale=scale, gold=gold) for e, t, gold in asked])
    check_failures(told, max_failures, opinions.judge)
    return _measured(told, groups, text)


def _groups(examples: Sequence[Example]) -> list[range]:
    """The places of the answers to each prompt, which stand side by side."""
    starts = [i for i, one in enumerate(examples) if i == 0 or one.id != examples[i - 1].id]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(examples)], strict=True)]


def _compared(
    opinions: Opinions, groups: Sequence[range], examples: Sequence[Example], texts: Sequence[str], rubric: str
) -> list[Opinion]:
    """Each answer beside its neighbours in the ring of its group, as one opinion."""
    if any(len(group) < 2 for group in groups):
        raise RecipeError(
            "judge.pairwise: compares the answers to a prompt, and here is one; give rollout.group 2 or more"
        )
    rings = [(i, group[(k + 1) % len(group)]) for group in groups for k, i in enumerate(group)]
    rings = [pair for pair in rings if pair[0] < pair[1] or pair[::-1] not in rings]  # two answers meet once
    pairs = [(prompt_text(examples[i]), texts[i], texts[j]) for i, j in rings]
    of_answer: list[list[Opinion]] = [[] for _ in texts]
    for (i, j), one in zip(rings, match(opinions, pairs, rubric), strict=True):
        failed = next((order for order in one.orders if order.failure), Opinion(None))
        cost_in, cost_out = (sum(getattr(order, name) for order in one.orders) for name in ("tokens_in", "tokens_out"))
        cached = all(order.is_cached for order in one.orders)
        for place, value, paid in ((i, one.value, 1), (j, None if one.value is None else 1.0 - one.value, 0)):
            failure = failed.failure if value is None else None
            of_answer[place].append(Opinion(value, failure, failed.reason, paid * cost_in, paid * cost_out, cached))
    return [_mean(several) for several in of_answer]


def _mean(several: Sequence[Opinion]) -> Opinion:
    values = [one.value for one in several if one.value is not None]
    costs = sum(one.tokens_in for one in several), sum(one.tokens_out for one in several)
    if not values:
        return Opinion(None, several[0].failure, several[0].reason, *costs)
    return Opinion(statistics.fmean(values), None, "", *costs, all(one.is_cached for one in several))


def _measured(told: Sequence[Opinion], groups: Sequence[range], texts: Sequence[str]) -> list[Measured]:
    known = [one.value for one in told if one.value is not None]
    values = [0.0] * len(told)
    for group in groups:
        own = [value for i in group if (value := told[i].value) is not None]
        middle = statistics.fmean(own or known)
        for i in group:
            value = told[i].value
            values[i] = middle if value is None else value
    lengths = [float(len(text)) for text in texts]
    varies = len(set(values)) > 1 and len(set(lengths)) > 1
    drawn_by_length = statistics.correlation(values, lengths) if varies else 0.0
    return [
        Measured(
            value,
            {
                "judge_failed": float(one.value is None),
                "judge_tokens_in": float(one.tokens_in),
                "judge_tokens_out": float(one.tokens_out),
                "judge_cached": float(one.is_cached),
                "judge_length": drawn_by_length,
            },
            one.failure,
        )
        for one, value in zip(told, values, strict=True)
    ]


# A judge between two models: it compares their answers, and says what else it was drawn by.

SUFFIXES = (".yaml", ".yml")
# Keys of the reward that say how answers are judged; the others say who judges.
_HOW = ("rubric", "scale", "pairwise", "known_answer", "max_failures")


@dataclass(frozen=True)
class PairJudge:
    """A judge, by what it compares, and the share of opinions that may fail."""

    opinions: Opinions
    rubric: str
    max_failures: float

    def meet(self, meetings: Sequence[tuple[str, str, str]]) -> tuple[list[float], dict[str, float]]:
        """Of each ``(prompt, first, second)`` what the first is worth beside the second, and facts about the judge.

        A meeting that was not judged in either order decides nothing (one half). ``judge_failed``: the share of these.

        Raises:
            UsageError: the judge cannot be asked.
            RunFailure: too many of its opinions failed.
        """
        matches = match(self.opinions, meetings, self.rubric)
        check_failures([order for one in matches for order in one.orders], self.max_failures, self.opinions.judge)
        facts = describe_bias(meetings, matches)
        facts["judge_failed"] = statistics.fmean(float(one.value is None) for one in matches)
        facts["judge_tokens_in"] = float(self.opinions.tokens_in)
        facts["judge_tokens_out"] = float(self.opinions.tokens_out)
        return [0.5 if one.value is None else one.value for one in matches], facts


def read_pair_judge(path: str, folder: Path | None = None) -> PairJudge:
    """The judge of a file with the keys of the reward ``judge``; what it says is kept in ``folder``.

    Raises:
        UsageError: no file, a key or value that is none, or a judge that cannot be asked.
    """
    place, text = recipe_text(path)
    asked = find("reward", "judge").options(parse_yaml(text, place)[0], place)
    who = {name: value for name, value in asked.items() if name not in _HOW}
    judge = build_judge(**who)
    judge.check()
    return PairJudge(Opinions(judge, folder), asked["rubric"], asked["max_failures"])
