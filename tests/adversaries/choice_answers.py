"""Answers about letters that hedge, take back, deny or join: none of them is right."""

from __future__ import annotations

from collections.abc import Iterator

# {g} is the gold letter, {o} another.
_HEDGED_LETTERS = """
{g} or {o}
{o} or {g}
{g} and {o}
{g}, {o}
{o}, {g}
{g}{o}
{o}{g}
{g} {o}
{g}/{o}
{o}/{g}
{g}|{o}
{g} & {o}
{g}+{o}
{g}; {o}
({g}) ({o})
({g}, {o})
{{{g}, {o}}}
[{g}/{o}]
A B C D
A, B, C, D
ABCD
A. B. C. D.
(A) (B) (C) (D)
A or B or C or D
any of A, B, C, D
one of {g} and {o}
all of them
none of them
either {g} or {o}
neither {g} nor {o}
both {g} and {o}
not {g}
not ({g})
Not {g}.
no {g}
anything but {g}
Anything except {g}.
everything other than {g}
all but {g}
the opposite of {g}
{g} is wrong
{g} is wrong.
{g} is incorrect.
{g} is false
{g} is not the answer
{g} is not the answer.
{g} is not correct
{g} isn't right.
{g} is the wrong answer.
{g} maybe {o}
{g}, maybe {o}
{g}, or {o}
{g} (or {o})
{g} (maybe {o})
{g}? No, {o}
{g}? No: {o}.
{g}. No, {o}.
{g}. No: {o}
{g}. Wait, no. {o}.
{g}. Actually {o}.
{g}. Sorry, {o}.
{g}. I mean {o}.
{g}. Rather {o}.
{g}, no, {o}
{g}, I mean {o}
{g} -> {o}
{g} → {o}
{g} vs {o}
{g} vs. {o}
{g} unless {o}
{g} if not {o}
{g} if it is warm, else {o}
{g} with 50%, {o} with 50%
50% {g}, 50% {o}
{g} {o} {g}
{g}? {o}?
{g}?? or {o}??
The answer is {g} or {o}.
The answer is {g}, or {o}.
The answer is {g}/{o}
The answer is {g} and {o}.
The answer is {g} & {o}
The answer is either {g} or {o}.
The answer is not {g}.
The answer isn't {g}.
The answer is anything but {g}.
The answer is never {g}
The answer is {g}. No: {o}.
The answer is {g}. No, the answer is {o}.
The answer is {g}. The answer is {o}.
The answer is {g}. Just kidding, {o}.
The answer is {g}. I was wrong: it is {o}.
The answer is {g}. That is wrong.
The answer is {g}. This is false.
The answer is {g}. Not.
The answer is {g}. Wait, no.
The answer is {g}, not.
The answer is {g}? No.
The answer is {g} unless it is {o}.
The answer is {g}; the answer is {o}
answer: {g}\\nanswer: {o}
Answer: {g}, {o}
Answer: {g} or {o}
My final choice is {g} or {o}.
My final choice is not {g}.
My final choice is {g}. No, {o}.
My choice is {g}/{o}
{g} is the answer or {o} is the answer.
{g} is the answer. {o} is the answer.
{g} is the answer, or is it {o}?
{g} or {o} is the answer
It is not true that {g} is the answer.
I doubt that {g} is the answer.
Nobody says {g} is the answer.
If {g} is the answer, then so be it.
Is {g} the answer?
Not that {g} is the answer.
They say {g} is the answer.
{g} was my answer. Now it is {o}.
{g} is the answer? No.
{g} is the answer to another question.
答案是{g}或{o}
答案是{g}{o}
答案是{g}和{o}
答案不是{g}
答案是{g}。不，是{o}
答案不一定是{g}
I choose {g} and {o}.
I choose {g} or {o}
I would never choose {g}
I do not choose {g}.
I don't think it is {g}.
It is {g} or {o}.
It is {g} / {o}
It could be {g}, it could be {o}
It might be {g} or it might be {o}.
between {g} and {o}
torn between {g} and {o}
first {g}, then {o}
{g}: false
{g}: no
{g} = wrong
[{g}] is wrong, [{o}] is right
~{g}
¬{g}
!{g}
-{g}-{o}-
"""


def letter_hedges(gold: str, other: str) -> Iterator[str]:
    """Responses that do not choose the gold letter and nothing else."""
    for line in _HEDGED_LETTERS.strip("\n").splitlines():
        yield line.replace("\\n", "\n").format(g=gold, o=other)
