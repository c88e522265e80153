"""The grader ``code_tests``: programs in answers, tests in another sandbox, and what passes between the two."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

import pytest

from posttrain.graders.code import exchange
from posttrain.graders.code.exchange import ProgramRaised, error_of
from posttrain.graders.code.grader import extract_program, fenced_blocks, last_program
from posttrain.graders.code.judging import Checks, Walls, judge_all
from posttrain.graders.grading import Outcome, Submission, grade_submissions
from posttrain.graders.rewards import bind_reward
from posttrain.graders.sandbox.sandbox import Bounds, choose_sandbox, refusal
from posttrain.registry import find

KIND = "process" if refusal("bubblewrap") else "bubblewrap"
PATIENT = Walls(KIND, Bounds(cpu_seconds=60), 120.0)  # type: ignore[arg-type]
SHORT = Walls(KIND, Bounds(cpu_seconds=1), 120.0)  # type: ignore[arg-type]


def outcomes(*request: tuple[str, str], names: Sequence[str] = ("f",), walls: Walls = PATIENT) -> list[Outcome]:
    """The verdicts on (program, tests)."""
    return judge_all([(program, Checks(tuple(names), tests)) for program, tests in request], walls, 2)


def test_programs_are_right_or_wrong() -> None:
    tests = "assert f(2) == 4\nassert f(-1) == -2\nassert [f(n) for n in range(3)] == [0, 2, 4]"
    assert outcomes(
        ("def f(n): return 2 * n", tests),
        ("import math\ndef f(n):\n    return math.floor(2 * n)", tests),
        ("f = lambda n: n + n", tests),
        ("def f(n): return 2", tests),
        ("def g(n): return 2 * n", tests),
        ("def f(n) return 2 * n", tests),
        ("def f(n): return 1 / 0", tests),
        ("import os; os._exit(0)", tests),
    ) == ["right"] * 3 + ["wrong"] * 4 + ["crash"]


def test_what_hangs_is_stopped() -> None:
    assert (
        outcomes(
            ("def f(n):\n    while True: pass", "assert f(1) == 1"),
            ("def f(n): return n", "f(1)\nwhile True: pass"),
            walls=SHORT,
        )
        == ["timeout"] * 2
    )


def test_tests_that_are_no_tests_grade_nothing() -> None:
    program = "def f(n): return n"
    assert outcomes(
        (program, "assert True"),
        (program, "assert f(1) = 1"),
        (program, "assert f(lambda: 1)"),
        (program, "assert f(1)"),
    ) == ["ungraded"] * 3 + ["right"]


def test_values_pass_as_they_are() -> None:
    program = "def f(*values, **named): return [*values, named] if named else values[0]"
    cases = [
        "None", "True", "-7", "2 ** 90", "-(2 ** 53)", "1.5", "float('inf')", "-0.0", "1 + 2j",
        "'a\\ud800\\n'", "b'\\xff'",
        "[1, [2]]", "(1, (2,))", "{1: {'a': (None,)}}", "{1, 2}", "frozenset({3})", "range(2, 9, 3)",
    ]  # fmt: skip
    tests = [f"assert f({case}) == {case} and type(f({case})) is type({case})" for case in cases]
    tests.append("assert f(1, a={2}) == [1, {'a': {2}}]\nassert f(float('nan')) != f(float('nan'))")
    assert set(outcomes(*((program, test) for test in tests))) == {"right"}


def test_values_of_other_types_are_plain_or_only_true_or_false() -> None:
    program = (
        "import collections, re\nclass A:\n    def __eq__(self, other): return True\n    __hash__ = object.__hash__\n"
        "def f(kind):\n    return {'counter': collections.Counter('aab'), 'match': re.match('a', 'a'), 'any': A(),\n"
        "            'zip': zip('ab', [1, 2]), 'generator': (n for n in (1, 2)), 'keys': {'a': 1}.keys(),\n"
        "            'none': re.match('a', 'b'), 'inside': [A(), 1]}[kind]"
    )
    tests = (
        "assert f('counter') == {'a': 2, 'b': 1}\nassert f('match')\nassert not f('none')\n"
        "assert list(f('zip')) == [('a', 1), ('b', 2)] and list(f('generator')) == [1, 2] and f('keys') == {'a'}\n"
        "assert f('any') != 1 and f('any') and not f('any') == 1 and f('inside') != [5, 1]"
    )
    assert outcomes((program, tests)) == ["right"]


def test_an_argument_is_a_copy() -> None:
    assert outcomes(("def f(items): items.append(1)", "given = []\nf(given)\nassert given == []")) == ["right"]


def test_ordinary_errors_reach_the_tests_and_others_do_not() -> None:
    program = "import sys\ndef f(kind): raise {'v': ValueError('no'), 's': SystemExit(0), 'i': StopIteration()}[kind]"
    catch = "try:\n    f('v')\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"
    ends = "assert all(map(lambda kind: f(kind) == 1, ['i']))"
    assert outcomes((program, catch), (program, ends), (program, "f('s')")) == ["right", "wrong", "wrong"]
    assert type(error_of("KeyError", "x")) is KeyError
    for name in ("StopIteration", "SystemExit", "print", "nothing", "UnicodeDecodeError"):
        assert type(error_of(name, "x")) is ProgramRaised


def test_a_program_that_draws_numbers_gets_the_same_verdict_again() -> None:
    program = "import random\ndef f(): return random.random()"
    assert outcomes((program, "assert f() == 0.8444218515250481"), names=("f",)) == ["right"]


def test_encoding_of_what_a_program_may_send() -> None:
    point = namedtuple("point", "x y")(1, 2)
    for value, back in (
        (point, (1, 2)),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("a"), {"a": 1}),
        (bytearray(b"a"), b"a"),
    ):
        assert exchange.decode(exchange.encode(value)) == back
        assert type(exchange.decode(exchange.encode(value))) is type(back)
    with pytest.raises(exchange.NoPlainData):
        exchange.encode([object()], strict=True)
    for message in (["value"], ["other"], {"a": 1}, ["eval", "1"], 1.5, ["dict", 3], ["set", [["list", []]]]):
        with pytest.raises((ValueError, TypeError, KeyError)):
            exchange.decode(message)


def test_the_last_block_that_defines_the_function() -> None:
    text = "```python\ndef f(): return 1\n```\nor\n```py\ndef f(): return 2\n```\nso\n```\nprint(f())\n```"
    assert extract_program(text, ("f",)) == "def f(): return 2"
    assert extract_program(text, ("g",)) == "print(f())"
    assert last_program(text) == "print(f())"
    assert extract_program(f"<think>{text}</think> none", ("f",)) is None
    assert extract_program(f"<think>{text}", ("f",)) is None
    assert extract_program(f"<answer>{text}</answer>", ("f",)) == "def f(): return 2"


@pytest.mark.parametrize(
    "text", ["", " \n", "I cannot.", "```js\nf()\n```", "```python\ndef f(): return 1", "```\n\n```"]
)
def test_no_program(text: str) -> None:
    assert extract_program(text, ("f",)) is None


def test_code_without_a_fence() -> None:
    assert extract_program("def f():\n  return 1", ("f",)) == "def f():\n  return 1"
    assert extract_program("x = 1", ("f",)) is None
    head = 'def f(n):\n    """Twice."""\n'
    went_on = "    return 2 * n\n\n\ndef other():\n    pass\n"
    assert extract_program(went_on, ("f",), head) is None
    assert extract_program(went_on, ("f",), head, goes_on=True) == 'def f(n):\n    """Twice."""\n    return 2 * n\n'
    assert extract_program("```python\ndef f(n): return n\n```", ("f",), head).endswith('"""\ndef f(n): return n\n')  # type: ignore[union-attr]


