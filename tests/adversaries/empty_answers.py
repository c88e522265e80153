"""Answers that show nothing: characters without ink, and marks of LaTeX, Markdown and tags with nothing in them."""

from __future__ import annotations

import unicodedata

_EMPTY_MARKS = r"""
{}
{{}}
\{\}
\lbrace\rbrace
\{\text{and}\}
\{{}\}
\{\{\}\}
\left\{\right\}
\{\quad\}
\{,,,\}
()
(,)
[]
[ )
\langle\rangle
\text{}
\mathrm{}
\operatorname{}
\boxed{}
\boxed{\boxed{}}
\phantom{17}
\hspace{1cm}
\,
\quad
~
\
\\
$
$$
$$$$
\(\)
{
}
}{
\{
\}
(
)
)(
[
]
[(
|
||
\left
\left(\right)
\begin{pmatrix}\end{pmatrix}
\begin{cases}\end{cases}
=
==
x=
=x
=3
\approx
x \approx
\sim
\pm
+
-
*
/
^
_
^{}
x^{}
!
?
.
...
,
;
:
&
\&
%
~~
<
>
\le
x<
\ne
x\in
\cup
\cap
\emptyset\cup\emptyset
\emptyset
∅
\{\emptyset\}
\emptyset,\emptyset
\mid
\cdot
\ldots
…
'
"
''
`
```
****
#
|---|
<answer>
<answer></answer>
<answer> </answer>
<think></think>
</think>
<reasoning></reasoning>
<|im_end|>
<|endoftext|>
[/INST]
None
null
nan
undefined
n/a
\text{and}
and
or
, and
\sqrt{}
\frac{}{}
\frac{1}{}
\binom{}{}
\sum
\lim
\log
\infty
\pi
\mathbb{R}
\mathbb{C}
\forall
\top
\square
\checkmark
"""
# Formats that can be seen: they enclose or precede numbers in Arabic and Syriac.
_SEEN = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2")
# What shows nothing, beside controls, formats and separators: fillers, variation selectors, joiners.
_MORE_INVISIBLE = "\u115f\u1160\u2800\u3164\uffa0\u034f\u17b4\u17b5\ufe00\ufe0f\U000e0100"


def invisible_characters() -> list[str]:
    """Every character that leaves the page white, of the planes in use."""
    planes = (
        *range(0x3000),
        *range(0xA000, 0xA100),
        *range(0xD7A4, 0xD800),
        *range(0xF900, 0x11000),
        *range(0xE0000, 0xE0200),
    )
    found = [
        chr(c) for c in planes if unicodedata.category(chr(c)) in ("Cc", "Cf", "Zs", "Zl", "Zp") and chr(c) not in _SEEN
    ]
    return list(dict.fromkeys([*found, "\u3000", *_MORE_INVISIBLE]))


def invisible_texts() -> list[str]:
    """Texts without anything to see."""
    signs = invisible_characters()
    joined = [
        "".join(signs[:40]),
        "\u200b\u200c\u200d",
        " \u200b ",
        "\n\u00a0\n",
        "\x00\x00",
        "\ufeff\n",
        "\u2062\u2063\u2064",
    ]
    return ["", " ", "\n", "\t \n", *signs, *joined]


def empty_marks() -> list[str]:
    """Marks of LaTeX, Markdown and tags with nothing in them."""
    return _EMPTY_MARKS.strip("\n").splitlines()
