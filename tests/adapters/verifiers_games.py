"""Environments of verifiers that answer the model: a game, tools, and some that cannot be played here."""

from __future__ import annotations

import re
import time
from typing import Any

import verifiers as vf
from datasets import Dataset


def solved(state: Any, **kwargs: Any) -> float:
    return float(state.get("solved", False))


def few_guesses(state: Any, **kwargs: Any) -> float:
    return -float(state["guesses"])


class Guess(vf.MultiTurnEnv):
    """The model guesses a number of one digit, and hears whether the number is higher or lower."""

    async def setup_state(self, state: Any) -> None:
        state["guesses"] = 0

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        found = re.search(r"\d", messages[-1].content)
        state["guesses"] += 1
        if found is None:
            return [vf.UserMessage(content="A number, please.")]
        guess, number = int(found[0]), int(state["answer"])
        if guess == number:
            state["solved"] = True
            state["final_env_response"] = [vf.UserMessage(content="That is it.")]
            return state["final_env_response"]
        return [vf.UserMessage(content="Higher." if number > guess else "Lower.")]


class Forgetful(Guess):
    """The model sees the last reply alone."""

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if state["trajectory"] else messages


class Chatty(Guess):
    """Two messages in one reply, of which the second is the system's."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["guesses"] += 1
        return [vf.UserMessage(content="No."), vf.SystemMessage(content="Be quick.")]


class Broken(Guess):
    """Its service is not there."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise vf.InfraError from ConnectionError("nobody answers \x1b[31m")


class Slow(Guess):
    """Its reply never comes."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        time.sleep(8)  # not a coroutine's: it holds the loop of all episodes
        return [vf.UserMessage(content="At last.")]


GAMES = {"guess": Guess, "forgetful": Forgetful, "chatty": Chatty, "broken": Broken, "slow": Slow}


def load_game(kind: str = "guess", max_turns: int = 3, numbers: str = "3434") -> vf.Environment:
    rows = [{"question": "Which number from 0 to 9?", "answer": number} for number in numbers]
    rubric = vf.Rubric(funcs=[solved, few_guesses], weights=[1.0, 0.1])
    return GAMES[kind](dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns, system_prompt="Guess.")


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def halve(number: int) -> int:
    """Halves an even number.

    Args:
        number: to be halved.
    """
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def says_answer(completion: Any, answer: str, **kwargs: Any) -> float:
    return float(answer in (completion[-1].content or ""))


def load_tools(stateful: bool = False, stops: bool = False, max_turns: int = 4) -> vf.Environment:
    rows = [{"question": "What is 3 + 4?", "answer": "7"}]
    options: dict[str, Any] = {"max_turns": max_turns, "dataset": Dataset.from_list(rows)}
    options["rubric"] = vf.Rubric(funcs=[says_answer])
    if stateful:
        return Counted(**options)
    if stops:
        options["stop_errors"] = [ValueError]
    return vf.ToolEnv(tools=[add, halve], **options)


class Counted(vf.StatefulToolEnv):
    """Its tool gets the number of turns, which the model does not see."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tools=[], **options)
        self.add_tool(self.turn, args_to_skip=["number"])

    async def turn(self, word: str, number: int) -> str:
        """Says a word and the number of the turn.

        Args:
            word: to be said.
            number: of the turn.
        """
        return f"{word} {number}"

    def update_tool_args(self, tool_name: str, tool_args: Any, messages: Any, state: Any, **kwargs: Any) -> Any:
        return {**tool_args, "number": len(state["trajectory"])}


def load_group(with_tools: bool = False) -> vf.Environment:
    return vf.EnvGroup([load_tools() if with_tools else load_game("guess"), load_game("guess", max_turns=1)])


def best_of_group(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def load_compared() -> vf.Environment:
    rows = Dataset.from_list([{"question": "Which number?", "answer": "3"}])
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[best_of_group]), max_turns=2)


class Streaming(vf.Environment):
    """Neither turns nor tools of verifiers' own."""

    async def rollout(self, *given: Any, **options: Any) -> Any:
        raise NotImplementedError


def load_streaming() -> vf.Environment:
    rows = Dataset.from_list([{"question": "Which number?", "answer": "3"}])
    return Streaming(dataset=rows, rubric=vf.Rubric(funcs=[says_answer]))