def test_fences_of_other_lengths_and_kinds() -> None:
    text = "````python\n```\ninner\n```\n````\n~~~python3\nx\n~~~\n  ```Python title=a\ny\n  ```"
    assert fenced_blocks(text) == [("python", "```\ninner\n```"), ("python3", "x"), ("python", "y")]
    assert fenced_blocks("```" * 200_000) == []


def submission(text: str, **given_arguments: Any) -> Submission:
    tests = {"names": ("f",), "code": "assert f(3) == 6", **given_arguments}
    return Submission(text, None, None, {"tests": tests})


def test_the_grader() -> None:
    correct = "```python\ndef f(n): return 2 * n\n```"
    verdicts = grade_submissions(
        "code_tests",
        [
            submission(correct),
            submission("```python\ndef f(n): return n\n```"),
            submission("I do not know."),
            Submission(correct, None, None, {}),
            submission(correct),
            submission("    return 2 * n", prefix="def f(n):\n    'Twice.'\n", goes_on=True),
        ],
        {"sandbox": KIND, "timeout_seconds": 60},
    )
    assert [one.outcome for one in verdicts] == ["right", "wrong", "no_answer", "ungraded", "right", "right"]
    assert verdicts[0].extracted == "def f(n): return 2 * n"


def test_the_reward_asks_the_grader_of_the_task() -> None:
    reward = bind_reward(find("reward", "correct"), {})
    if refusal("bubblewrap"):
        pytest.skip(refusal("bubblewrap"))
    graded = submission("```\ndef f(n): return 2 * n\n```")
    one = {"text": graded.text, "extracted": None, "answer": None, "grader": "code_tests", "meta": graded.meta}
    assert reward(one) == 1.0
    assert choose_sandbox(None) == KIND
