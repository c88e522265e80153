"""Answers that are right, however they are written: what no repair of a grader may refuse.

Each line is a gold and ways to write it, between bars that stand alone. All pairs were made by hand.
"""

from __future__ import annotations

MATH = {
    "fractions": r"""
1/2 || \frac{1}{2} || \frac12 || \dfrac{1}{2} || \tfrac12 || 2/4 || \frac{3}{6} || 0.5 || .5 || 0.50 || $\frac{1}{2}$
1/2 || \left(\frac12\right)
\frac{3}{4} || 3/4 || 0.75 || \frac{6}{8} || \frac34 || \frac{-3}{-4} || 75\%
-\frac{2}{3} || \frac{-2}{3} || \frac{2}{-3} || -2/3 || -\frac{4}{6} || -\dfrac23
\frac{7}{2} || 3.5 || 3\frac{1}{2} || 3 1/2 || 7/2 || \frac{14}{4} || 3 \frac12
\frac{11}{4} || 2.75 || 2\frac{3}{4} || 2 3/4
\frac{x}{2} || x/2 || \frac12 x || 0.5x || \frac{1}{2}x || \frac{2x}{4}
\frac{1}{x} || x^{-1} || 1/x || \frac{2}{2x}
\frac{a+b}{2} || (a+b)/2 || \frac{a}{2}+\frac{b}{2} || \frac12(a+b) || \frac{b+a}{2}
""",
    "decimals": r"""
0.25 || .25 || 0.250 || 1/4 || \frac14 || 25\% || 25%
3.14 || 3.140 || \frac{314}{100} || 314/100
-0.6 || -.6 || -3/5 || -\frac35
10.0 || 10 || 10.00 || \frac{20}{2}
194.0 || 194 || 194. || $194$
0.001 || 10^{-3} || 1 \times 10^{-3} || \frac{1}{1000} || 1e-3
""",
    "integers": r"""
1000 || 1,000 || 10^3 || 10^{3} || 1{,}000 || 1\,000 || 1000. || $1000$ || 1000.0 || 1 000
1000000 || 1,000,000 || 10^6 || 1{,}000{,}000 || 1,\!000,\!000
12345 || 12,345 || 12{,}345 || 12,\!345 || 12345.0
17 || 17.0 || 17. || $17$ || \(17\) || \[17\] || $$17$$ || +17 || {17} || (17) || 20-3 || \boxed{17} || 017
17 || \text{17} || x = 17 || n=17 || **17** || 1.7 \times 10 || \mathbf{17}
-5 || $-5$ || (-5) || −5 || - 5 || x=-5 || -5.0
025 || 25 || 25.0
0 || 0.0 || -0 || $0$ || x = 0 || 1-1
2^{10} || 1024 || 4^5 || 2^10
5! || 120 || 5 \cdot 4 \cdot 3 \cdot 2
\binom{5}{2} || 10 || \frac{5!}{2!3!}
""",
    "percent": r"""
25\% || 25% || 25 || 25 percent || 25 \text{ percent} || 0.25 || \frac14
12.5\% || 12.5% || 12.5 || \frac{25}{2}\%
50 || 50% || 50\% || 50 percent
""",
    "units": r"""
5 || 5 cm || 5\text{ cm} || 5 \text{ centimeters} || 5 apples || 5 units || 5\text{ units} || 5 \mathrm{cm}
12\text{ inches} || 12 || 12 inches || 12\text{ inch} || 12 \text{ in}
30\text{ square feet} || 30 || 30\text{ ft}^2 || 30 square feet || 30 \text{ sq ft}
90^\circ || 90 || 90° || 90^{\circ} || 90 degrees || 90 \text{ degrees} || 90\degree
\$10 || 10 || $10 || 10 dollars || \$10.00 || 10 \text{ dollars} || \$ 10
\$1,250 || 1250 || \$1250 || 1,250 || 1250 dollars
60\text{ mph} || 60 || 60 mph || 60 miles per hour || 60 \text{ miles per hour}
6\text{ minutes} || 6 || 6 minutes || 6 min || 6\text{ min}
18\pi\text{ cm}^2 || 18\pi || 18 \pi || 18\pi \text{ square centimeters}
7\text{ days} || 7 days || 7
""",
    "sets": r"""
\{1,2,3\} || \{3,1,2\} || 1,2,3 || 3, 2, 1 || \left\{1, 2, 3\right\} || \lbrace 1,2,3 \rbrace || 1, 2 \text{ and } 3
\{1,2,3\} || 1, 2, and 3 || \{1; 2; 3\}
1,-2 || -2,1 || -2, 1 || 1 and -2 || 1 \text{ or } -2 || x=1, x=-2 || x = 1 \text{ or } x=-2 || \{1,-2\} || x=1,-2
\pm 3 || 3, -3 || -3, 3 || \{3,-3\} || x = \pm 3
1 \pm \sqrt{19} || 1+\sqrt{19}, 1-\sqrt{19} || 1-\sqrt{19}, 1+\sqrt{19} || x = 1 \pm \sqrt{19}
\{5\} || 5 || x=5 || \{5.0\}
\emptyset || \{\} || \varnothing || \lbrace\rbrace || ∅
\frac{1}{2}, 3 || 3, \frac12 || 0.5, 3 || \{3, 1/2\}
""",
    "tuples": r"""
(1,2) || (1, 2) || \left(1,2\right) || (1.0, 2) || (\frac{2}{2}, 2) || 1,2 || (x,y)=(1,2) || x=1, y=2
(1,2) || \langle 1,2 \rangle
(-4,13) || (-4, 13) || \left( -4, 13 \right) || $(-4,13)$
\left( 4, -\frac{1}{2} \right) || (4,-1/2) || (4, -0.5) || (4, -\frac12)
\left(3,\frac{\pi}{2}\right) || (3, \pi/2) || (3, \frac12 \pi)
(1,2),(3,4) || (3,4),(1,2) || (1,2) and (3,4) || \{(1,2),(3,4)\}
(0,0,1) || (0, 0, 1) || \left(0,0,1\right)
""",
    "intervals": r"""
[0,1) || \left[0,1\right) || 0 \le x < 1 || x \in [0,1) || [0, 1.0) || 0 \leq x < 1
(-\infty,5] || x \le 5 || x \leq 5 || (-\infty, 5] || x \in (-\infty,5] || 5 \ge x || \left(-\infty,5\right]
(2,\infty) || x > 2 || 2 < x || (2, +\infty) || x \in (2,\infty) || (2,\infty )
(-\infty,1)\cup(3,\infty) || (3,\infty)\cup(-\infty,1) || (-\infty, 1) \cup (3, \infty) || x < 1 \text{ or } x > 3
(-\infty,1)\cup(3,\infty) || x<1 or x>3
[-1,1] || -1 \le x \le 1 || [-1, 1] || x\in[-1,1] || -1\leqslant x\leqslant 1
(-\infty,\infty) || (-\infty, +\infty) || (-\infty,\infty )
\left(-\frac13,2\right] || (-1/3, 2] || -\frac{1}{3} < x \le 2
""",
    "equations": r"""
y = 2x+3 || 2x+3 || y = 3+2x || y=2x+3 || 2x + 3 = y || y - 2x - 3 = 0 || y=2(x+1.5)
x^2+y^2=1 || y^2+x^2=1 || 2x^2+2y^2=2 || x^2+y^2-1=0 || 1 = x^2+y^2
3 || x=3 || x = 3 || n=3 || 3 = x || 1+2=3 || a = 3 || f(2)=3 || x = \frac{6}{2} = 3 || 1+2 = 3
x=3 || 3 || x = 3 || x=3.0
2x - y + 4 = 0 || y = 2x+4 || -2x+y-4=0 || 4x-2y+8=0
f(x)=x^2 || x^2 || f(x) = x^2 || x \cdot x
x + y + z = 0 || z + y + x = 0 || x+y+z=0 || -x-y-z=0
e = \frac{3}{5} || \frac35 || 0.6 || e=0.6
""",
    "matrices": r"""
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \begin{pmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \left(\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}\right)
\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix} || \begin{pmatrix}-7\\16\\5\end{pmatrix}
\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix} || \begin{bmatrix} -7 \\ 16 \\ 5 \end{bmatrix}
\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix} || \begin{pmatrix} -7.0 \\ 16 \\ 5 \end{pmatrix}
\begin{pmatrix} 1/5 \\ 4/5 \end{pmatrix} || \begin{pmatrix} \frac15 \\ \frac45 \end{pmatrix}
\begin{pmatrix} 1/5 \\ 4/5 \end{pmatrix} || \begin{pmatrix} 0.2 \\ 0.8 \end{pmatrix}
""",
    "roots": r"""
2\sqrt{3} || \sqrt{12} || 2 \sqrt 3 || \sqrt{4}\sqrt{3} || 2\cdot\sqrt{3} || \sqrt3 \cdot 2 || 2*sqrt(3)
2\sqrt{3} || \frac{6}{\sqrt{3}} || 2\sqrt3 || 12^{1/2}
\frac{\sqrt{2}}{2} || \frac{1}{\sqrt{2}} || \frac1{\sqrt2} || \sqrt{\frac12} || \sqrt{2}/2 || \frac12\sqrt2 || 2^{-1/2}
\sqrt{ab} || \sqrt{a}\sqrt{b} || \sqrt a \sqrt b || \sqrt{b}\sqrt{a} || (ab)^{1/2} || \sqrt{ba}
\frac{1}{\sqrt{x}} || \frac1{\sqrt x} || x^{-1/2} || \frac{\sqrt{x}}{x} || \sqrt{\frac{1}{x}}
\sqrt[3]{2} || 2^{1/3} || \sqrt[3]2 || 2^{\frac13}
1+\sqrt{2} || \sqrt{2}+1 || \sqrt2 + 1 || 1+2^{0.5}
|x| || \sqrt{x^2} || \left|x\right| || \lvert x \rvert || \left|-x\right|
3\sqrt{x} || \sqrt{9x} || 3x^{1/2} || 3 \sqrt x
""",
    "logarithms": r"""
2\ln a+\ln b || \ln b + 2 \ln a || \ln(a^2 b) || 2 \ln(a) + \ln(b)
\ln 2 || \ln(2) || \log_e 2 || \frac12\ln 4 || -\ln\frac12
\log_2 3 || \frac{\ln 3}{\ln 2} || \log_2(3) || \frac{\log 3}{\log 2}
3 || \log_2 8 || \log_{2} 8 || \log_{10} 1000
\ln\frac{a}{b} || \ln a - \ln b || \ln(a/b)
\ln x || \ln(x) || \frac12 \ln (x^2) + 0 \cdot \ln x
""",
    "expressions": r"""
x^2+2x+1 || (x+1)^2 || 1+2x+x^2 || (x+1)(x+1) || x^{2}+2x+1 || x(x+2)+1
(r+5)^2 || (r+5)(r+5) || (5+r)^2 || r^2+10r+25
2x+4 || 2(x+2) || 4+2x || 2x + 4
\frac{x^2-1}{x-1} || x+1 || 1+x
3n^2-18 || 3(n^2-6) || -18+3n^2
2^{n+1} || 2 \cdot 2^n || 2^n + 2^n || 2^{1+n}
\pi r^2 || r^2 \pi || \pi r \cdot r || \pi \cdot r^2
\sin^2 x || (\sin x)^2 || 1-\cos^2 x || \sin x \sin x
e^{2x} || (e^x)^2 || e^x e^x || \exp(2x)
(-1)^n || (-1)^{n+2} || -(-1)^{n+1} || (-1)^{n}
n! || n \cdot (n-1)! || n!
\frac{n(n+1)}{2} || \frac{n^2+n}{2} || \frac12 n(n+1) || n(n+1)/2
3+4i || 4i+3 || 3+4 i || 3 + 4i
i || \sqrt{-1} || 0+i || 1i
-i || \frac{1}{i} || -1i || i^3
\cos\theta || \cos(\theta) || \sin(\frac{\pi}{2}-\theta)
x\sqrt{x} || x^{3/2} || \sqrt{x} x
""",
    "text": r"""
\text{yes} || yes || Yes || \text{Yes} || YES || \mathrm{yes} || \textbf{yes} || yes.
\text{Evelyn} || Evelyn || evelyn || \text{evelyn} || $\text{Evelyn}$
\text{(B)} || B || (B) || \text{B} || \text{(B)} || \mathrm{(B)} || \textbf{(B)}
\text{even} || even || Even || \textit{even}
\text{east} || east || East || \text{ east}
\text{parabola} || parabola || Parabola
\text{no solution} || no solution || No solution || \text{No solution}
""",
    "bases": r"""
101_2 || 101_{2} || 101_{\text{two}} || 101_{\text{2}} || 101_{two}
2516_8 || 2516_{8} || 2516_{\text{eight}}
""",
    "ratios": r"""
1:2 || 1 : 2 || 2:4 || \frac12 || 1/2
3:4 || 3/4 || 6:8
""",
    "constants": r"""
\pi || π || \pi || 2\pi/2 || {\pi}
\frac{\pi}{4} || \pi/4 || 0.25\pi || \frac14\pi || \frac{2\pi}{8}
e^2 || e^{2} || e \cdot e || \exp(2)
100\pi || 100 \pi || \pi \cdot 100 || 100π
\infty || +\infty || infinity || ∞
-\infty || - \infty || -infinity
""",
    "times": r"""
12:30 || 12:30
5\text{:}30 || 5:30
"""}  # fmt: skip

