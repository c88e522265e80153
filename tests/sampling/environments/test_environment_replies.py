"""Environments that reply to turns themselves: what they may return, and the episodes that follow from it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from posttrain.data.render import encode_prompt
from posttrain.data.render.template import build_template
from posttrain.errors import RewardFailure, UsageError
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.contract import build_toolset
from posttrain.sampling.environments.replies import EnvironmentReply, HeardTurn, read_reply
from posttrain.sampling.episodes import build_stage
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import RolloutRequest, Sampler, build_grader, collect
from posttrain.store.turns import read_turns, show_turns, write_turns
from posttrain.types import Call, Example, Message, Rollout, Turn
from posttrain.untrusted import declare_code
from refusing import refuses

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "word": {"type": "string"}}},
    },
}


class Riddle:
    """Replies with hints until it hears the answer, or is asked to stop."""

    heard: ClassVar[list[tuple[str, str]]] = []

    def reset(self) -> str:
        self.done = False
        self.turns = 0
        return "What is it?"

    def respond(self, text: str, finish: str) -> str | None:
        self.turns += 1
        Riddle.heard.append((text, finish))
        if "stop" in text:
            return None
        self.done = "42" in text
        return f"hint {self.turns}"

    def get_reward(self) -> float:
        return float(self.done)

    def get_metrics(self) -> dict[str, float]:
        return {"hints": float(self.turns)}


class Caller:
    """Answers calls itself."""

    tools: ClassVar[list[Any]] = [TOOL]

    def reset(self) -> None:
        pass

    def respond(self, text: str, calls: list[dict[str, str]]) -> list[dict[str, str]] | None:
        said = [f"{text}|{call['name']}|{call['arguments']}" for call in calls]
        pairs = zip(calls, said, strict=True)
        return [{"role": "tool", "tool_call_id": call["id"], "content": one} for call, one in pairs] or None

    def get_reward(self) -> float:
        return 1.0


class Asking(Caller):
    def respond(self, text: str, state: str) -> None:  # type: ignore[override]
        pass


class Mute(Caller):
    def respond(self, text: str, calls: list[dict[str, str]]) -> None:
        pass


class NoTools(Caller):
    tools: ClassVar[list[Any]] = ["add"]


class TextTools(Caller):
    tools: ClassVar[Any] = "add"


class Unlisted(Caller):
    tools: ClassVar[Any] = None


class OddTool(Caller):
    tools: ClassVar[list[Any]] = [{"type": "function", "function": {"name": "add", "parameters": "a"}}]


class Twice(Caller):
    tools: ClassVar[list[Any]] = [TOOL, TOOL]


class Static(Riddle):
    @staticmethod
    def respond(text: str) -> str:  # type: ignore[override]
        return f"heard {text}"


class Wrong(Riddle):
    def respond(self, text: str) -> int:  # type: ignore[override]
        return 3


class NoMetrics(Riddle):
    def get_metrics(self) -> dict[str, float]:
        return {"hints": float("nan")}


class Named(Riddle):
    def get_metrics(self) -> dict[str, float]:
        return {"hints": 1.0, "correct": 5.0}


NAMES = ("Named", "Riddle", "Caller", "Mute", "Asking", "NoTools", "Static", "Wrong", "NoMetrics")
NAMES += ("TextTools", "Unlisted", "OddTool", "Twice")


@pytest.fixture(autouse=True)
def _declared() -> None:
    declare_code([f"test_environment_replies:{name}" for name in NAMES])
    Riddle.heard.clear()


def play(tokenizer: Any, name: str, *turns: str, template: str = "chat", **limits: Any) -> Rollout:
    """One episode in which the model says these texts in turn."""
    made = validate_recipe(
        {
            "task": "stories",
            "prompt": {"template": template},
            "environment": f"test_environment_replies:{name}",
            "rewards": ["environment"],
            "rollout": {"max_turns": 4, **limits},
            "objective": "grpo",
        }
    ).resolve()
    stage = build_stage(made, build_template(made.prompt.template), tokenizer)
    assert stage is not None
    end = tokenizer.eos_token_id
    texts = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in turns]
    engine = FakeEngine(lambda prompt, key: texts[min(prompt.count(end), len(texts) - 1)], logprob=-0.5)
    sampler = Sampler(engine, tokenizer, build_grader(made.rewards, stage.template), 1000, stage=stage)
    example = Example("riddle/1", (Message("user", "A riddle."),))
    prompt = encode_prompt(tokenizer, stage.template, example.messages)
    request = RolloutRequest([example], [prompt], sampler.sampling(400, 1.0), (3, "rollout 0", 1), 1)
    return collect(sampler, request)[0][0][0]


@pytest.mark.parametrize("template", ["chat", "r1_zero"])
def test_reply_to_a_turn_without_calls_is_a_user_message_that_is_not_trained(tokenizer: Any, template: str) -> None:
    rollout = play(tokenizer, "Riddle", "is it 7", "<tool>add: 1</tool>", "it is 42", template=template)
    assert rollout.turns == tuple(Turn(rollout.turns[n].text, (), None, (f"hint {n + 1}",)) for n in range(3))
    assert [text.removeprefix("<think>") for text, _ in Riddle.heard] == ["is it 7", "<tool>add: 1</tool>", "it is 42"]
    assert rollout.completion.finish == "ended"
    assert (rollout.reward, rollout.parts) == (1.0, rollout.parts | {"environment": 1.0, "hints": 3.0})
    assert rollout.completion.own is not None
    groups: dict[bool, list[int]] = {True: [], False: []}
    for token, is_own in zip(rollout.completion.ids, rollout.completion.own, strict=True):
        groups[is_own].append(token)
    end = tokenizer.eos_token
    assert tokenizer.decode(groups[True]) == f"is it 7{end}<tool>add: 1</tool>{end}it is 42{end}"
    others = tokenizer.decode(groups[False])
    assert "hint 1" in others
    assert "hint 2" in others
    assert "hint 3" not in others, "the episode was over"
    if template == "chat":
        assert others.count("<|im_start|>user\nhint") == 2
    assert show_turns(rollout.turns).count("-> hint") == 3
    assert read_turns(write_turns(rollout.turns)) == rollout.turns


def test_episode_ends_by_none_by_turns_and_by_tokens(tokenizer: Any) -> None:
    stopped = play(tokenizer, "Riddle", "is it 7", "stop")
    assert (stopped.completion.finish, len(stopped.turns), stopped.reward) == ("stop", 2, 0.0)
    over = play(tokenizer, "Riddle", "is it 7", max_turns=2)
    assert (over.completion.finish, over.parts["hints"]) == ("out_of_turns", 2.0)
    Riddle.heard.clear()
    cut = play(tokenizer, "Riddle", "is it 42 or 43 or 44", max_turn_tokens=3)
    assert cut.completion.finish == "length"
    assert [finish for _, finish in Riddle.heard] == ["length"], "what was cut off is heard, and scored"
    assert cut.parts["hints"] == 1.0


def test_calls_are_answered_by_the_environment_in_its_words(tokenizer: Any) -> None:
    said = 'now <tool>add: {"a": 1, "word": "x"}</tool> and <tool>add: {"a":</tool> <tool>no_such: {}</tool>'
    rollout = play(tokenizer, "Caller", said, "done")
    around = 'now  and <tool>add: {"a":</tool> '
    assert rollout.turns[0].calls == (
        Call("add", '{"a": 1, "word": "x"}', f'{around}|add|{{"a": 1, "word": "x"}}', "ok"),
        Call("no_such", "{}", f"{around}|no_such|{{}}", "ok"),
    )
    assert rollout.completion.finish == "stop"
    unheard = play(tokenizer, "Mute", said).turns[0].calls
    assert [(call.tool, call.outcome) for call in unheard] == [("add", "failed"), ("no_such", "failed")]
    assert "<|im_start|>tool" in tokenizer.decode(rollout.completion.ids)
    assert "add" in tokenizer.decode(rollout.prompt_ids), "its tools are shown"


@pytest.mark.parametrize(
    ("name", "named"),
    [("Wrong", "respond returned 3"), ("NoMetrics", "get_metrics returned 'hints': nan")],
)
def test_environment_that_returns_something_else_fails(tokenizer: Any, name: str, named: str) -> None:
    rollout = play(tokenizer, name, "is it 7", "stop", retries=0)
    assert rollout.completion.finish == "environment_failed"
    assert named in rollout.failures[0]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Asking", ["'state'", "text, calls, finish"]),
        ("NoTools", ["tools", "'add'"]),
        ("TextTools", ["tools", "'add' is not a list"]),
        ("Unlisted", ["tools", "None is not a list"]),
        ("OddTool", ["tools", "'parameters': 'a'"]),
        ("Twice", ["tools", "2 tools are named 'add'"]),
    ],
)
def test_environment_that_cannot_be_given_what_it_asks_for_is_refused(name: str, named: list[str]) -> None:
    with refuses(UsageError, *named):
        build_toolset(Component(name=f"test_environment_replies:{name}"))


def test_metric_of_an_environment_with_the_name_of_a_reward_is_refused(tokenizer: Any) -> None:
    with refuses(RewardFailure, "get_metrics", "'correct'"):
        play(tokenizer, "Named", "is it 7", "stop")


def test_static_respond_hears_the_turn(tokenizer: Any) -> None:
    rollout = play(tokenizer, "Static", "is it 7", max_turns=2)
    assert rollout.turns[0].replies == ("heard is it 7",)
    assert rollout.completion.finish == "out_of_turns"


def test_tools_next_to_an_environment_that_answers_calls_are_refused() -> None:
    declare_code(["example_environments:Echo"])
    with refuses(UsageError, "tools", "test_environment_replies:Caller"):
        build_toolset(Component(name="test_environment_replies:Caller"), [Component(name="example_environments:Echo")])


def test_replies_are_read_or_refused() -> None:
    turn = HeardTurn("", [("add", "{}"), ("add", "[]")], "stop")
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in (1, 0)]
    read = read_reply([*results[:1], results[1] | {"outcome": "failed"}], turn)
    assert read == EnvironmentReply(
        "tool", ("r1", "r0"), (Call("add", "{}", "r0", "failed"), Call("add", "[]", "r1", "ok"))
    )
    assert read.said == ()
    assert read_reply("go on", turn) == EnvironmentReply(contents=("go on",))
    user = read_reply([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], turn)
    assert user is not None
    assert (user.said, [call.result for call in user.calls]) == (("a", "b"), ["", ""])
    wrong: list[tuple[Any, str]] = [
        ([], "[]"),
        ([{"role": "user"}], "not a message"),
        ([{"role": "user", "content": 3}], "not a message"),
        ([results[0], {"role": "user", "content": "a"}], "tool, user"),
        ([results[0], results[0]], "'call_1'"),
        ([{"role": "tool", "content": "a"}], "None"),
        ([results[0] | {"outcome": "fine"}], "'fine'"),
        ([{"role": "system", "content": "a"}], "'system'"),
        ([{"role": ["user"], "content": "a"}], "['user']"),
        ([results[0], {"role": {}, "content": "a"}], "tool, {}"),
    ]
    for returned, named in wrong:
        with refuses(ValueError, named):
            read_reply(returned, turn)
