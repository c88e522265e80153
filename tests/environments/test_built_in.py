"""The environments that ship: exact sums, programs in sandboxes, search, games with their best play."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from posttrain import registry
from posttrain.environments.games import NumberGuess, winning
from posttrain.errors import DataError, RecipeError, UsageError


def make(name: str, **options):
    return registry.find("environment", name).bind(options)()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(12 + 7) * 3", "57"),
        ("-2 ** 2", "-4"),
        ("1 / 3", "1/3"),
        ("7 / 8", "0.875"),
        ("-1 / 40", "-0.025"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** -2", "0.25"),
        ("99999999999999 + 1", "100000000000000"),
    ],
)
def test_sums_are_exact(expression: str, result: str) -> None:
    assert make("calculator").calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("9 ** 9 ** 9", "more than 30 digits"),
        ("2 ** 100000000", "more than 30 digits"),
        ("1e999", "more than 30 digits"),
        ("1" * 31, "more than 30 digits"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "an exponent is a whole number"),
        ("__import__('os')", "only numbers"),
        ("a + 1", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 +", "this is no sum"),
        ("(" * 150, "this is no sum"),
        ("1 << 3", "only \\+ - "),
        ("1" * 201, "at most 200 characters"),
    ],
)
def test_what_is_no_sum_is_refused(expression: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make("calculator").calculator(expression)


def test_programs_run_and_what_they_print_comes_back() -> None:
    python = make("python", level="process", seconds=5, max_output_chars=400)
    assert python.python("print(6 * 7)") == "42"
    assert python.python("print(sorted({'b', 'a'}))\nopen('x', 'w').write('1')") == "['a', 'b']"
    complaint = python.python("print(open('x').read())")  # begins anew
    assert complaint.endswith("No such file or directory: 'x'")
    assert complaint == python.python("print(open('x').read())")
    assert python.python("import os; print(os.getcwd(), __file__)") == "/box /box/program.py"
    assert python.python("x = 1") == "(nothing was printed)"
    assert python.python("print('y' * 1000)") == "y" * 400 + " ... (cut off)"


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The cat sat.\n\nA dog barked at the cat and the cat ran.")
    (tmp_path / "b.md").write_text("Dogs and cats.")
    (tmp_path / "c.bin").write_bytes(b"cat cat cat")
    found = make("search", path=str(tmp_path), passage_chars=100, results=2)
    assert found.search("dog") == "[a.txt] The cat sat.\nA dog barked at the cat and the cat ran."
    assert found.search("zebra") == "nothing fits"
    # two passages of 13 and 3 words; n("cat") = 1 of N = 2
    idf, f, norm = math.log(1 + 1.5 / 1.5), 3, 1.2 * (0.25 + 0.75 * 13 / 8)
    index = found._index
    assert [index.lengths, index.containing["cat"]] == [[13, 3], 1]
    assert found._idf("cat") * f * 2.2 / (f + norm) == pytest.approx(idf * 3 * 2.2 / (3 + 1.2 * (0.25 + 9.75 / 8)))
    with pytest.raises(DataError, match="no such folder"):
        make("search", path=str(tmp_path / "none"))


def halve(game: NumberGuess) -> float:
    low, high = game.low, game.high
    while not game.done:
        guess = (low + high) // 2
        said = game.guess(guess)
        low, high = (guess + 1, high) if said.startswith("higher") else (low, guess - 1)
    return game.get_reward()


@pytest.mark.parametrize(("high", "guesses", "best"), [(20, None, 1.0), (7, 2, 3 / 7), (7, 3, 1.0), (100, 5, 0.31)])
def test_halving_is_the_best_play(high: int, guesses: int | None, best: float) -> None:
    game = make("number_guess", high=high, guesses=guesses)
    rewards = []
    for number in range(1, high + 1):
        game.reset(seed=0)
        game.number = number
        rewards.append(halve(game))
    assert sum(rewards) / high == pytest.approx(best)


def test_a_seed_is_a_game() -> None:
    one, other = make("number_guess"), make("number_guess")
    numbers = []
    for seed in range(200):
        assert one.reset(seed=seed) == other.reset(seed=seed) == "Find a number from 1 to 20 with 5 guesses."
        assert one.number == other.number
        numbers.append(one.number)
    assert set(numbers) == set(range(1, 21))
    assert one.get_reward() == 0.0
    with pytest.raises(UsageError, match=r"low \(5\) must be below high \(5\)"):
        make("number_guess", low=5, high=5)


def best_move(heap: int, take: int) -> int:
    """By Bouton's rule: what leaves a multiple of ``take + 1``; 1 where nothing does."""
    return heap % (take + 1) or 1


