"""Games played at random, to show how a game is played: legal moves, each as likely, in the tokens of real play."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.consent import declare_code
from posttrain.engines.base import Sampling
from posttrain.engines.episodes import Episodes, build_stage
from posttrain.engines.scripted import ScriptedEngine
from posttrain.environments.games import TextGame
from posttrain.errors import RecipeError, UnallowedCode, UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Word
from posttrain.render import stop_ids
from posttrain.render.rows import rows_of
from posttrain.tasks.base import build_task
from posttrain.types import Example

NIM = {"name": "nim", "max_heap": 12, "take": 4, "held_out": [7, 11]}


class Endless(TextGame):
    @property
    def legal_moves(self):
        return [("wait", {})]

    def _begin(self, random: Any) -> str:
        return "Wait."

    def wait(self) -> str:
        """Waits."""
        return "still waiting"


class Mute(TextGame):
    def _begin(self, random: Any) -> str:
        return "Begin."

    def move(self) -> str:
        """Moves."""
        return self._end(1.0, "over")


def games(**options: Any) -> Any:
    return build_task(Word(name="random_play", **({"environment": NIM, "size": 600} | options))).examples


def replayed(example: Example) -> tuple[list[int], list[int]]:
    """The heaps and the moves of a game, by what was said; each is held against the rules."""
    heap = int(example.messages[0].content.split("\n\n")[1].split()[0])
    heaps, moves = [], []
    for turn in example.turns:
        (call,) = turn.calls
        assert (turn.text, call.tool, call.outcome) == ("", "leave", "ok")
        left = json.loads(call.stated)["stones"]
        assert max(0, heap - 4) <= left < heap
        heaps.append(heap)
        moves.append(heap - left)
        if call.result == "you win":
            heap = left
            break
        heap = int(call.result.split()[2])
        assert max(0, left - 4) <= heap < left
        assert call.result == (f"I leave {heap}" if heap else "I leave 0 and win")
    assert turn is example.turns[-1]
    assert heap == 0
    return heaps, moves


def test_each_legal_move_is_as_likely_and_only_those_of_training_begin() -> None:
    drawn, begun = Counter[tuple[int, int]](), set()
    for example in games():
        heaps, moves = replayed(example)
        begun.add(heaps[0])
        drawn.update(zip((min(4, heap) for heap in heaps), moves, strict=True))
        assert (example.answer, example.solution, example.demonstration) == (None, None, None)
    assert begun == {1, 2, 3, 4, 6, 8, 9, 12}
    for choices in (2, 3, 4):
        counts = [drawn[choices, move] for move in range(1, choices + 1)]
        expected = sum(counts) / choices
        assert sum((n - expected) ** 2 / expected for n in counts) < 20, "chi-squared of 3 degrees at most"
    assert {replayed(example)[0][0] for example in games(split="validation", size=40)} == {7, 11}
    assert games(size=3)[2] == games()[2], "the same for everyone"
    assert games(seed=1)[2].turns != games()[2].turns or games(seed=1)[3].turns != games()[3].turns


@pytest.mark.parametrize("template", ["r1_zero", "plain", "chat", "dialogue"])
def test_demonstrations_are_the_tokens_of_play(template: str) -> None:
    """The same moves, played: equal ids, and equal marks of who wrote them; nothing follows the last move."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    recipe = validate_recipe(
        {
            "task": "episodes",
            "prompt": {"template": template},
            "environment": "test_random_play:Told",
            "rewards": ["environment"],
            "rollout": {"max_turns": 12, "show_tools": False},
            "objective": "grpo",
        }
    )
    declare_code(["test_random_play:Told"])
    words = registry.find("template", template).bind({})()
    stage = build_stage(recipe.resolve(), words, tokenizer)
    assert stage is not None
    stops = stop_ids(tokenizer, stage.template)
    for shown in games(size=12):
        [(row,)] = list(rows_of(tokenizer, stage.template, shown, "demonstration"))
        own = [i not in row.heard for i in range(len(row.ids))][row.prompt_length :]
        said, turn = [], list[int]()
        for token, mine in zip(row.ids[row.prompt_length :], own, strict=True):
            turn += [token] if mine else []
            if mine and token in stops:
                said.append(turn)
                turn = []
        assert (len(said), turn) == (len(shown.turns), [])
        Told.results = [call.result for turn in shown.turns for call in turn.calls]
        turns = iter(said)
        engine = ScriptedEngine(lambda prompt, key, turns=turns: next(turns))
        sampling = Sampling(2000, stop_ids=stops)
        played = Example("", shown.messages)
        [[one]] = Episodes(stage, engine, tokenizer, sampling, 2000).play([played], [[7]], [1])
        assert (*one.prompt, *one.completion.ids) == tuple(row.ids)
        assert list(one.completion.own) == own
        assert one.completion.finish == "ended"


class Told:
    """Says what it was told to say, and is over behind the last of that."""

    results: list[str]

    def reset(self) -> None:
        self.left, self.done = list(Told.results), False

    def leave(self, stones: int) -> str:
        """Leaves.

        Args:
            stones: how many.
        """
        said = self.left.pop(0)
        self.done = not self.left
        return said

    def get_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("environment", "error", "says"),
    [
        ("nym", UsageError, r"there is no environment named 'nym'\. Did you mean 'nim'"),
        (
            {"name": "nim", "heap": 3},
            RecipeError,
            r"task\.environment.*'nim' has no key 'heap'.*Did you mean 'max_heap'",
        ),
        ("calculator", UsageError, "'calculator' does not say which moves are legal; choose nim or number_guess"),
        ("test_random_play:Mute", UsageError, "does not say which moves are legal"),
        ("someone_s:Game", UnallowedCode, "someone_s:Game"),
    ],
)
def test_what_has_no_moves_is_refused(environment: Any, error: type[Exception], says: str) -> None:
    declare_code(["test_random_play:Mute"])
    with pytest.raises(error, match=says):
        games(environment=environment)


def test_a_game_that_does_not_end_is_refused() -> None:
    declare_code(["test_random_play:Endless"])
    with pytest.raises(UsageError, match="game random_play/train/0/0 has not ended after 1,000 moves"):
        games(environment="test_random_play:Endless")[0]


def test_numbers_are_guessed_at_random(tmp_path: Any) -> None:
    examples = games(environment={"name": "number_guess", "high": 7}, size=200)
    assert {len(example.turns) for example in examples} == {1, 2, 3}
    guesses = Counter(json.loads(turn.calls[0].stated)["number"] for example in examples for turn in example.turns)
    assert set(guesses) == set(range(1, 8))
