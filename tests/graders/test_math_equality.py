"""Which answers mean the same, by hand: each line is a claim about mathematics or about what people leave out."""

from __future__ import annotations

import pytest

from posttrain.graders.math.equality import compare_answers

SAME = r"""
p=5,q=2;p=7,q=2 | (5,2),(7,2)
p=5,q=2;p=7,q=2 | (7,2),(5,2)
2/4 | 1/2
.5 | 50%
0.5 | \frac{1}{2}
\frac{3}{4} | \frac{6}{8}
10^{3} | 1000
1000 | 1,000
1{,}000 | 1,000
11,\! 111,\! 100 | 11111100
2\frac{1}{2} | 5/2
11 \frac{2}{3} | 35/3
2 1/2 | 2.5
5! | 120
2^{10} | 1024
2^{2005} | 2\cdot 2^{2004}
\frac{100!}{2^{50}} | 100!/2^50
\frac{1}{2004!} | 1/2004!
\$10\pi | 10\pi \text{ dollars}
4 | \sqrt{16}
\sqrt{12} | 2\sqrt3
3\sqrt[3]3 | 3^{4/3}
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2}
\sqrt{5 + 2\sqrt{6}} | \sqrt{2} + \sqrt{3}
\log_2 8 | 3
e^{i\pi} | -1
1+2i | 2i+1
(1+i)^2 | 2i
\frac{3}{2} + \frac{3}{2} i | \frac{3+3i}{2}
\cos 58^\circ | \sin 32^\circ
\cos(6^\circ)\sin(12^\circ)\csc(18^\circ) | \frac{\cos 6^\circ \sin 12^\circ}{\sin 18^\circ}
x^2-1 | (x-1)(x+1)
\frac{x+2}{7} | \frac{x}{7}+\frac{2}{7}
xy | yx
2x | x \cdot 2
(r+5)^2 | (r+5)(r+5)
k\left(4 k^{2}+k-1\right) / 2 | \frac{4k^3+k^2-k}{2}
x | \sqrt{x}^2
\sqrt[3]{x}^2 | x^{2/3}
\log(x^2) | 2\log x
2 \sin 5x \cos x | 2\cos(x)\sin(5x)
\sin^2 t | 1-\cos^2 t
\sin 2t | 2 \sin t \cos t
\binom{n}{2} | \frac{n(n-1)}{2}
n! | n(n-1)!
(-1)^n | \cos(n\pi)
\sum_{k=1}^{n} k | \frac{n(n+1)}{2}
\lfloor n/2\rfloor | \lfloor \frac{n}{2} \rfloor
3 - 2f(x) | -2f(x)+3
|x-1| | |1-x|
\{1,2,3\} | \{3,2,1\}
\{1,2,3\} | 3, 2, 1
\{5\} | 5
\emptyset | \{\}
\{\frac{1}{2}, 2\} | \{2, 0.5\}
\{1\pm\sqrt5,-2\} | \{-2,1-\sqrt5,1+\sqrt5\}
1, -2 | -2 \text{ and } 1
12 \text{ and } 13 | 13, 12
\pm 2021 | -2021, 2021
1 \pm \sqrt{19} | 1-\sqrt{19}, 1+\sqrt{19}
3 \mp 2 | 5 \text{ or } 1
(1,3) | 1,3
(1, 4.5) | \left(1, \frac{9}{2}\right)
\langle 1, 2 \rangle | (1,2)
(6,235^\circ) | (6,235)
(3,3), (1,1) | (1,1), (3,3)
[1,2] | [1, 4/2]
x \in [1,2] | [1,2]
[0,1] | 0 \le x \le 1
(-\infty,3) | x<3
(5, \infty) | (5, +\infty)
(-\infty,-2)\cup(3,\infty) | (3,\infty) \cup (-\infty, -2)
(-\infty,-2)\cup(3,\infty) | x<-2 \text{ or } x>3
(-\infty,3)\cup(3,\infty) | x \ne 3
\{-1\} \cup [0,7) | [0,7) \cup \{-1\}
(-\infty, 2) \cup (2, \infty) | (-∞, 2) U (2, ∞)
x=3 | 3
3 | x=3
11 | x \approx 11
1/3 | x = 1/3 \approx 0.33
f(x)=2x | 2x
f(x)=2x | f(x)=x+x
y=2x+3 | 2x-y+3=0
x+y-z+2=0 | 2x+2y-2z+4=0
x^2/4 + y^2/3 = 1 | x^2/16 + y^2/12 = 1/4
x<1 | -x>-1
x\le5 | 5 \geq x
s^2 \le 8r^2 | 8r^2 \ge s^2
x=2,x=-3 | -3, 2
x=2,x=-3 | x=-3 \text{ or } x=2
AB=4,CD=5 | 4,5
AB=4,CD=5 | CD=5, AB=4
(p,q)=(3,2) | (3, 2)
n=1, 2, 3 | 3, 2, 1
S_{MBCN}:S=7:32 | 7:32
5 | 3 + 2 = 5
0.56 = 56\% | 56%
28\% | 28 \text{ percent}
28\% | 0.28
10 | 10\%
144 \mbox{ m}^3 | 144
864 \mbox{ inches}^2 | 864 square inches
5 \text{ cm} | 5 centimeters
\frac{270}7\text{ degrees} | 270/7
90^\circ | 90
36 | 36 degrees
10\pi \text{ feet} | 10 \pi
17 | 17 \text{ students}
1.85\ \text{USD} | \$1.85
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\4/2\end{bmatrix}
\frac{1}{5}\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1/5 \\ 2/5 \end{pmatrix}
\begin{pmatrix} \sin^2 x & 0 \\ 0 & 1\end{pmatrix} | \begin{pmatrix} 1-\cos^2 x & 0 \\ 0 & 1\end{pmatrix}
101_2 | 101_{2}
101_2 | 101_{\text{two}}
1:2 | \frac12
1:2 | 1 : 2
\text{even} | Even
\text{Evelyn} | \textbf{evelyn}.
\text{no solution} | No solution
\text{(C)} | C
(\text{E}) | E
\text{A,B} | A, B
\text{4:30 p.m.} | 4:30 PM
\mathrm{E} | E
\text{e} | e
\dfrac{1}{3} | \frac13
x^{(2)} | x^2
\\frac{1}{2} | \frac{1}{2}
\sqrt{ab} | \sqrt a\sqrt b
i\sqrt{ab} | i\sqrt a\sqrt b
|c|\sqrt{ab} | |c|\sqrt a\sqrt b
\sqrt{x^2-1} | \sqrt{x+1}\sqrt{x-1}
\sqrt{x-1000}\sqrt{x-2000} | \sqrt{(x-1000)(x-2000)}
\ln(a^2 b) | 2\ln a+\ln b
\ln x^2 | 2\ln|x|
\frac1{\sqrt x} | \frac{\sqrt x}{x}
x^n x^m | x^{m+n}
|x-1| | \sqrt{x^2-2x+1}
\sqrt[3]{-8} | -2
\sqrt[3]{-x} | -\sqrt[3]{x}
(-1)^{m+n} | (-1)^{m-n}
(-1)^{2n} | 1
(-2)^n | (-1)^n 2^n
(-1)^{\frac{n(n-1)}{2}} | (-1)^{\lfloor n/2 \rfloor}
\lfloor n/2 \rfloor | \frac{n}{2}-\frac{1-(-1)^n}{4}
y=\sqrt{ab} | y=\sqrt a\sqrt b
ia=b | a=-ib
\begin{cases} x & x>0 \\ -x & x\le 0\end{cases} | \begin{cases} -x & \text{if } 0 \ge x, \\ x & x>0. \end{cases}
\begin{cases} 1 & n \text{ even} \\ 0 & a\end{cases} | \begin{cases} 0 & a \\ 1 & \text{if $n$ is even}\end{cases}
\begin{cases} x=1 \\ y=2 \end{cases} | x=1, y=2
x+11 | x+11, 11+x
\angle ABC | \angle CBA
\angle ABC = 30 | \angle CBA = 30
\triangle ABC | \triangle BAC
5 | \approx 5
\frac13 | 0.\overline{3} = \frac13
0.33 | x = \frac13 = 0.33
0.5 | 50\text{ cm} = 0.5\text{ m}
5 | \text{Area} = 2 + 3 = 5
3 | \sum_{k=1}^2 k = 3
\frac{NO}{BO} = \frac12 | \frac12
x-axis | \text{x axis}
V = IR | V = I R
I_1 + I_2 | I_2 + I_1
2x | \frac{d}{dx} x^2
\frac{dy}{dx} = 2x | 2x = \frac{dy}{dx}
3 | x = y = 3
AB = 5 | AB = CD = 5
\emptyset | S = \emptyset
\emptyset | A \cap B = \emptyset
\$2 | 200 \text{ cents} = \$2
\$5 | 3\text{ tickets} = \$5
90 | 1.5\text{ hours} = 90\text{ minutes}
6.62 | \text{Area of 2 squares} = 6.62
63 | (9)(7)
63 | 9(7)
-5 | (-1)(5) = -5
1 | 2(\frac{1}{2})
7.5 | 1\frac{1}{2}(5)
\frac{5\pi}{2} | 2\frac{1}{2}\pi
30 | 3 \cdot 2(5)
9 | \log_2^2 8
\ln 2 | \log_e 2
5 | 10^{\log 5}
x^{4}-16 | (x-2)(x+2)(x^2+4) = x^4 - 16
160000 | 10^4 \cdot 2^4 = 10,000 \cdot 16 = 160,000
1200 | f(3) = 1,200
2 \sin 5x \cos x | 2 \cdot \sin{\left(5 \cdot x \right)} \cdot \cos{\left(x \right)}
2 \sin 5x \cos x | 2 \sin 5x \cdot \cos x
y \sin x | \sin{x} \cdot y
\ln(2)\ln(3) | \ln 2 \cdot \ln 3
\frac{\log(3)}{2} | \log{(3)}/2
\frac{3}{\pi}\ln 2 | 3/\pi \cdot \ln 2
\sin(2\sin(x)) | \sin{(2\sin{(x)})}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | (1,2)
\begin{pmatrix} 1 & 2 & 3 \end{pmatrix} | \langle 1,2,3 \rangle
(-\infty, \infty) | \mathbb{R}
(-\infty, \infty) | \text{all real numbers}
x \in \mathbb{R} | (-\infty, \infty)
\mathbb{R} | -\infty < x < \infty
\begin{pmatrix} 1 & 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}^T
e^{T+1} | e \cdot e^T
\sqrt{13} | √13
\sqrt{13} | sqrt13
0.0003 | 3 × 10⁻⁴
x^4+1 | x⁴+1
1011_2 | 1011₂
\frac{11}{4} | 2¾
\frac12 | 1⁄2
2 | ∛8
\frac13 | 0.\overline{3}
\frac16 | 0.1\overline{6}
1 | 0.\bar{9}
-\frac{34}{99} | -0.\overline{34}
\frac12 | \large\frac{1}{2}
\frac12 | \bm{\frac12}
\frac12 | \nicefrac{1}{2}
5 | \color{red}{5}
5 | \textcolor{blue}{5}
5 | \underline{5}
5 | 5 \tag{1}
6 | {4 \choose 2}
7 | 7^{\text{th}}
7 | 7th
25 | 25 °C
45 | 45º
4 | x_{\text{min}} = 4
12 | a+b=12
12 | a + b = 5 + 7 = 12
12 | 12 = m + n
12 | 100a+10b+c = 12
7 | a^2+b^2=7
7 | f(2)+f(3)=7
9 | x_1 - x_2 = 9
1,2 | x_1 = 2, x_2 = 1
(-\infty,0)\cup(0,\infty) | \mathbb{R}\setminus\{0\}
(-\infty,0)\cup(0,\infty) | \mathbb{R} - \{0\}
(-\infty, 2] | \{x \mid x \le 2\}
(-\infty, 2] | \{x \in \mathbb{R} : x \le 2\}
\emptyset | \text{no solution}
\text{no solution} | \text{No solutions}
\text{DNE} | \text{does not exist}
\infty | \text{infinity}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{bmatrix} 1 & 2 \\[4pt] 3 & 4 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{smallmatrix} 1 & 2 \\ 3 & 4 \end{smallmatrix}
12 | \textbf{(C)}\ 12
12 | \text{(C) 12}
\text{(C)} | \textbf{(C) } 12
"""