@cache
def can_win(heap: int, take: int) -> bool:
    """By every line of play."""
    return any(not can_win(heap - move, take) for move in range(1, min(take, heap) + 1))


def worth(heap: int, take: int, policy: Callable[[int], Mapping[int, float]]) -> float:
    """How often a policy (the chance of each move, by the heap) wins, summed over all lines of play."""

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


def test_nim_is_played_as_the_tree_says() -> None:
    """What a random player wins of many games is its worth; the best wins all, from every heap that can be won."""
    game, random = make("nim", max_heap=21), Random(0)
    begun: dict[int, list[float]] = {}
    theirs = set()
    for seed in range(3000):
        said = game.reset(seed=seed)
        heap = game.heap
        assert said == f"{heap} stones. Take 1 to 3; who takes the last wins."
        while not game.done:
            game.leave(game.heap - best_move(game.heap, 3))
        assert (game.best_reward, game.get_reward()) == (0.0, 1.0), "nothing is left to win of a game that is over"
        game.reset(seed=seed)
        assert (game.heap, game.best_reward, game.get_reward()) == (heap, 1.0, 0.0)
        while not game.done:
            tool, arguments = random.choice(game.legal_moves)
            said = getattr(game, tool)(**arguments)
            if arguments["stones"] % 4 == 0 and not game.done:
                theirs.add(arguments["stones"] - game.heap)
                assert said == f"I leave {game.heap}"
        begun.setdefault(heap, []).append(game.get_reward())
    assert begun.keys() == {heap for heap in range(1, 22) if heap % 4}
    assert theirs == {1, 2, 3}, "where every move loses, any is drawn"
    for heap, rewards in begun.items():
        share = worth(heap, 3, lambda left: {move: 1 / min(3, left) for move in range(1, min(3, left) + 1)})
        assert fmean(rewards) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(rewards)) + 1e-9)
    with pytest.raises(ValueError, match="the game is over"):
        game.leave(0)
    for heap, moves in ((2, "0 to 1"), (9, "6 to 8")):
        game.heap, game.done = heap, False
        for stones in (heap, heap - 4):
            with pytest.raises(ValueError, match=f"of {heap} stones leave {moves}"):
                game.leave(stones)


def test_a_lost_game_that_is_claimed_is_paid_the_same() -> None:
    """Whatever is played; only the moves that could change nothing are left out."""
    whole, claimed = make("nim", max_heap=24, take=4), make("nim", max_heap=24, take=4, adjudicate=True)
    outcomes = set()
    for seed in range(300):
        assert whole.reset(seed=seed) == claimed.reset(seed=seed)
        random = Random(seed)
        while not whole.done:
            stones = (
                best_move(whole.heap, 4) if random.random() < 0.7 else random.choice(range(1, min(4, whole.heap) + 1))
            )
            heap = whole.heap
            said = whole.leave(heap - stones)
            if not claimed.done:
                last = claimed.leave(heap - stones)
                lost = heap != stones and stones != best_move(heap, 4)
                assert last == (f"I win from {heap - stones}" if lost else said)
                assert (claimed.done, claimed.best_reward) == (lost or whole.done, float(not lost and not whole.done))
        assert whole.get_reward() == claimed.get_reward()
        outcomes.add((whole.get_reward(), claimed.heap == 0))
    assert outcomes == {(1.0, True), (0.0, False)}


def test_heaps_that_are_held_out_begin_no_game_of_training() -> None:
    game = make("nim", max_heap=12, take=4, held_out=[7, 11])
    begun = {split: set() for split in ("train", "validation", "test")}
    for split, heaps in begun.items():
        for seed in range(200):
            game.reset(seed=seed, split=split)
            heaps.add(game.heap)
    assert begun == {"train": {1, 2, 3, 4, 6, 8, 9, 12}, "validation": {7, 11}, "test": {7, 11}}
    with pytest.raises(UsageError, match=r"held_out: no game begins from 10; games begin from 1, 2, 3, 4, 6, 7,"):
        make("nim", max_heap=12, take=4, held_out=[7, 10])
    with pytest.raises(UsageError, match="held_out: no heap is left to train on"):
        make("nim", max_heap=2, held_out=[1, 2])
    with pytest.raises(RecipeError, match=r"max_heap: .*greater than or equal to 1; got 0"):
        make("nim", max_heap=0)