NUMERIC = r"""
17 || 17.0 || 17. || $17 || 17 dollars || 17 apples || 17 cm || 17 \text{ cm} || $17$ || \$17 || +17 || 17.00 || 34/2
17 || The answer is 17 || the answer is 17. || Answer: 17 || \boxed{17} || 17 miles per hour || 17%
1200 || 1,200 || 1200.00 || $1,200 || $1,200.00 || 1,200 dollars || 1{,}200 || 1.2e3 || \$1{,}200 || 1.2 thousand
0.5 || 1/2 || .5 || \frac{1}{2} || 50% || 0.50 || \frac12
-3 || −3 || -3.0 || - 3
2.5 || 2 1/2 || 5/2 || 2.50 || $2.50
3000000 || 3 million || 3,000,000 || 3000000
"""

# Ways in which people name the letter B as their choice.
CHOICE = (
    "B", "(B)", "B.", "B)", "[B]", "**B**", "$B$", "\\boxed{B}", "\\text{B}", "Option B", "Choice B",
    "B is the answer",
    "B is the answer.", "(B) is the answer", "B is my answer", "My final choice is B.", "My final choice is B",
    "My choice is B",
    "My answer is B", "answer: b", "Answer: B", "answer: B", "ANSWER: B", "Answer: (b)", "Answer: b)", "答案是B",
    "答案是 B", "答案：B", "答案: B",
    "答案是B。", "答案为B", "The answer is B", "The answer is (B).", "The final answer is B.", "Final answer: B",
    "Final Answer: (B)", "The correct answer is B", "The correct option is B.", "The correct choice is B.",
    "The right answer is B",
    "I choose B", "I'd pick B.", "I would go with B", "I'll go with B", "I select option B.", "So B", "So, B.",
    "Therefore B.", "Thus, the answer is B.",
    "Hence (B).", "It is B.", "It's B", "I think it is B.", "I believe the answer is B.", "Option B is correct.",
    "B is correct", "B is correct.",
    "B is right.", "(B) is correct", "B is the correct answer", "B is the right answer.",
    "B is the correct choice", "B is the correct option.",
    "The answer must be B.", "The best answer is B.",     "Letter B", "B: because it fits", "B, because it fits.",
    "After some thought, the answer is B.", "We can rule out A and C. The answer is B.",
    "A is wrong. The answer is B.", "Not A. The answer is B.",
    "The answer is A. Wait, no. The answer is B.", "**Answer: B**", "**Answer:** B", "### Answer\nB",
    "Correct answer: B", "Correct choice: B",
    "Selected answer: B", "I am confident that B is the answer.", "The answer would be B.",
)  # fmt: skip


def math_pairs() -> list[tuple[str, str, str]]:
    """(kind, gold, given), each given right for its gold."""
    found = []
    for kind, block in MATH.items():
        for line in block.strip("\n").splitlines():
            gold, *ways = (part.strip() for part in line.split("||"))
            found += [(kind, gold, way) for way in ways]
    return list(dict.fromkeys(found))


def numeric_pairs() -> list[tuple[str, str]]:
    found = []
    for line in NUMERIC.strip("\n").splitlines():
        gold, *ways = (part.strip() for part in line.split("||"))
        found += [(gold, way) for way in ways]
    return found
