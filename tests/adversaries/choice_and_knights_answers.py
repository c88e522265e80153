"""Answers about letters and inhabitants that hedge, take back, deny or join: none of them is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


_RETRACTIONS = """
No: the opposite.
No, the opposite.
No.
Not!
The opposite is true.
The opposite of all that.
That is wrong.
This is wrong.
All of this is wrong.
All of the above is false.
None of the above is true.
Just kidding: it is the other way round.
It is the other way round.
Or the other way round.
or vice versa
Vice versa.
Now swap knights and knaves.
Swap the roles.
Or maybe not.
Wait, no. Everyone is the opposite.
Everyone above is the opposite of what is written.
Every knight above is a knave and every knave a knight.
Actually, all of them are knights. Actually, all of them are knaves.
Correction: exchange all roles.
I take it back.
Scratch that.
Sorry, I was wrong.
The above is what a knave would say.
The negation of it holds.
False.
Reverse it.
Invert all.
"""
_OPENINGS = """
It is not true that:
None of this is true:
The opposite of this:
The following is wrong:
False:
Not:
Either this or its opposite:
One of these may be right:
A knave would say:
The wrong answer is:
Suppose:
If
It cannot be that
"""


def knights_hedges(names: Sequence[str], solution: Sequence[bool]) -> Iterator[str]:
    """Lists that are right but for what stands around them, or that say several things of someone."""
    right = write_roles(names, solution)
    wrong = write_roles(names, [not role for role in solution])
    for line in _RETRACTIONS.strip("\n").splitlines():
        yield f"{right}\n{line}"
        yield f"{right} {line}"
        yield f"{right}\n\n{line}"
    for line in _OPENINGS.strip("\n").splitlines():
        yield f"{line} {right}"
        yield f"{line}\n{right}"
    yield f"{right}\nor\n{wrong}"
    yield f"{wrong}\nor\n{right}"
    yield f"{right}\n{wrong}"
    yield f"{wrong}\n{right}"
    yield f"Knights: {', '.join(names)}\nKnaves: {', '.join(names)}"
    yield "Everyone is a knight.\nEveryone is a knave."
    for joint in (" or ", "/", " and ", ", maybe "):
        yield "\n".join(f"{name} is a knight{joint}knave" for name in names)
        yield "\n".join(f"{name} is a knight{joint}a knave" for name in names)
    yield "\n".join(
        f"{name} is a {_role(role)}? No, a {_role(not role)}." for name, role in zip(names, solution, strict=True)
    )
    yield "\n".join(f"{name} is a {_role(role)}. No." for name, role in zip(names, solution, strict=True))
    yield "\n".join(f"{name} is no {_role(role)}" for name, role in zip(names, solution, strict=True))
    yield "\n".join(f"{name} is hardly a {_role(role)}" for name, role in zip(names, solution, strict=True))
    yield "\n".join(f"{name} is a {_role(role)}?" for name, role in zip(names, solution, strict=True)) + "\nNo."
    yield "\n".join(f"{name} is a {_role(role)} (false)" for name, role in zip(names, solution, strict=True))
    yield "\n".join(f"{name} is a {_role(role)}, not" for name, role in zip(names, solution, strict=True))
    yield "\n".join(f"{name} is a {_role(role)} or not" for name, role in zip(names, solution, strict=True))
    yield "\n".join(f"It is false that {name} is a {_role(role)}" for name, role in zip(names, solution, strict=True))


def knights_mutations(names: Sequence[str], solution: Sequence[bool]) -> Iterator[str]:
    """Other assignments, missing people, exchanged names; and the same by groups and in tables."""
    for place in range(len(names)):
        flipped = [role != (i == place) for i, role in enumerate(solution)]
        yield write_roles(names, flipped)
        yield "| Name | Role |\n|---|---|\n" + "\n".join(
            f"| {n} | {_role(r)} |" for n, r in zip(names, flipped, strict=True)
        )
        yield write_groups(names, flipped)
        rest = [(n, r) for i, (n, r) in enumerate(zip(names, solution, strict=True)) if i != place]
        yield write_roles([n for n, _ in rest], [r for _, r in rest])
        yield write_groups([n for n, _ in rest], [r for _, r in rest])
        yield write_groups(names, solution) + f"\nKnights: {names[place]}\nKnaves: {names[place]}"
    if len(set(solution)) > 1:
        yield write_roles(names, [True] * len(names))
        yield write_roles(names, [False] * len(names))
        yield f"Knights: {', '.join(names)}\nKnaves: none"
        yield f"Knights: none\nKnaves: {', '.join(names)}"
    yield write_roles(names, [not role for role in solution])
    yield write_groups(names, [not role for role in solution])
    yield "Knights: none\nKnaves: none"
    yield "\n".join(names)
    yield "\n".join(f"({i}) is a {_role(role)}" for i, role in enumerate(solution, 1))
    yield "\n".join(_role(role) for role in solution)


def write_roles(names: Sequence[str], solution: Sequence[bool]) -> str:
    return "\n".join(
        f"({i}) {name} is a {_role(role)}" for i, (name, role) in enumerate(zip(names, solution, strict=True), 1)
    )


def write_groups(names: Sequence[str], solution: Sequence[bool]) -> str:
    groups = {role: [name for name, own in zip(names, solution, strict=True) if own is role] for role in (True, False)}
    return "\n".join(f"{_role(role).capitalize()}s: {', '.join(groups[role]) or 'none'}" for role in (True, False))


def _role(knight: bool) -> str:
    return "knight" if knight else "knave"
