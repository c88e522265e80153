"""Games played at random, to show how a game is played: legal moves, each as likely, in the tokens of real play."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from nim import TextGame, winning

from posttrain import registry
from posttrain.data.base import build_task
from posttrain.errors import RecipeError, UnallowedCode, UsageError
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import Component
from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog
from posttrain.types import Example
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.slow

NIM = {"name": "nim:nim", "max_heap": 12, "take": 4, "held_out": [7, 11]}


class Mute(TextGame):
    def _begin(self, random: Any) -> str:
        return "Begin."

    def move(self) -> str:
        """Moves."""
        return self._end(1.0, "over")


@pytest.fixture(autouse=True)
def _declared() -> None:
    declare_code(["nim:nim", "nim:random_play"])


def make(name: str, **options: Any) -> Any:
    return registry.find("environment", name).bind(options, "environment")()


def games(**options: Any) -> Any:
    return build_task(Component(name="nim:random_play", **({"environment": NIM, "size": 600} | options))).examples


def replayed(example: Example) -> tuple[list[int], list[int]]:
    """The heaps and the moves of a game, by what was said; each is held against the rules."""
    heap = int(example.messages[0].content.split("\n\n")[1].split()[0])
    heaps, moves = [], []
    for turn in example.turns:
        (call,) = turn.calls
        assert (turn.text, call.tool, call.outcome) == ("", "leave", "ok")
        left = json.loads(call.raw_arguments)["stones"]
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


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ("nym", UsageError, "there is no environment named 'nym'"),
        (
            {"name": "nim:nim", "heap": 3},
            RecipeError,
            r"task\.environment.*'nim' has no key 'heap'.*Did you mean 'max_heap'",
        ),
        ("calculator", UsageError, "'calculator' does not say which moves are legal; choose nim:nim"),
        ("test_nim:Mute", UsageError, "does not say which moves are legal"),
        ("someone_s:Game", UnallowedCode, "someone_s:Game"),
    ],
)
def test_what_has_no_moves_is_refused(environment: Any, error: type[Exception], message: str) -> None:
    declare_code(["test_nim:Mute"])
    with pytest.raises(error, match=message):
        games(environment=environment)


def best_move(heap: int, take: int) -> int:
    """By Bouton's rule: what leaves a multiple of ``take + 1``; 1 where nothing does."""
    return heap % (take + 1) or 1


@cache
def can_win(heap: int, take: int) -> bool:
    """By every line of play."""
    return any(not can_win(heap - move, take) for move in range(1, min(take, heap) + 1))


def worth(heap: int, take: int, policy: Callable[[int], Mapping[int, float]]) -> float:
    """Return the winning rate of a policy (the chance of each move, by the heap), over all lines of play."""

    def behind(left: int) -> float:
        moves = range(1, min(take, left) + 1)
        his = [move for move in moves if not can_win(left - move, take)] or list(moves)
        return 1.0 if left == 0 else sum(mine(left - move) for move in his) / len(his)

    @cache
    def mine(left: int) -> float:
        return 0.0 if left == 0 else sum(share * behind(left - move) for move, share in policy(left).items())

    return mine(heap)


@pytest.mark.parametrize("take", [1, 2, 3, 4, 7])
def test_what_the_best_play_is_worth(take: int) -> None:
    """By backward induction (the environment's), by the whole tree, by Bouton's rule; and one slip loses."""
    wins = winning(40, take)
    assert wins == [can_win(heap, take) for heap in range(41)] == [heap % (take + 1) != 0 for heap in range(41)]
    for heap in range(1, 25):
        assert worth(heap, take, lambda left: {best_move(left, take): 1.0}) == float(wins[heap])
        for other in set(range(1, min(take, heap) + 1)) - {best_move(heap, take)}:
            slip = {heap: {other: 1.0}}
            assert worth(heap, take, lambda left, slip=slip: slip.get(left, {best_move(left, take): 1.0})) == 0.0


def test_a_lost_game_that_is_claimed_is_paid_the_same() -> None:
    """Whatever is played; only the moves that could change nothing are left out."""
    whole, claimed = make("nim:nim", max_heap=24, take=4), make("nim:nim", max_heap=24, take=4, adjudicate=True)
    outcomes = set()
    for seed in range(300):
        assert whole.reset(seed=seed) == claimed.reset(seed=seed)
        random = Random(seed)
        while not whole.done:
            stones = (
                best_move(whole.heap, 4) if random.random() < 0.7 else random.choice(range(1, min(4, whole.heap) + 1))
            )
            heap = whole.heap
            message = whole.leave(heap - stones)
            if not claimed.done:
                last = claimed.leave(heap - stones)
                lost = heap != stones and stones != best_move(heap, 4)
                assert last == (f"I win from {heap - stones}" if lost else message)
                assert (claimed.done, claimed.best_reward) == (lost or whole.done, float(not lost and not whole.done))
        assert whole.get_reward() == claimed.get_reward()
        outcomes.add((whole.get_reward(), claimed.heap == 0))
    assert outcomes == {(1.0, True), (0.0, False)}


def test_heaps_that_are_held_out_begin_no_game_of_training() -> None:
    game = make("nim:nim", max_heap=12, take=4, held_out=[7, 11])
    begun = {split: set() for split in ("train", "validation", "test")}
    for split, heaps in begun.items():
        for seed in range(200):
            game.reset(seed=seed, split=split)
            heaps.add(game.heap)
    assert begun == {"train": {1, 2, 3, 4, 6, 8, 9, 12}, "validation": {7, 11}, "test": {7, 11}}
    with pytest.raises(UsageError, match=r"held_out: no game begins from 10; games begin from 1, 2, 3, 4, 6, 7,"):
        make("nim:nim", max_heap=12, take=4, held_out=[7, 10])
    with pytest.raises(UsageError, match="held_out: no heap is left to train on"):
        make("nim:nim", max_heap=2, held_out=[1, 2])
    with pytest.raises(RecipeError, match=r"max_heap: .*greater than or equal to 1; got 0"):
        make("nim:nim", max_heap=0)


def test_nim_learnt_by_reward_is_within_five_percent_of_the_best_play(tmp_path: Path) -> None:
    """The best play is paid 1 in each of these games. (``benchmarks/game.py``: three seeds and all steps.)"""
    folder = Path(__file__).parents[1] / "nim"
    shown = launch(load_recipe(str(folder / "sft-nim.yaml")), RunStart(tmp_path, "sft"))
    words = [("model.name", str(shown.folder)), ("train.steps", "24")]
    learnt = launch(load_recipe(str(folder / "grpo-nim.yaml"), words), RunStart(tmp_path, "grpo"))
    rows = [row.metrics for row in MetricsLog(learnt.folder / "metrics.jsonl").read()]
    for starts in ("train", "validation"):
        rewards = [row[name] for row in rows if (name := f"eval/episodes/{starts}/reward") in row]
        assert rewards[0] < 0.4, f"{starts}: shown how it is played, not how it is won"
        assert rewards[-1] >= 0.95, f"{starts}: {rewards}"
