"""Constants far from 1: exact values, logarithms and forms decide where evaluated digits drown them."""

from __future__ import annotations

import pytest

from posttrain.graders.math.equality import compare_answers
from posttrain.graders.math.magnitudes import MAX_SPAN, digits_spanned, exact_value
from posttrain.graders.math.values import parse_latex

SAME = r"""
x=2^{2024} ~~ x=4^{1012}
x=2^{2024} ~~ 2^{2024}=x
x=2^{20240} ~~ x=4^{10120}
2^{20240} ~~ 4^{10120}
N=50! ~~ N=50\cdot 49!
y=x+10^{60} ~~ x=y-10^{60}
y=x+10^{60} ~~ 2y=2x+2\cdot 10^{60}
y=(x-a)^{6000} ~~ y=(a-x)^{6000}
y=(x-a)^{6000} ~~ y=(x-a)^{5999}(x-a)
2^{3^{100}} ~~ 8^{3^{99}}
2^{3^{100}}+1 ~~ 1+2^{3^{100}}
(x-a)^{60000} ~~ (x-a)^{60000}
y=(x-a)^{60000}+1 ~~ y=1+(x-a)^{60000}
1000! ~~ 1000\cdot 999!
x>2^{2024} ~~ 2^{2024}<x
x>2^{2024} ~~ x>4^{1012}
100000! ~~ 100000!
x^2+y^2=10^{120} ~~ y^2+x^2=10^{120}
y=e^{1000x} ~~ y=(e^{x})^{1000}
x=10^{-60} ~~ x=\frac{1}{10^{60}}
1+2=3 ~~ 3
x=3 ~~ 1+2=3
x=1/2 ~~ 1/2=0.5
x=e^{200} ~~ x=(e^{2})^{100}
3^{10^9} ~~ 3^{10^9}
2^{2^{20}} ~~ 4^{2^{19}}
x=2^{2^{20}} ~~ x=4^{2^{19}}
y=x^{6000}+1 ~~ y=1+x^{6000}
2^{2024}x=1 ~~ x=2^{-2024}
\frac{100!}{98!} ~~ 9900
\frac{2^{20000}}{2^{19999}} ~~ 2
1=x ~~ x=1
x=1 ~~ x=1=1
y=(x-a)^{6000}-1 ~~ y+1=(x-a)^{6000}
x=10^{60}+1 ~~ x-1=10^{60}
P=1-\frac{1}{2^{2024}} ~~ P=\frac{2^{2024}-1}{2^{2024}}
x^{6000}=2^{6000} ~~ 2^{6000}=x^{6000}
y=\ln(x+10^{60}) ~~ y=\ln(10^{60}+x)
x=2^{10^{10}} ~~ x=4^{5\cdot 10^{9}}
y=x+2^{10^{10}} ~~ y=2^{10^{10}}+x
x=10^{10}! ~~ x=10^{10}!
z=10^{60}+i ~~ z=i+10^{60}
3x=3\cdot 2^{2024} ~~ x=2^{2024}
x=\sqrt{10^{120}} ~~ x=10^{60}
\frac{50!}{48!} ~~ 2450
x=\log_{10} 10^{60} ~~ x=60
"""
DIFFERENT = r"""
x=2^{2024} ~~ x=3^{2024}
x=10^{60} ~~ x=-10^{60}
N=50! ~~ N=51!
x>2^{2024} ~~ x>2^{2025}
y=x+10^{60} ~~ y=2x+10^{60}
y=(x-a)^{6000} ~~ y=(x-a)^{5999}
y=10^{60}x+x^2 ~~ y=10^{60}x+2x^2
1+10^{-60}x ~~ 1+2\cdot10^{-60}x
y=1+10^{-60}x ~~ y=1+2\cdot 10^{-60}x
x<10^{60} ~~ x<10^{61}
(x,y)=(2^{500},3^{500}) ~~ (x,y)=(2^{501},3^{500})
x=2^{2024}, y=1 ~~ x=3^{2024}, y=1
f(x)=x+10^{80} ~~ f(x)=x-10^{80}
\{10^{60}\} ~~ \{10^{61}\}
x=2^{20240} ~~ x=2^{20241}
2^{20240} ~~ 2^{20240}+1
2^{3^{100}} ~~ 2^{3^{100}}+1
2^{3^{100}} ~~ 3^{3^{100}}
x=1000! ~~ x=1001!
x=100000! ~~ x=100001!
y=(x-a)^{60000} ~~ y=(x-a)^{59999}
y=e^{1000x} ~~ y=e^{1001x}
y=x^{6000}+1 ~~ y=x^{6000}+2
(x-1)^{6000} ~~ (x-1)^{6000}+1
2^{2024}<x<2^{2025} ~~ 2^{2024}<x<2^{2026}
x \ne 2^{2024} ~~ x\ne 3^{2024}
x^2+y^2=10^{120} ~~ x^2+2y^2=10^{120}
x+10^{60}=y ~~ x+10^{60}=-y
x=-2^{2024} ~~ x=2^{2024}
x=10^{-60} ~~ x=-10^{-60}
x=10^{-60} ~~ x=2\cdot 10^{-60}
x=10^{-60} ~~ x=0
y = 10^{-60}x ~~ y=0
10^{-60}x ~~ 2\cdot 10^{-60} x
x=e^{200} ~~ x=e^{201}
y=x+e^{200} ~~ y=2x+e^{200}
x=\binom{1000}{500} ~~ x=\binom{1000}{499}
x=2^{2^{20}} ~~ x=2^{2^{20}}+1
y = \frac{x}{10^{60}}+1 ~~ y=\frac{2x}{10^{60}}+1
3^{10^{9}} ~~ 3^{10^{9}}+2
x=3^{10^{9}} ~~ x=3^{10^{9}}+2
(x-a)^{10^9} ~~ (x-a)^{10^9+1}
x=1+10^{-60} ~~ x=1
y=x+10^{60000} ~~ y=2x+10^{60000}
x=\sqrt{10^{120}+1} ~~ x=10^{60}
x\le 50! ~~ x\le 51!
2^{2024}x+1=0 ~~ 2^{2024}x+2=0
2^{2024}x=1 ~~ 2^{2025}x=1
x = 0.\overline{3}+10^{70} ~~ x=0.3+10^{70}
\begin{pmatrix}10^{60}\\1\end{pmatrix} ~~ \begin{pmatrix}10^{61}\\1\end{pmatrix}
f(x)=x^{2000} ~~ f(x)=x^{2001}
y=\sin x+10^{60} ~~ y=\cos x+10^{60}
\ln x=10^{60} ~~ \ln x = -10^{60}
n=10^{100} ~~ n=10^{100}+1
x=1 \text{ or } x = 10^{60} ~~ x=1 \text{ or } x=-10^{60}
y=\frac{10^{60}x+1}{10^{60}x+2} ~~ y=\frac{10^{60}x+1}{10^{60}x+3}
x=10^{60}+1 ~~ x=10^{60}+2
x=\frac{10^{100}+1}{10^{100}} ~~ x=\frac{10^{100}+2}{10^{100}}
x=10^{6000} ~~ x=10^{6001}
x=10^{6000} ~~ x=-10^{6000}
x=2^{-2024} ~~ x=3^{-2024}
x\in(0,2^{-2024}) ~~ x\in (0,3^{-2024})
y=x\cdot 2^{2024}+1 ~~ y=x\cdot 2^{2024}+2
a_n=2^{2024}n+1 ~~ a_n=2^{2024}n+3
y=\sqrt{x+10^{60}} ~~ y=\sqrt{2x+10^{60}}
y=\ln(x+10^{60}) ~~ y=\ln(2x+10^{60})
y=e^{x}+10^{60} ~~ y=e^{2x}+10^{60}
y=2^{1000x}+1 ~~ y=2^{1000x}+2
|x|<10^{60} ~~ |x|<10^{61}
y=(x+1)^{100} ~~ y=(x+1)^{101}
y=x^{-6000} ~~ y=x^{-5999}
y=\left(1+10^{-60}\right)^{x} ~~ y=\left(1+2\cdot10^{-60}\right)^{x}
x=10^{60}i ~~ x=-10^{60}i
z=10^{60}+i ~~ z=10^{60}+2i
z=10^{60}+i ~~ z=10^{60}-i
10^{60}+i ~~ 10^{60}-i
10^{80}+\sqrt{2} ~~ 10^{80}+\sqrt{3}
2^{2024}\pmod{7} ~~ 3^{2024} \pmod 7
x=2^{10^{10}} ~~ x=3^{10^{10}}
y=x+2^{10^{10}} ~~ y=2x+2^{10^{10}}
y=x+2^{10^{10}} ~~ y=x+3^{10^{10}}
x=10^{10}! ~~ x=10^{10}!+1
x=20!! ~~ x=21!!
x=\frac{1}{50!} ~~ x=\frac{1}{51!}
x=\pm 10^{60} ~~ x=10^{60}
x^{10^{9}}=1 ~~ x^{10^{9}+1}=1
x^{1000}=1 ~~ x^{1001}=1
x^{6000}=2^{6000} ~~ x^{6000}=3^{6000}
\frac{x}{2^{2024}}=\frac{y}{3^{2024}} ~~ \frac{x}{3^{2024}}=\frac{y}{2^{2024}}
x \equiv 10^{60} ~~ x\equiv 10^{61}
x+y=10^{60}, x-y=1 ~~ x+y=10^{61}, x-y=1
\begin{cases}x+y=10^{60}\\x-y=1\end{cases} ~~ \begin{cases}x+y=10^{61}\\x-y=1\end{cases}
f(x)=\begin{cases}10^{60}x & x>0\\ 0 & x\le 0\end{cases} ~~ f(x)=\begin{cases}10^{61}x & x>0\\ 0 & x\le 0\end{cases}
\{x: x>10^{60}\} ~~ \{x: x>10^{61}\}
(10^{60},\infty) ~~ (10^{61},\infty)
[-10^{60},10^{60}] ~~ [-10^{60},10^{61}]
10^{60}:1 ~~ 10^{61}:1
y=\sum_{k=1}^{100}k! ~~ y=\sum_{k=1}^{99}k!
P=1-\frac{1}{2^{2024}} ~~ P=1-\frac{1}{2^{2025}}
1-2^{-2024} ~~ 1
P=1-2^{-2024} ~~ P=1
"""
# Equations that give no name a value.
SAY_NOTHING = r"""
x=1 ~~ 1=1
x=1 ~~ 1=1=1
x=2 ~~ 2 = 2
x=1 ~~ 2=2
x=1 ~~ x=x
x=1 ~~ 0=0
"""


