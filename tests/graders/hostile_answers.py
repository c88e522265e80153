"""Answers that are meant to hang, crash or fool a grader. None of them is right for any of ``GOLDS``."""

from __future__ import annotations

from pathlib import Path

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
    groups = (towers(), factorials(), megabytes(), many_parts(), nested(), lines(EVALUATIONS), code(canary))
    return [answer for group in (*groups, lookalikes(), stuffing(), lines(BROKEN), BLANK) for answer in group]


def lines(block: str) -> list[str]:
    return block.strip("\n").splitlines()


def towers() -> list[str]:
    """Powers that no memory holds."""
    found = ["^".join(["9"] * n) for n in (3, 4, 5, 20, 200)] + ["**".join(["7"] * n) for n in (3, 4, 50, 300)]
    found += ["9^{" * n + "9" + "}" * n for n in (2, 3, 4, 5, 8, 20, 60)]
    found += [f"x^{{{10**n}}}" for n in (6, 12, 100)] + [f"(x+1)^{{{10**n}}}" for n in (4, 6, 9)]
    return found + lines(
        r"""
9**9**9
2**10000000000
2^{10000000000}
2^{-10000000000}
10^{10^{10}}
10^{10^{10^{10}}}
(1+\frac{1}{10^{9}})^{10^{9}}
\sqrt{2}^{\sqrt{2}^{\sqrt{2}^{\sqrt{2}}}}
e^{e^{e^{e^{e}}}}
0^{-1}
0^{0^{-1}}
(-1)^{0.5^{0.5^{0.5}}}
i^{i^{i^{i^{i}}}}
1e999999999
1e-999999999
10^{300000000} \mod 7
"""
    )


def factorials() -> list[str]:
    """Factorials and binomials."""
    found = [f"\\binom{{{10**n}}}{{{10**n // 2}}}" for n in (5, 7, 10, 12)] + ["5" + "!" * 50, "x" + "!" * 8]
    return found + lines(
        r"""
9999999!
99999999999999999999!
((9!)!)!
(((3!)!)!)!
9!!!!
\frac{9999999!}{9999998!}
\binom{\binom{99}{50}}{7}
\Gamma(10^{100})
C(1000000000, 500000000)
\gcd(10^{1000}!, 7)
"""
    )


def megabytes() -> list[str]:
    """Long texts."""
    million = 10**6
    repeated = (
        "9",
        " ",
        "\\",
        "x",
        "$",
        ".",
        "\x00",
        "1,",
        "+1",
        "a b ",
        "{}",
        "\\{",
        "\\boxed{",
        "<answer>",
        "</answer>",
    )
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
EVALUATIONS = r"""
\sum_{n=1}^{\infty} \frac{1}{n^{1.0001}}
\sum_{k=1}^{10^{12}} k^{k}
\sum_{k=0}^{\infty} \frac{(k!)^2 \sin(k)}{(2k)!}
\sum_{i=1}^{1000000000} \frac{1}{i}
\sum_{k=1}^{10000000} \frac{\sin(k)}{k}
\sum_{k=1}^{10000000} \frac{1}{k^{k}+1}
\prod_{k=1}^{1000000} (2 + \frac{1}{k!})
\prod_{k=1}^{1000000} (1 + \frac{1}{k!})
\int_0^{\infty} e^{-x^x} dx
\int \sin(\sin(\sin(x^x))) dx
\int_0^1 \int_0^1 \frac{1}{1 - xy \sin(x^y)} dx dy
\int_{-\infty}^{\infty} \frac{\sin(x^{17}+x)}{x^{13}+\cos x} dx
\lim_{x \to 0} \frac{\sin(\tan x) - \tan(\sin x)}{\arcsin(\arctan x) - \arctan(\arcsin x)}
\lim_{n \to \infty} \frac{n!}{n^{n}} e^{n^{n}}
\lim_{x \to \infty} x^{x^{x^{x}}}
\frac{d}{dx} x^{x^{x^{x^{x^{x}}}}}
\operatorname{eye}(100000)
\operatorname{zeros}(100000, 100000)
\operatorname{diagonalize}(\begin{pmatrix}1&2&3\\4&x&6\\7&8&y\end{pmatrix})
\operatorname{svd}(\begin{pmatrix}a&b\\c&d\end{pmatrix})
\tan(10^{30})^{\tan(10^{31})^{\tan(10^{32})}}
\cos(\cos(\cos(\cos(10^{10^{5}}))))
\log(\log(\log(\log(2))))
\sin(10^{10^{10}})
\lfloor 10^{10^{8}} \cdot \pi \rfloor
\frac{1}{\sin(\pi \cdot 10^{50}) }
"""


