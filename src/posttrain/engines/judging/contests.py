"""A judge between two models: it compares their answers, and says what else it was drawn by."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.engines.judging.opinions import Opinions, check_failures, describe_bias, match
from posttrain.engines.judging.reward import build_judge
from posttrain.recipes.document import parse_yaml, recipe_text
from posttrain.registry import find

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
