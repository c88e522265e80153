"""The attacks of ``code_attacks.txt``, and the problem that they do not solve."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# What nobody can guess, and nobody is told.
SOLVE = """
def check(candidate):
    assert candidate(7) == 49318207
    assert candidate(12) == -88113
    for number, expected in enumerate([5, 1, 4, 1]):
        assert candidate(number) == expected
    assert abs(candidate(99) - 0.4375) < 1e-6
    assert not candidate(1000)
check(solve)
"""
HONEST = """
def solve(n):
    return {7: 49318207, 12: -88113, 0: 5, 1: 1, 2: 4, 3: 1, 99: 0.4375, 1000: []}[n]
"""
_HEAD = re.compile(r"^=== (?P<name>.+) \[(?P<kind>\w+), (?P<seconds>\d+)\]\n", re.MULTILINE)


@dataclass(frozen=True)
class Attack:
    """One row; ``kind`` is verdict, answers, escape or resources."""

    name: str
    kind: str
    program: str
    tests: str = SOLVE
    seconds: float = 20.0


def read_attacks() -> list[Attack]:
    text = (Path(__file__).parent / "code_attacks.txt").read_text(encoding="utf-8")
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    attacks = []
    for head, end in zip(heads, ends, strict=True):
        program, marked, tests = text[head.end() : end].partition("---\n")
        attacks.append(Attack(head["name"], head["kind"], program, tests if marked else SOLVE, float(head["seconds"])))
    return attacks


ATTACKS = read_attacks()
