"""The environments that ship: exact sums, programs in sandboxes, games with their best play."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from closeness import approx
from posttrain import registry
from posttrain.errors import DataError, RecipeError, UsageError
from posttrain.sampling.environments.built_in import NumberGuess, search
from refusing import refuses


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


def test_calculator_counts_digits_to_its_bound() -> None:
    calculator = make("calculator", max_digits=3)
    assert calculator.calculator("998 + 1") == "999"
    for expression in ("999 + 1", "1000", "1 / 1000"):
        with pytest.raises(ValueError, match="3 digits"):
            calculator.calculator(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9", "than 30 digits"),
        ("1e999", "than 30 digits"),
        ("1 / 0", "division by zero"),
        ("2 ** 0.5", "a whole number"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 +", "is no sum"),
        ("(" * 150, "is no sum"),
        ("1 << 3", "only + - "),
        ("1" * 201, "most 200 characters"),
    ],
)
def test_what_is_no_sum_is_refused(expression: str, message: str) -> None:
    with refuses(ValueError, message):
        make("calculator").calculator(expression)


def test_programs_run_and_what_they_print_comes_back() -> None:
    python = make("python", sandbox="process", seconds=5, max_output_chars=400)
    assert python.python("print(6 * 7)") == "42"
    assert python.python("print(sorted({'b', 'a'}))\nopen('x', 'w').write('1')") == "['a', 'b']"
    complaint = python.python("print(open('x').read())")  # begins anew
    assert complaint.endswith("No such file or directory: 'x'")
    assert complaint == python.python("print(open('x').read())")
    assert python.python("import os; print(os.getcwd(), __file__)") == "/box /box/program.py"
    assert python.python("x = 1") == "(nothing was printed)"
    assert python.python("print('y' * 1000)") == "y" * 400 + " ... (cut off)"
    with refuses(RecipeError, "level"):
        make("python", level="process")


def halve(game: NumberGuess) -> float:
    low, high = game.low, game.high
    while not game.done:
        guess = (low + high) // 2
        message = game.guess(guess)
        low, high = (guess + 1, high) if message.startswith("higher") else (low, guess - 1)
    return game.get_reward()


@pytest.mark.parametrize(("high", "guesses", "best"), [(20, None, 1.0), (7, 2, 3 / 7), (7, 3, 1.0), (100, 5, 0.31)])
def test_halving_is_the_best_play(high: int, guesses: int | None, best: float) -> None:
    game = make("number_guess", high=high, guesses=guesses)
    rewards = []
    for number in range(1, high + 1):
        game.reset(seed=0)
        game.number = number
        rewards.append(halve(game))
    assert sum(rewards) / high == approx(best)


def test_a_seed_is_a_game() -> None:
    one, other = make("number_guess"), make("number_guess")
    numbers = []
    for seed in range(200):
        assert one.reset(seed=seed) == other.reset(seed=seed) == "Find a number from 1 to 20 with 5 guesses."
        assert one.number == other.number
        numbers.append(one.number)
    assert set(numbers) == set(range(1, 21))
    assert one.get_reward() == 0.0
    with refuses(UsageError, "below high (5)"):
        make("number_guess", low=5, high=5)


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The cat sat.\n\nA dog barked at the cat and the cat ran.")
    (tmp_path / "b.md").write_text("Dogs and cats.")
    (tmp_path / "c.bin").write_bytes(b"cat cat cat")
    found = search(path=str(tmp_path), passage_chars=100, results=2)
    assert found.search("dog") == "[a.txt] The cat sat.\nA dog barked at the cat and the cat ran."
    assert found.search("zebra") == "nothing fits"
    assert [sum(words.values()) for words in found._words] == [13, 3]
    assert (found._mean, found._idf["cat"]) == (8, math.log(1 + 1.5 / 1.5)), "in one passage of two"
    with refuses(DataError, "folder not found"):
        search(path=str(tmp_path / "none"))
