"""Answers that try to be right without being right: constant, degenerate, tricky, hedging, copied and mutated ones.

Constant answers know no gold. Those made from a gold (``hedges``, ``mutations``) are meant to be wrong for it; a
mutation may by chance mean the same (2·2 = 2^2), which the table of ``equivalents`` notices.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from empty_answers import empty_marks, invisible_texts


def constants() -> list[str]:
    """Numbers, letters, words: what someone says who has not read the question."""
    numbers = [str(n) for n in range(-20, 131)] + ["1000", "1,000", "10000", "1000000", "2024", "2025", "-100"]
    fractions = [f"\\frac{{{a}}}{{{b}}}" for b in range(2, 10) for a in range(1, b)] + ["1/2", "1/3", "0.5", "0.25"]
    decimals = ["0.0", "-0", "+0", "00", "0.01", "1.0", "3.14", "2.718", "1e0", "1e-9", "1e400", "0x10"]
    percents = ["0%", "1%", "10%", "25\\%", "50\\%", "50%", "100%", "100\\%", "200%"]
    words = _lines("""
yes
no
True
maybe
both
all
none of the above
all of the above
anything
nothing
unknown
answer
I do not know
not sure
it depends
infinitely many
inf
east
even
parabola
line
knight
right
The answer is correct.
Q.E.D.
hello
As an AI, I cannot answer.
zero
seventeen
x
n
e
\\pi
-1
\\sqrt{2}
2\\sqrt{3}
x+1
x^2
(0,0)
(1,2)
[0,1)
(-\\infty,\\infty)
\\{0\\}
\\{1,2\\}
x=0
y=x
x>0
x \\in \\mathbb{R}
x = x
x \\ne x
\\text{yes}
\\text{A}
\\text{(B)}
\\text{none}
1:2
12:00
1_2
\\begin{pmatrix} 0 \\\\ 0 \\end{pmatrix}
\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}
\\$1
5 cm
1 \\text{ unit}
90^\\circ
180°
""")  # fmt: skip
    return [*numbers, *fractions, *decimals, *percents, *words, *"ABCDEFGHIJabcdefghij", *(f"({c})" for c in "ABCDE")]


def tricks() -> list[str]:
    """Expressions that are a value at some points only: parity, sign, branch, domain, degenerate sums and powers."""
    signs = ["(-1)^n", "(-1)^{n}", "(-1)^{n+1}", "(-1)^{2n}", "(-1)^{2n+1}", "(-1)^k", "(-1)^x", "(-1)^{m+n}",
        "(-1)^{n^2}",
             "\\cos(n\\pi)", "\\cos(\\pi n)", "\\cos n\\pi", "\\sin(n\\pi)", "\\sin(\\pi n)", "\\cos(2\\pi n)",
             "\\sin\\frac{n\\pi}{2}",
             "\\tan(n\\pi)", "e^{i\\pi n}", "e^{i \\pi}", "i^{n}", "i^{2n}", "i^{4n}", "(-1)^{n(n+1)}",
             "(-1)^n n", "-(-1)^n n",
             "(-1)^{n!}"]  # fmt: skip
    signs += [f"{s}{pattern}" for s in ("", "-") for pattern in (
        "\\frac{1+(-1)^n}{2}", "\\frac{1-(-1)^n}{2}", "\\frac{x}{|x|}", "\\frac{|x|}{x}", "\\frac{\\sqrt{x^2}}{x}",
        "\\operatorname{sgn}(x)", "\\text{sgn}(x)", "x^0", "0^x", "0^n", "0^0", "0^{|x|}", "1^x", "1^n",
        "\\frac{x}{x}",
        "\\frac{n}{n}", "\\frac{0}{x}", "\\frac{x-1}{x-1}", "\\frac{0}{0}", "\\frac{1}{0}", "\\frac{x}{0}",
        "0 \\cdot \\infty",
        "\\infty - \\infty", "\\frac{\\infty}{\\infty}", "1^{\\infty}", "\\infty^0", "x - x", "x^2 - x \\cdot x",
        "0x", "0 \\cdot x",
        "|x| - x", "|x|", "\\sqrt{x^2}", "\\sqrt[4]{x^4}", "\\sqrt[3]{x^3}", "\\ln|x|", "\\ln x^2", "\\ln(e^x)",
        "e^{\\ln x}",
        "\\arcsin(\\sin x)", "\\arccos(\\cos x)", "\\arctan(\\tan x)", "|n|", "\\lfloor x \\rfloor",
        "\\lceil x \\rceil",
        "\\lfloor n \\rfloor", "\\lfloor \\frac{n}{2} \\rfloor", "\\lceil \\frac{n}{2} \\rceil", "x \\bmod 1",
        "n \\bmod 2", "n \\mod 2",
        "n \\pmod{2}", "\\max(x, 0)", "\\min(x, 0)", "\\max(n, 7)", "\\min(n, 7)", "\\max(x,-x)", "\\gcd(n, 1)",
        "\\gcd(n,n+1)",
        "\\sum_{k=1}^{0} k", "\\sum_{k=1}^{n} 1", "\\sum_{k=1}^{0} 1", "\\prod_{k=1}^{0} k",
        "\\sum_{k=0}^{n} (-1)^k",
        "\\sum_{k=1}^{-1} 1", "\\int_0^0 x dx", "\\int_{-1}^{1} x dx", "\\lim_{x \\to 0} x",
        "\\lim_{x\\to\\infty} \\frac{1}{x}",
        "\\lim_{x \\to 0} \\frac{|x|}{x}", "\\binom{n}{0}", "\\binom{n}{n}", "\\binom{0}{n}", "0!", "\\log_x x",
        "\\log_x 1",
        "\\frac{\\ln x}{\\ln |x|}", "\\frac{d}{dx} 0", "\\frac{d}{dx} x", "1+0^{x}", "1 + 0^n", "2 - 1^n", "i^2",
        "i \\cdot i", "|i|",
        "\\sqrt{-1}", "\\sqrt{-1}^2", "\\sqrt{x}\\sqrt{x}", "\\left(\\sqrt{x}\\right)^2", "(x^2)^{1/2}", "x^{2/2}",
        "\\sqrt{x}^2",
        "\\frac{\\sin x}{\\sin x}", "\\sin^2 x + \\cos^2 x", "10^{-60}", "10^{-100}",
        "10^{-400}",
        "0.9999999999999999999999999999999999999999999999999999999999999999", "0.\\overline{9}",
        "\\frac{1}{10^{70}}",
        "2^{-300}", "e^{-200}",
    )]  # fmt: skip
    powers = [f"{n} + 10^{{-{k}}}" for n in (0, 1, 2, 17) for k in (9, 20, 30, 40)]
    parities = [f"{a}+{b}(-1)^n" for a in (0, 1, 2, 3, 5) for b in (1, 2, 3)] + [
        f"{n}(-1)^{{n}}" for n in (2, 3, 5, 17)
    ]
    sided = [f"{n}\\frac{{|x|}}{{x}}" for n in (1, 2, 3, 5, 17)] + [f"{n} \\cdot 1^x" for n in (1, 2, 17)]
    mods = [f"{n} + (n \\bmod 2)" for n in (0, 1, 16)] + [f"{n}+\\sin(n\\pi)" for n in (0, 1, 17)]
    chains = ["4=5", "1=2=3=5", "0=1", "1=0", "2+2=5", "1 = 17", "x=1=2", "x = 4 = 5", "y = 0 = 1",
        "0 = 1 = 2 = 3 = 4 = 5", "1=2",
              "\\pi = 3", "\\pi = 3 = 17", "1 \\approx 17", "17 \\approx 18", "\\approx 17", "x \\approx 3",
              "0.33 \\approx 1/2",
              "1/2 = 0.25", "\\frac12 = 50\\%= 7", "x = y = 3", "a = b = c", "x=3, x=4", "x = 3 = x", "3 = x = 4",
              "1 \\ne 1",
              "\\text{a} = 5", "5 = 5 = 7", "i = 1", "e = 3", "1+1 = 3"]  # fmt: skip
    ranges = ["(-\\infty,\\infty)", "[-\\infty,\\infty]", "\\mathbb{R}", "-\\infty < x < \\infty",
        "0 \\le x \\le 1000", "0-100", "1-10",
              "1..100", "1 to 100", "between 0 and 100", "[0,100]", "0 < 17 < 100", "x < \\infty", "x > -\\infty",
              "x \\ne 0",
              "\\pm 1", "\\pm 17", "17 \\pm 1", "17 \\pm 0", "0 \\pm 17", "\\pm 0", "x \\pm x", "1 \\pm 1",
              "17 \\pm 17", "\\mp 3",
              "\\pm x", "\\pm\\sqrt{x^2}", "n \\pm n", "\\pm 1 \\pm 2"]  # fmt: skip
    return [*signs, *powers, *parities, *sided, *mods, *chains, *ranges]


def lists() -> list[str]:
    """Lists of everything."""
    numbers = [str(n) for n in range(21)]
    signed = [str(n) for n in range(-10, 11)]
    joins = (", ", " or ", " and ", "; ", " ", "\n", "/", " | ", " = ")
    found = [
        join.join(part)
        for join in joins
        for part in (numbers, signed, list("ABCD"), list("ABCDE"), ["yes", "no"], ["0", "1"])
    ]
    found += [f"\\{{{', '.join(part)}\\}}" for part in (numbers, signed, ["0", "1"])]
    found += [
        f"{a} or {b}"
        for a in ("0", "1", "2", "10", "17", "A", "B", "yes", "x")
        for b in ("1", "3", "18", "C", "no", "y")
    ]
    found += ["any number", "either 0 or 1", "one of 1, 2, 3", "not 17", "not 0", "anything but 3", "A and B",
        "(A), (B), (C), (D)",
              "A or B or C or D", "A/B/C/D", "ABCD", "A B C D", "A. B. C. D.", "A, but maybe B", "neither A nor B",
              "not A",
              "everything from 1 to 100", "heads or tails", "True or False", "yes/no", "Yes and no", "maybe yes",
              "1 2 3 4 5 6 7 8 9",
              "0 or 1 or 2 or 3 or 4 or 5"]  # fmt: skip
    return found


def constant_answers() -> list[str]:
    """All constant answers, each once: over a thousand."""
    return list(dict.fromkeys([*invisible_texts(), *empty_marks(), *constants(), *tricks(), *lists()]))


def hedges(gold: str, other: str) -> Iterator[str]:
    """The gold beside what takes it back or joins another to it; never right, whatever the gold."""
    for word in (
        "maybe",
        "perhaps",
        "not",
        "no",
        "wrong",
        "never",
        "or so",
        "or not",
        "no sixteen",
        "is wrong",
        "is not it",
    ):
        yield f"{gold} {word}"
    yield f"not {gold}"
    for joint in (" or ", " or maybe ", "/", " | ", " vs ", " \\ne "):
        yield f"{gold}{joint}{other}"
        yield f"{other}{joint}{gold}"
    for joint in ("? No, ", ", no, ", ". No: ", ", or rather "):  # the last word counts, if any does
        yield f"{gold}{joint}{other}"
    yield f"{other} instead of {gold}"
    yield f"either {gold} or {other}"
    yield f"neither {gold} nor {other}"
    yield f"{gold} \\text{{ or }} {other}"
    yield f"\\{{{gold}, {other}\\}}"
    yield f"{gold}\n{other}"
    yield f"{other}; {gold}"
    yield f"\\boxed{{{other}}} \\boxed{{{gold}}} \\boxed{{{other}}}"
    yield f"{gold} \\text{{ maybe}}"
    yield f"{gold} \\text{{ is wrong}}"
    yield f"{gold} \\pm {other}"
    yield f"\\begin{{cases}} {gold} \\\\ {other} \\end{{cases}}"
    yield f"{gold} \\text{{ if }} y > 0, {other} \\text{{ otherwise}}"
    yield f"{gold} \\ldots {other}"
    yield f"{gold} \\Rightarrow {other}"
    yield f"\\frac{{{gold}}}{{1}} \\text{{or}} {other}"


_UNIT_SWAPS = (("cm", "inches"), ("inches", "cm"), ("degrees", "radians"), ("hours", "minutes"), ("minutes",
    "hours"), ("feet", "yards"),
               ("meters", "feet"), ("cents", "dollars"), ("mph", "km"), ("square", "cubic"), ("miles", "km"),
               ("days", "weeks"),
               ("p.m", "a.m"), ("^2", "^3"), ("cubic", "square"), ("\\$", "€"), ("dollars", "cents"))  # fmt: skip


_REPLACED = (
    ("(", "["), ("[", "("), (")", "]"), ("]", ")"), ("\\{", "("), ("\\le", "<"), ("<", "\\le "), (">", "<"),
    ("\\cup", "\\cap"), ("sin", "cos"), ("\\sqrt", ""), ("\\pi", ""), ("i", ""), ("\\%", ""), ("\\pm", "+"),
    ("^2", "^3"), ("^", ""), ("\\frac", ""), ("\\circ", ""), ("=", "\\ne "), ("\\infty", "100"), ("e", ""),
    ("\\cdot", "+"),
)  # fmt: skip


def chains(gold: str, other: str) -> Iterator[str]:
    """Equations between things that differ. (A name may stand on the left: x = 3.)"""
    yield f"{other} = {gold}"
    yield f"{gold} = {other}"
    yield f"{other} = 1 = {gold}"
    yield f"{other}={other}={gold}"
    yield f"x = {other} = {gold}"
    yield f"{gold} = {other} = {gold}"


def mutations(gold: str, rng: random.Random) -> Iterator[str]:
    """The gold with one thing changed, which mostly changes what it means."""
    digits = list(re.finditer(r"\d", gold))
    for match in rng.sample(digits, min(2, len(digits))):
        yield gold[: match.start()] + str((int(match[0]) + rng.randint(1, 9)) % 10) + gold[match.end() :]
    if digits:
        yield gold[: digits[-1].end()] + "0" + gold[digits[-1].end() :]
        yield gold[: digits[0].start()] + gold[digits[0].end() :]
    yield f"-{gold}"
    yield f"-({gold})"
    if "-" in gold:
        yield gold.replace("-", "", 1)
        yield gold.replace("-", "+", 1)
    if "+" in gold:
        yield gold.replace("+", "-", 1)
    for old, new in _UNIT_SWAPS:
        if old in gold:
            yield gold.replace(old, new, 1)
    if word := re.search(
        r"(?<![\\A-Za-z])[A-Z]{2,4}(?![A-Za-z])|(?<=\\angle )[A-Z]{3}|(?<=\\text\{)[A-Za-z]{2,}", gold
    ):
        letters = list(word[0])
        for swapped in ([letters[1], letters[0], *letters[2:]], letters[::-1], [*letters[1:], letters[0]]):
            if swapped != letters:
                yield gold[: word.start()] + "".join(swapped) + gold[word.end() :]
    if variable := re.search(r"(?<![\\A-Za-z{])[a-z](?![A-Za-z])", gold):
        yield gold[: variable.start()] + ("t" if variable[0] != "t" else "u") + gold[variable.end() :]
        yield gold[: variable.start()] + f"|{variable[0]}|" + gold[variable.end() :]
        yield gold[: variable.start()] + f"(-{variable[0]})" + gold[variable.end() :]
    yield from _mutated_lists(gold)
    for old, new in _REPLACED:
        if old in gold:
            yield gold.replace(old, new, 1)
    if base := re.search(r"_\{?(\d+)\}?", gold):
        yield gold[: base.start()] + f"_{{{int(base[1]) + 1}}}"
        yield gold[: base.start()]
    if fraction := re.search(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", gold):
        yield gold[: fraction.start()] + f"\\frac{{{fraction[2]}}}{{{fraction[1]}}}" + gold[fraction.end() :]
    yield f"({gold})(-1)^n"
    yield f"({gold})(-1)^{{2n+1}}"
    yield f"({gold})\\frac{{|x|}}{{x}}"
    yield f"({gold})\\cos(n\\pi)"
    yield f"({gold})+\\frac{{1+(-1)^n}}{{2}}"
    yield f"({gold}) + 0^{{n-2}}"
    yield f"({gold})+10^{{-30}}"
    yield f"{gold} + C"
    yield f"{gold}x"
    yield f"2({gold})"
    yield f"7 = {gold}"
    yield f"1 = 2 = {gold}"
    yield f"{gold} = 987654"
    yield f"({gold}, {gold}, 987654)"


def _mutated_lists(gold: str) -> Iterator[str]:
    inner = re.fullmatch(
        r"(.*?(?:\\left)?(?:\(|\[|\\\{)|)([^()\[\]{}]+(?:,[^()\[\]{}]+)+)((?:\\right)?(?:\)|\]|\\\})|)", gold
    )
    if inner is None:
        return
    opening, body, closing = inner.groups()
    items = body.split(",")
    yield opening + ",".join(items[:-1]) + closing
    yield opening + ",".join(items[1:]) + closing
    yield opening + ",".join([*items, "987654"]) + closing
    yield opening + ",".join(items[::-1]) + closing
    yield opening + ",".join([items[-1], *items[1:-1], items[0]]) + closing
    yield opening + ",".join([items[0]] * len(items)) + closing


def copies(question: str, template_marks: Sequence[str] = ("<answer>", "</answer>", "\\boxed{}")) -> Iterator[str]:
    """What stands in the prompt, given back."""
    yield question
    yield question[:200]
    yield question.split("?")[0][-150:]
    yield from template_marks
    yield "<think> the reasoning </think> <answer> the final answer </answer>"
    yield "the final answer"
    numbers = re.findall(r"\d+", question)
    if len(numbers) > 1:
        yield ", ".join(numbers)
        yield " or ".join(numbers)


def near(golds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of golds that share their digits and letters, whatever stands between them."""
    buckets: dict[str, list[str]] = {}
    for gold in golds:
        buckets.setdefault("".join(sorted(re.sub(r"\\[A-Za-z]+|[^0-9A-Za-z]", "", gold))), []).append(gold)
    for bucket in buckets.values():
        for place, one in enumerate(bucket[:40]):
            for other in bucket[:40]:
                if other != one and bucket.index(other) != place:
                    yield one, other


def _lines(block: str) -> list[str]:
    return block.strip("\n").splitlines()