def code(canary: Path) -> list[str]:
    """Text that is harmless only while nobody runs it."""
    block = r"""
__import__('os').system('touch CANARY')
exec("open('CANARY','w')")
eval("open('CANARY','w')")
(lambda: open('CANARY','w'))()
[open('CANARY','w') for _ in (1,)]
getattr(__builtins__, 'open')('CANARY', 'w')
().__class__.__base__.__subclasses__()[0] or open('CANARY','w')
sympify("open('CANARY','w')")
1; open('CANARY','w')
1 if open('CANARY','w') else 2
x := open('CANARY','w')
{open('CANARY','w'): 1}
\operatorname{exec}(open('CANARY','w'))
\text{open('CANARY','w')}
\input{|"touch CANARY"}
\write18{touch CANARY}
$(touch CANARY)
`touch CANARY`
'; touch CANARY; '
exit()
quit()
breakpoint()
os._exit(0)
raise SystemExit
raise KeyboardInterrupt
while True: pass
import time; time.sleep(1e9)
lambda x: x
\sum_{n=0}^{\infty} (\operatorname{exit}(3))^{n}
\sum_{n=0}^{\infty} (\operatorname{exec}(\operatorname{chr}(49)))^{n}
\operatorname{breakpoint}()
{{7*7}}
${7*7}
%s%s%s%n
'; DROP TABLE rollouts; --
"""
    return lines(block.replace("CANARY", str(canary)))


def lookalikes() -> list[str]:
    """Characters that look like others, hide, or are none."""
    found = ["４２", "٤٢", "४२", "𝟒𝟐", "⁴²", "④②", "4\u200b2", "4\u20602", "\u202e24", "42\x00", "\x0042", "4\x002"]
    found += ["42\ufeff\u200d", "х+1", "ｘ+１", "x\u0338+1", "½½", "¹⁄₂", "⅟2", "уеs", "ｙｅｓ", "y\u0435s", "ye\u0455"]
    found += ["Ⅻ", "\\frac{l}{2}", "(1‚2)", "\ud800", "42\ud800", "\udfff1", "\ud83d", "x+\ud8001", "\\text{\udc00}"]
    found += ["\x1b[2J42\x1b[0m", "4\b42", "\x7f", "［0,1)", "{1，2}", "y ＝ 2x ＋ 3", "∑∑∑∑", "∞∞", "🤖" * 100]
    return [*found, "ﷺ" * 200, "a\u0301" * 200, "Z\u0351\u036b\u0343\u036a\u0302A\u0334\u0335L\u0320\u0368G\u0334O"]


def stuffing() -> list[str]:
    """Many answers for one."""
    every = ("42", "1/2", "x+1", "(1,2)", "yes", "[0,1)", "7")
    return [mark.join(every) for mark in (" or ", ", ", " and ", "; ", "/", " ", "\n", " = ")] + lines(
        r"""
42 or 43
41, 42
42; 42.5
42 43
42/43
42 = 43
42 \text{ or } 43
\{42, 43\}
(42, 43)
42 \cup 43
42 \pm 1
42 (or 43)
either 42 or 43
42, maybe 43
42?43
42|43
42&43
42 \approx 43 = 44
42:43
[42, 43]
420
4 2
-42
42x
42 = 42 = 41
x+1, x+2
x+1 \text{ or } x-1
x+c
x+1+\epsilon
X+1
\frac{1}{2} or \frac{1}{3}
\frac{1}{2}, 0.6
1/2 1/3
0.5000001
(1,2) or (2,1)
(1,2), (2,1)
(a,b)
(1,2,3)
[1,2]
(1,2]
(2,1)
\{1,2,3\}
\{1\}
\{\{1,2\}\}
yes or no
yes and no
yes, no
\text{yes or no}
not yes
yes?no
[0,1]
(0,1)
(0,1]
[0,1) \cup (1,2]
y = 2x + 3 or y = 3x
y = 2x
y = 2x + 3 = 4
z = 2x + 3
y > 2x + 3
y \ne 2x+3
1 + \sqrt{19}
\pm \sqrt{19}
2^{2005} + 1
2^{2004}
2^{2005} - 10^{-9}
2^{2005} \cdot (1 + 10^{-300})
"""
    )


BLANK = ("", " ", "\n", "\t \r\n")
# Pieces.
BROKEN = r"""
.
,
$
$$
\
\\
{
}
(
)
\boxed{}
\boxed{
\frac
\frac{1}
\frac{}{}
\sqrt
\sqrt{}
^
_
^_^
x^
=
= 42 =
<
\le
\in
x \in
\cup
\text{
\text{}
\begin{pmatrix}
\end{pmatrix}
\begin{pmatrix}&&\\&\end{pmatrix}
\begin{foo}1\end{foo}
\left(
\right)
1 +
* 3
/
1//2
--
!
nan
NaN
inf
-\infty
zoo
None
True
null
undefined
1/0
0/0
\frac{0}{0}
\frac{1}{0}
\tan(\pi/2)
\unknowncommand{1}
\def\x{42}\x
\newcommand{\y}{42}\y
\csname
\catcode`\%=12
%42
42%%
#42
&42
"""