DIFFERENT = r"""
7530 | \text{(A)} or 7530
7530 | \text{(A)}; 7530
7530 | \text{(A)}, 7530
p=5,q=2;p=7,q=2 | (5,7),(2,2)
p=5,q=2;p=7,q=2 | (2,5),(2,7)
p=5,q=2;q=7,p=2 | (5,2),(7,2)
5 | 5m^2
5 | 5x^2
x | y
X | x
a_1 | a_2
(a,b) | (c,b)
2x | 2y
x^2 | x^3
|x| | x
\sqrt{x^2} | x
x | x + 10^{-40}
2^{2005} | 2^{2005}+1
9^{9^{9}} | 9^{9^{9}}+1
\frac{1}{3} | 0.333333333333
\pi | 3.14159265358979
e | 2.718281828
3-2i | 3+2i
1 | 1.0000000000000000000000000000001
\cos 58^\circ | \cos 58
\sin x | \cos x
x^{1/3} | \sqrt{x}
\lceil n/2\rceil+1 | \lfloor n/2 \rfloor+1
\binom{n}{2} | \binom{n}{3}
42 | 4 2
12, 3 | 1 2, 3
1,2 | 1,2,3
1,2,3 | 1,2
5 | 1 or 2 or 5
5 | 5, 6
n^2-18 | n^2-18 \text{ or } 5
(3,1) | 1,3
(3,1) | (1,3)
(3,1) | \{1,3\}
(1,2) | (1,2,3)
[1,2] | (1,2)
[0,1) | (0,1]
(-\infty, 3] | x<3
x>2 | x\ge 2
0<x<1 | 0 \le x<1
x \in [0,1] | y \in [0,1]
s^2 \le 8r^2 | s^2 \ge 8r^2
s^2 \le 8r^2 | s^2 < 8r^2
(0,1) \cup (1,2) | (0,2)
\infty | -\infty
x=3 | y=3
5 | 2x = 5
7 = 11a+c | 11a+c
f(x)=2x | g(x)=2x
y=2x | y=3x
y=2x | y>2x
x+y-z+2=0 | x+y-z+3=0
x^2+y^2=13 | x^2+y^2=14
AB=4,CD=5 | 5,4
AB=4,CD=5 | AB=5, CD=4
x_1=2 | x_2=2
\sum_{k=0}^{n-1} F_k | \sum_{k=0}^{n-2} F_k
5 m | 5 s
5 \text{ m} | 5 \text{ s}
5 \text{ cm} | 5 \text{ cm}^2
10\pi \text{ feet} | 10\pi \text{ inches}
5 | 5 \text{ is wrong}
5 | 5x
5 | 2abc
2 | 2abc
\$5 | 5 \text{ cents}
50\% | 0.5\%
101_2 | 101
101_2 | 5
1101_4 | 1101_5
2 | 2:1
2:3 | 3:2
\begin{pmatrix} 1 & 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 3 \end{pmatrix}
dog | god
\text{even} | odd
\text{no solution} | solution
\text{(C)} | \text{(D)}
\text{4:30 p.m.} | 4:30 AM
\overline{AB} | AB
0 | 0/0
1 | \frac{1}{0}
42 | 42 \approx 43 = 44
8 | 2^2^3
64 | 2^2^3
720 | 3!!
5 | \{\}
5 | \lbrace\rbrace
5 | \{,\}
x^2 | \{\text{and}\}
\text{even} | \{\}
\emptyset | \{,\}
\{\} | \text{and}
\{\} | and
5 | \begin{pmatrix}\end{pmatrix}
\begin{pmatrix}\end{pmatrix} | \begin{cases}\end{cases}
x-y | x/y
x-y | xy
a/b | a-b
abc-d | abcd
(-1)^n | -1
(-1)^n n | -n
2+(-1)^n | 1
\frac{1+(-1)^n}{2} | 0
(-1)^{mn} | 1
(-1)^{m+n} | (-1)^m
(-1)^n |n| | (-1)^n n
(-2)^n | 2^n
\lfloor n/2 \rfloor | \frac{n-1}{2}
y = (-1)^n x | y = -x
\ln|x| | \ln x
2\ln|x| | 2\ln x
\ln|x-1| | \ln(x-1)
y=\ln|x| | y=\ln x
|x| | \sqrt{x}^2
\sqrt{x^2} | \sqrt{x}^2
|x-1000| | 1000-x
|x-10|+|x-11| | |2x-21|
\frac{x}{|x|} | 1
\sqrt[3]{-8} | 1+i\sqrt3
5 | 4=5
5 | 1=2=3=5
5 | x=4=5
-5 | \sqrt{25} = -5
5 | \sum_{k=1}^2 k = 5
3.15 | \pi = 3.15
5 | 5 \in \{5\}
[1,2] | 3 \in [1,2]
5 | \text{not } x = 5
\angle ABC | \angle BAC
\angle ABC = 30 | \angle BAC = 30
\begin{cases} x & x>0 \\ -x & x\le 0\end{cases} | \begin{cases} x & x>0 \\ -x & x<0\end{cases}
5 | 5, 5
50\% | 0.5, 50
5 | \approx
5 | 5 \approx
y=2x | \approx 5
17 | 17 \text{ any text}
17 | 17 \text{ maybe}
17\pi | 17\pi \text{ maybe}
17 | 17 sixteens
3 | 3 millions
i | I
2i | 2I
I_1 | I_2
I_1 | i
V = IR | V = iR
x=3 | x = y = 3
1:1 | \frac{n}{n}
4:2 | \sqrt{4}
\$18.90 | 75^\circ = \$18.90
6.62 | \text{1:03 PM} = 6.62
[1,2] | 141_{13} = [1,2]
37 | 37 = \emptyset = 37
18 \text{ ways} | \$18.90 = 18 \text{ ways}
45 \text{ units}^2 | \$18.90 = 45 \text{ units}^2
(9, 3) | x = \emptyset = (9, 3)
5r^5 | x = \text{1:03 PM} = 5r^5
(-\infty,1) \cup (2,\infty) | (3,4) = (-\infty,1) \cup (2,\infty)
\text{1:03 PM} | 141_{13} = \text{1:03 PM}
\text{1:03 PM} | [1,2] = \text{1:03 PM}
x - 3z = 0 | x - 3z = 0 no sixteen
x - 3z = 0 | x - 3z = 0 \text{ is wrong}
5 | 5 + 0 no
I \frac{d \omega}{d t}+2 B \omega=T | not I \frac{d \omega}{d t}+2 B \omega=T
I \frac{d \omega}{d t}+2 B \omega=T | 2 B \omega=T
\frac{dy}{dx} = 2x | 0 = 2x
16 | (9)(7)
16 | 9(7)
5 | 2(3)
4 | (-1)(5)
\frac{5}{2} | 2(\frac{1}{2})
14 | 2 \cdot 3(4)
5 | e^{\log_{2} 5}
5 | e^{\log_{10} (5)}
8 | 3 + e^{\log_{10} 5}
x^4-16 | x^4 - 17 = x^4 - 16
x^4-16 | x^4 - 16 = x^4 - 17
1,200 | x = (1,200)
\sin(xy) | \sin{x} \cdot y
\ln(2\ln 3) | \ln 2 \cdot \ln 3
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | (2,1)
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | (1,2,2)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | (1,2,3,4)
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \{1,2\}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | [1,2]
(-\infty, \infty) | \mathbb{Q}
(-\infty, 0) | \mathbb{R}
(0, \infty) | \text{positive real numbers}
2^T | 2
x^{T} | x
e^{T} | e
k x^T + 1 | k x + 1
3 | √13
3 | sqrt13
\frac13 | 0.\overline{34}
\frac{3}{10} | 0.\overline{3}
1 | 3 0.\overline{3}
12 | a+b=13=12
12 | a+b=13
12 | x^2+x=12
12 | x+1=12
12 | a+b=c=12
12 | not a + b = 12
x+y=5 | x+z=5
AB=4,CD=5 | 5, 4
x_1=2, y_1=1 | 1, 2
(-\infty,0)\cup(0,\infty) | \mathbb{R}\setminus\{1\}
(-\infty,0)\cup(0,\infty) | \mathbb{R}\setminus\{0,1\}
(-\infty, 2] | \{x : x < 2\}
5 | \{x : x^2 = 25\}
\text{no solution} | \text{no real solution}
0 | \text{no solution}
12 | \textbf{(C)}\ 13
\text{(B)} | \textbf{(C)}\ 12
\text{(C)} | \textbf{(C)}\ maybe
"""