def pairs(table: str) -> list[tuple[str, str]]:
    rows = [tuple(line.split(" ~~ ")) for line in table.strip().splitlines()]
    return [(gold, answer) for gold, answer in rows]


@pytest.mark.parametrize(("gold", "answer"), pairs(SAME))
def test_compare_answers_huge_constants_same_value_is_right(gold: str, answer: str) -> None:
    assert compare_answers([gold, answer, 0.0])
    assert compare_answers([answer, gold, 0.0])


@pytest.mark.parametrize(("gold", "answer"), pairs(DIFFERENT))
def test_compare_answers_huge_constants_other_value_is_wrong(gold: str, answer: str) -> None:
    assert not compare_answers([gold, answer, 0.0])
    assert not compare_answers([answer, gold, 0.0])


@pytest.mark.parametrize(("gold", "answer"), pairs(SAY_NOTHING))
def test_compare_answers_equation_of_equal_sides_is_wrong(gold: str, answer: str) -> None:
    assert not compare_answers([gold, answer, 0.0])


@pytest.mark.parametrize(
    ("latex", "low", "high"),
    [("x+1", 0, 8), ("10^{60}+x", 60, 66), ("10^{-60}x", 60, 66), ("50!", 64, 66), ("(x-a)^{6000}", 12_000, 12_010)],
)
def test_digits_spanned_bounds_the_distance_of_terms(latex: str, low: int, high: int) -> None:
    assert low <= digits_spanned(parse_latex(latex)) <= high


def test_exact_value_beyond_its_limit_is_none() -> None:
    assert exact_value(parse_latex("2^{20}+1")) == 2**20 + 1
    assert exact_value(parse_latex("2^{10^{9}}")) is None
    assert digits_spanned(parse_latex("2^{10^{9}}")) > MAX_SPAN
