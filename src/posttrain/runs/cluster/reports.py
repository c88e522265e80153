"""What the loop tells an observer, from the rank 0 that runs it to the process that started the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from posttrain.recipes.recipe import Recipe
from posttrain.store.headline import Headline
from posttrain.train.files import Observer

if TYPE_CHECKING:
    from posttrain.train.distributed import Meeting


def reporting(meeting: Meeting) -> Observer:
    """Rank 0's observer: what it is told is left in the meeting's store."""

    def report(event: str, facts: Mapping[str, Any]) -> None:
        plain = {key: value for key, value in facts.items() if key != "recipe"}
        if plain.get("headline") is not None:
            plain["headline"] = asdict(plain["headline"])
        meeting.report(event, plain)

    return report


class Reading:
    """The other side: ``read`` passes on what is there, as the loop's own events.

    ``started``: whether training has begun. ``result``: how it ended (``TrainResult``'s fields), once it has.
    """

    def __init__(self, meeting: Meeting, recipe: Recipe, observer: Observer) -> None:
        self._meeting, self._recipe, self._observer = meeting, recipe, observer
        self.started = False
        self.result: dict[str, Any] | None = None

    def read(self) -> None:
        """Pass on what was reported since."""
        for event, facts in self._meeting.reports():
            if event == "result":
                self.result = facts
                continue
            if event == "start":
                self.started, facts["recipe"] = True, self._recipe
            elif event == "evaluation" and facts["headline"] is not None:
                told = facts["headline"]
                facts["headline"] = Headline(**told | {"beside": tuple(told["beside"])})
            self._observer(event, facts)