def pairs(block: str) -> list[tuple[str, str]]:
    return [tuple(line.split(" | ")) for line in block.strip().splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize(("gold", "given"), pairs(SAME))
def test_same(gold: str, given: str) -> None:
    assert compare_answers([gold, given, 0.0]) is True


@pytest.mark.parametrize(("gold", "given"), pairs(DIFFERENT))
def test_different_both_ways(gold: str, given: str) -> None:
    assert compare_answers([gold, given, 0.0]) is False
    assert compare_answers([given, gold, 0.0]) is False


@pytest.mark.parametrize("gold", ["x+y=5", "a+b=12", "x - y = 5"])
def test_a_sum_that_an_answer_names_is_a_value_and_an_equation_that_was_asked_for_is_none(gold: str) -> None:
    value = gold.partition("=")[2].strip()
    assert compare_answers([value, gold, 0.0]) is True
    assert compare_answers([gold, value, 0.0]) is False


@pytest.mark.parametrize(("gold", "given"), pairs(SAME))
def test_an_answer_equals_itself_and_no_other_line(gold: str, given: str) -> None:
    assert compare_answers([gold, gold, 0.0]) is True
    assert compare_answers([given, given, 0.0]) is True
    assert compare_answers([gold, "31337 q", 0.0]) is False


@pytest.mark.parametrize(
    ("gold", "given", "tolerance", "same"),
    [
        ("3.14", "3.1", 0.0, False),
        ("3.14", "3.1", 0.02, True),
        ("100", "101", 0.01, True),
        ("100", "101.1", 0.01, False),
        ("(1, 100)", "(1, 101)", 0.01, True),
        ("4.2e-10", "4.3e-10", 0.01, False),
        ("4.2e-10", "4.2 \\times 10^{-10}", 0.0, True),
    ],
)
def test_the_tolerance_is_relative_to_the_gold_number(gold: str, given: str, tolerance: float, same: bool) -> None:
    assert compare_answers([gold, given, tolerance]) is same
