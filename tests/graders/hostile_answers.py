"""Answers that are meant to hang, crash or fool a grader. None of them is right for any of ``GOLDS``."""

from __future__ import annotations

from pathlib import Path

from grader_tables import read_lines

GOLDS = (
    "42",
    "\\frac{1}{2}",
    "x+1",
    "(1,2)",
    "\\{1,2\\}",
    "\\text{yes}",
    "[0,1)",
    "y = 2x + 3",
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
    "2^{2005}",
    "1 \\pm \\sqrt{19}",
)


def hostile_answers(canary: Path) -> list[str]:
    """At least 200 answers. Those that are code would create ``canary``."""
    groups = (towers(), factorials(), megabytes(), many_parts(), nested(), EVALUATIONS, code(canary))
    return [answer for group in (*groups, lookalikes(), stuffing(), BROKEN, BLANK) for answer in group]


def towers() -> list[str]:
    """Powers that no memory holds."""
    found = ["^".join(["9"] * n) for n in (3, 4, 5, 20, 200)] + ["**".join(["7"] * n) for n in (3, 4, 50, 300)]
    found += ["9^{" * n + "9" + "}" * n for n in (2, 3, 4, 5, 8, 20, 60)]
    found += [f"x^{{{10**n}}}" for n in (6, 12, 100)] + [f"(x+1)^{{{10**n}}}" for n in (4, 6, 9)]
    return found + read_lines("hostile_answers.txt", "towers")


def factorials() -> list[str]:
    """Factorials and binomials."""
    found = [f"\\binom{{{10**n}}}{{{10**n // 2}}}" for n in (5, 7, 10, 12)] + ["5" + "!" * 50, "x" + "!" * 8]
    return found + read_lines("hostile_answers.txt", "factorials")


def megabytes() -> list[str]:
    """Long texts."""
    million = 10**6
    repeated = ("9", " ", "\\", "x", "$", ".", "\x00", "1,", "+1", "a b ", "{}", "\\{", "\\boxed{")
    repeated += ("<answer>", "</answer>")
    found = [unit * (million // len(unit)) for unit in repeated]
    return [*found, "\n" * million + "7", "\\frac{1}{2}" * 100_000, "-" * 100_000 + "5", "0." + "3" * 5000, "9" * 1400]


def many_parts() -> list[str]:
    """Many terms, factors, items, cells."""
    ones = "\\\\".join("&".join("1" * 20) for _ in range(20))
    names = "\\\\".join("&".join(f"x_{{{row}{column}}}" for column in range(7)) for row in range(7))
    return [
        "+".join(f"x_{{{n}}}" for n in range(150)),
        "+".join(f"\\sin({n}x)" for n in range(90)),
        "\\cdot".join(f"(x+{n})" for n in range(75)),
        ",".join(str(n) for n in range(300)),
        "(" + "1," * 600 + "1)",
        "1/" * 700 + "1",
        "\\pm 1" * 200,
        " ".join(str(n) for n in range(300)),
        f"\\begin{{pmatrix}}{ones}\\end{{pmatrix}}",
        f"\\begin{{vmatrix}}{names}\\end{{vmatrix}}",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{1000000000}",
        "\\det\\begin{pmatrix}1&x\\\\y&4\\end{pmatrix}^{99999}",
    ]


def nested() -> list[str]:
    """Brackets in brackets."""
    found = []
    for opening, closing in (("{", "}"), ("(", ")"), ("[", "]"), ("\\{", "\\}"), ("\\left(", "\\right)"), ("|", "|")):
        found += [opening * n + "1" + closing * n for n in (60, 400, 100_000)]
        found += [opening * 300 + "1", "1" + closing * 300]
    for command in ("\\frac{1}{", "\\sqrt{", "\\text{", "\\boxed{", "x_{", "\\sin(", "-(", "\\frac{\\frac{1}{2}}{"):
        closing = ")" if command.endswith("(") else "}"
        found += [command * n + "3" + closing * n for n in (9, 20, 120, 20_000)]
    return found


# What a computer algebra system would work on for ever.
EVALUATIONS = read_lines("hostile_answers.txt", "evaluations")


def code(canary: Path) -> list[str]:
    """Text that is harmless only while nobody runs it."""
    return [line.replace("CANARY", str(canary)) for line in read_lines("hostile_answers.txt", "code")]


def lookalikes() -> list[str]:
    """Characters that look like others, hide, or are none."""
    found = ["𝟒𝟐", "⁴²", "④②", "4\u200b2", "4\u20602", "\u202e24", "42\x00", "\x0042", "4\x002"]
    found += ["42\ufeff\u200d", "х+1", "ｘ+１", "x\u0338+1", "½½", "¹⁄₂", "⅟2", "уеs", "ｙｅｓ", "y\u0435s", "ye\u0455"]
    found += ["Ⅻ", "\\frac{l}{2}", "(1‚2)", "\ud800", "42\ud800", "\udfff1", "\ud83d", "x+\ud8001", "\\text{\udc00}"]
    found += ["\x1b[2J42\x1b[0m", "4\b42", "\x7f", "［0,1)", "{1，2}", "y ＝ 2x ＋ 3", "∑∑∑∑", "∞∞", "🤖" * 100]
    return [*found, "ﷺ" * 200, "a\u0301" * 200, "Z\u0351\u036b\u0343\u036a\u0302A\u0334\u0335L\u0320\u0368G\u0334O"]


def stuffing() -> list[str]:
    """Many answers for one."""
    every = ("42", "1/2", "x+1", "(1,2)", "yes", "[0,1)", "7")
    return [mark.join(every) for mark in (" or ", ", ", " and ", "; ", "/", " ", "\n", " = ")] + read_lines(
        "hostile_answers.txt", "stuffing"
    )


BLANK = ("", " ", "\n", "\t \r\n")
# Pieces.
BROKEN = read_lines("hostile_answers.txt", "broken")
