"""Episodes: who wrote each token, how a completion ends, what is played again."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from closeness import OF_EMBEDDED, assert_close
from posttrain import registry
from posttrain.data.render import encode_prompt, stop_ids
from posttrain.data.render.calls import HERMES, TAGGED
from posttrain.data.render.rows import TokenRow, rows_of
from posttrain.data.render.template import build_template
from posttrain.errors import UnallowedCode, UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Component
from posttrain.sampling import episodes as played
from posttrain.sampling.base import Sampling
from posttrain.sampling.environments.calls import Request
from posttrain.sampling.environments.contract import EnvironmentFailed
from posttrain.sampling.episodes import Episodes, build_stage
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.models import ModelSource, open_model
from posttrain.sampling.native.engine import native
from posttrain.sampling.rollout import RolloutRequest, Sampler, build_grader, collect
from posttrain.types import Call, Example, Message, Turn
from posttrain.untrusted import declare_code
from refusing import refuses

TEMPLATES = ["r1_zero", "chat", "dialogue", "plain", "boxed"]
CALL, ANSWER = " <tool>calculator: 20 + 22</tool>", " </think> <answer> 42 </answer>"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    Flaky.attempts.clear()


class Flaky:
    """Fails until it was made often enough: how often says the row. It keeps which seeds it was given."""

    attempts: ClassVar[dict[str, list[int]]] = {}

    def reset(self, id: str, seed: int, level: int) -> str:
        self.tries = Flaky.attempts.setdefault(id, [])
        self.tries.append(seed)
        self.level = level
        return "Begin."

    def use(self) -> str:
        """Uses it."""
        if len(self.tries) <= self.level:
            raise EnvironmentFailed(f"try {len(self.tries)}")
        return "used"

    def get_reward(self) -> float:
        return 1.0


class NoNumber(Flaky):
    def get_reward(self) -> float:
        return float("nan")


class Lender(Flaky):
    """Takes a while to give back what it holds."""

    given_back: ClassVar[list[str]] = []
    id = "the one that was made to see what it can"

    def reset(self, id: str) -> str:
        self.id = id
        return "Begin."

    def close(self) -> None:
        time.sleep(0.02)
        Lender.given_back.append(self.id)


def recipe(template: str = "r1_zero", environment: Any = "calculator", **rollout: Any) -> Any:
    declare_code(["test_episodes:Flaky", "test_episodes:NoNumber", "test_episodes:Lender"])
    rollout = {"max_turns": 4, "show_tools": False} | rollout
    return validate_recipe(
        {
            "task": "stories",
            "prompt": {"template": template},
            "environment": environment,
            "rewards": ["tool_calls"],
            "rollout": rollout,
            "objective": "grpo",
        }
    ).resolve()


def example(number: int = 1, **meta: Any) -> Example:
    return Example(f"sum/{number}", (Message("user", "What is 20 plus 22?"),), answer="42", meta=meta)


def script(tokenizer: Any, *turns: str) -> FakeEngine:
    """Says one text in each turn, in order; the prompts that it was asked with are in ``calls``."""
    end = tokenizer.eos_token_id
    ids = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in turns]

    def say(prompt: tuple[int, ...], key: int) -> list[int]:
        return ids[min(prompt.count(end), len(ids) - 1)]

    return FakeEngine(say, logprob=-0.5)


def rollouts(tokenizer: Any, engine: Any, made: Any, examples: list[Example], group: int = 1, max_tokens: int = 400):
    template = build_template(made.prompt.template)
    stage = build_stage(made, template, tokenizer)
    grader = build_grader(made.rewards, stage.template)
    sampler = Sampler(engine, tokenizer, grader, 1000, stage=stage)
    prompts = [encode_prompt(tokenizer, stage.template, one.messages) for one in examples]
    request = RolloutRequest(examples, prompts, sampler.sampling(max_tokens, 1.0), (3, "rollout 0", 1), group)
    return collect(sampler, request)[0]


def test_a_calculation_in_two_turns(tokenizer: Any) -> None:
    engine = script(tokenizer, CALL, ANSWER)
    [[one]] = rollouts(tokenizer, engine, recipe(), [example()])
    assert [turn.text for turn in one.turns] == ["<think>" + CALL, "<think>" + ANSWER]
    (call,) = one.turns[0].calls
    assert (call.tool, call.raw_arguments, call.result, call.outcome) == ("calculator", "20 + 22", "42", "ok")
    assert (one.text, one.parts["correct"], one.parts["tool_calls"]) == ("<think>" + ANSWER, 1.0, 1.0)
    first, second = ([*tokenizer.encode(text), tokenizer.eos_token_id] for text in (CALL, ANSWER))
    message = tokenizer.encode("\nUser: <result>42</result>\nAssistant: <think>")
    assert one.completion.ids == (*first, *message, *second)
    assert one.completion.own == (True,) * len(first) + (False,) * len(message) + (True,) * len(second)
    assert one.completion.logprobs == tuple(-0.5 if own else 0.0 for own in one.completion.own)
    assert one.completion.num_own == len(first) + len(second)
    assert one.completion.finish == "stop"


FINISHES = {
    "stop": ([CALL, ANSWER], {}, 400),
    "out_of_turns": ([CALL], {"max_turns": 3}, 400),
    "length": ([CALL], {}, 40),
}


@pytest.mark.parametrize("finish", FINISHES)
def test_how_a_completion_ends(tokenizer: Any, finish: str) -> None:
    turns, options, limit = FINISHES[finish]
    [[one]] = rollouts(tokenizer, script(tokenizer, *turns), recipe(**options), [example()], max_tokens=limit)
    assert one.completion.finish == finish
    assert len(one.completion.ids) <= limit
    assert one.completion.own[-1], "what was told last would be read by nobody"
    if finish == "out_of_turns":
        assert [call.result for turn in one.turns for call in turn.calls] == ["42"] * 3


def test_a_game_ends_when_it_is_over(tokenizer: Any) -> None:
    guesses = [f" <tool>guess: {n}</tool>" for n in (4, 2, 6, 1, 3, 5, 7)]
    made = recipe(environment={"name": "number_guess", "high": 7, "guesses": 7}, max_turns=8)
    made.rewards[0].name = "environment"
    groups = rollouts(tokenizer, script(tokenizer, *guesses), made, [example(n) for n in range(6)], group=2)
    for group in groups:
        assert group[0].prompt_ids == group[1].prompt_ids
        assert "Find a number from 1 to 7 with 7 guesses." in tokenizer.decode(group[0].prompt_ids)
        assert group[0].turns == group[1].turns, "a group has one seed"
        assert {(r.completion.finish, r.reward) for r in group} == {("ended", 1.0)}
        assert group[0].turns[-1].calls[0].result == "right"
    assert len({len(group[0].turns) for group in groups}) > 1, "prompts have seeds of their own"


def test_what_is_wrong_with_a_call_is_answered(tokenizer: Any) -> None:
    turns = [" <tool>calculater: 1</tool>", " <tool>calculator: 1 / 0</tool>", ' <tool>calculator: {"x": 1}</tool>']
    made = recipe(max_turns=3)
    [[one]] = rollouts(tokenizer, script(tokenizer, *turns), made, [example()])
    calls = [call for turn in one.turns for call in turn.calls]
    assert [call.outcome for call in calls] == ["unknown", "failed", "malformed"]
    assert calls[0].result == "there is no tool 'calculater'. Did you mean 'calculator'? There are: calculator"
    assert calls[1].result == "ValueError: division by zero"
    assert "there is no argument 'x'" in calls[2].result


@pytest.mark.parametrize(("level", "finish"), [(0, "stop"), (2, "stop"), (3, "environment_failed")])
def test_a_failed_episode_is_played_again_from_the_same_seed(tokenizer: Any, level: int, finish: str) -> None:
    engine = script(tokenizer, " <tool>use</tool>", ANSWER)
    [[one]] = rollouts(tokenizer, engine, recipe(environment="test_episodes:Flaky"), [example(level=level)])
    assert one.completion.finish == finish
    assert one.has_failed == (finish == "environment_failed")
    assert one.failures == tuple(f"tool 'use': try {n}" for n in range(1, level + 1))
    seeds = Flaky.attempts["sum/1"]
    assert len(seeds) == min(level + 1, 3)
    assert len(set(seeds)) == 1
    keys = {row[0] for _, rows, _ in engine.calls for row in rows}
    assert len(keys) == (1 if level == 3 else 2), "the same numbers are drawn again"


def test_whatever_was_played_has_been_given_back(tokenizer: Any) -> None:
    Lender.given_back.clear()
    examples = [example(n) for n in range(30)]
    rollouts(tokenizer, script(tokenizer, ANSWER), recipe(environment="test_episodes:Lender"), examples, group=2)
    assert sorted(Lender.given_back) == sorted([Lender.id, *[one.id for one in examples] * 2])


def test_a_reward_that_is_no_number_is_a_failure_of_the_environment(tokenizer: Any) -> None:
    [[one]] = rollouts(
        tokenizer,
        script(tokenizer, ANSWER),
        recipe(environment="test_episodes:NoNumber", retries=0),
        [example(level=0)],
    )
    assert one.has_failed
    assert one.failures == ("get_reward returned nan, not a finite number",)


def test_openings_of_a_group_are_equal_or_refused(tokenizer: Any) -> None:
    declare_code("example_environments:Drawing")
    made = recipe(environment="example_environments:Drawing")
    with refuses(UsageError, "reset returned different"):
        rollouts(tokenizer, script(tokenizer, ANSWER), made, [example()], group=2)


def test_a_run_s_model_is_queried_with_its_environment_under_its_own_template() -> None:
    made = recipe(environment="number_guess")
    source = ModelSource("mine", "mine", str(TINY), recipe=made)
    opened = open_model(source)
    assert opened.stage is None, "a chat or a completion of one turn asks no environment"
    played_by = opened.on_stage(None)
    assert played_by.stage is not None
    assert list(played_by.stage.toolset.tools) == ["guess"]
    assert played_by.grader.template is played_by.stage.template
    assert opened.on_stage(Component(name="plain")).stage is None
    made.environment = Component(name="unheard:Of")
    with refuses(UnallowedCode, "'unheard:Of'"):
        opened.on_stage(None)


def test_tools_are_shown_by_the_chat_template_or_in_a_system_message(tokenizer: Any) -> None:
    plain = registry.find("template", "dialogue").bind({})()
    stage = build_stage(recipe("dialogue", show_tools=True), plain, tokenizer)
    message = tokenizer.decode(encode_prompt(tokenizer, stage.template, example().messages))
    assert message.startswith("System: You can use tools. To call one, write <tool>name: arguments</tool>")
    assert "takes: expression (string)" in message
    assert message.endswith("\n\nHuman: What is 20 plus 22?\n\nAssistant:")
    other = AutoTokenizer.from_pretrained(TINY)
    other.chat_template = (
        "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}</tools><tool_call>{% endif %}"
        + tokenizer.chat_template
    )
    chat = registry.find("template", "chat").bind({})()
    stage = build_stage(recipe("chat", show_tools=True), chat, other)
    assert (stage.form, stage.frame.wrapped) == (HERMES, True)
    message = other.decode(encode_prompt(other, stage.template, example().messages))
    assert message.startswith("<tools>calculator</tools><tool_call><|im_start|>user")


def demonstrated(tokenizer: Any, name: str, turns: tuple[Turn, ...]) -> TokenRow:
    item = replace(example(), turns=turns, solution=None)
    template = registry.find("template", name).bind({})()
    ((row,),) = rows_of(tokenizer, template, item, "demonstration")
    assert isinstance(row, TokenRow)
    return row


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thought", ["", "That is too much for me."])
def test_a_demonstration_with_a_call_is_the_episode_that_would_be_played(tokenizer: Any, name: str, thought: str):
    """Token for token: what is trained is what is sampled afterwards, and what the tool says is not trained."""
    call = Call("calculator", '{"expression": "20 + 22"}', "42", "ok")
    row = demonstrated(tokenizer, name, (Turn(thought, (call,)),))
    written = [
        ids for own, ids in runs_of(tuple(t not in row.heard for t in range(len(row.ids))), tuple(row.ids)) if own
    ]
    message = [[*written[0][row.prompt_length :]], [*written[1]]]
    engine = FakeEngine(lambda prompt, key: message[int(len(prompt) > row.prompt_length)])
    [[one]] = rollouts(tokenizer, engine, recipe(name), [example()])
    assert [[(c.tool, c.result, c.outcome) for c in turn.calls] for turn in one.turns] == [
        [("calculator", "42", "ok")],
        [],
    ]
    assert thought in one.turns[0].text
    assert [*one.prompt_ids, *one.completion.ids] == row.ids
    assert [row.prompt_length + i for i, own in enumerate(one.completion.own) if not own] == sorted(row.heard)
    assert one.parts["correct"] == 1.0


def runs_of(own: tuple[bool, ...], ids: tuple[int, ...]) -> list[tuple[bool, tuple[int, ...]]]:
    pairs = groupby(zip(own, ids, strict=True), key=lambda pair: pair[0])
    return [(is_own, tuple(i for _, i in some)) for is_own, some in pairs]


@settings(max_examples=15)
@given(
    name=st.sampled_from(TEMPLATES),
    turns=st.lists(st.lists(st.integers(9, 767), min_size=1, max_size=6), min_size=1, max_size=4),
    results=st.lists(st.text(max_size=12), min_size=4, max_size=4),
    ends_chat=st.booleans(),
)
def test_masks_say_who_wrote_each_token(tokenizer, name, turns, results, ends_chat) -> None:
    """Sampled ids stay as they are, for any ids and results; the rest is the frame around the result."""
    made = recipe(name, max_turns=len(turns))
    template = registry.find("template", name).bind({})()
    stage = build_stage(made, template, tokenizer)
    end = max(stop_ids(tokenizer, template)) if ends_chat else tokenizer.eos_token_id
    message = [[*turn, end] for turn in turns]
    heard: list[tuple[int, ...]] = []

    def say(prompt: tuple[int, ...], key: int) -> list[int]:
        heard.append(prompt)
        return message[len(heard) - 1]

    sampling = Sampling(2000, stop_ids=stop_ids(tokenizer, template))
    numbers = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(played, "read_calls", lambda text, form: [Request("say", "", "")])
        tool = replace(stage.toolset.tools["calculator"], name="say", method=False)
        output = replace(tool, function=lambda **_: results[next(numbers)])
        object.__setattr__(output, "arguments", type("None_", (output.arguments.__base__,), {}))
        stage = replace(stage, toolset=replace(stage.toolset, tools={"say": output}))
        episodes = Episodes(stage, FakeEngine(say), tokenizer, sampling, 1000)
        [[one]] = episodes.play([example()], [[7]], [1])
    runs = runs_of(one.completion.own, one.completion.ids)
    assert [ids for is_own, ids in runs if is_own] == [tuple(turn) for turn in message]
    prompt_ids = [ids for is_own, ids in runs if not is_own]
    frame = [stage.frame.encode(tokenizer, stage.template, [r], TAGGED.results, end) for r in results]
    assert prompt_ids == [tuple(ids) for ids in frame[: len(turns) - 1]]
    for number, prompt in enumerate(heard):
        before = [x for k in range(number) for x in (*message[k], *frame[k])]
        assert prompt == (*one.prompt, *before), "a turn is sampled behind all that was said, as it was"


def test_logprobs_of_all_turns_are_those_of_one_pass(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    stage = build_stage(recipe(max_turns=6), registry.find("template", "r1_zero").bind({})(), tokenizer)
    stops = frozenset(range(0, 768, 5))
    sampling = Sampling(160, temperature=1.3, stop_ids=stops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(played, "read_calls", lambda text, form: [Request("calculator", "1 + 1", "1 + 1")])
        episodes = Episodes(stage, native(model, tokenizer), tokenizer, sampling, 1000)
        groups = episodes.play([example(1), example(2)], [[11, 12], [13, 14]], [1, 2])
    assert sum(len(one.turns) for group in groups for one in group) > 8
    for one in (one for group in groups for one in group):
        ids = torch.tensor([[*one.prompt, *one.completion.ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.prompt) - 1 : -1].float() / 1.3
        whole = logits.log_softmax(-1)[range(len(one.completion.ids)), list(one.completion.ids)]
        own = torch.tensor(one.completion.own)
        sampled = torch.tensor(one.completion.logprobs)
        assert_close(whole[own], sampled[own], atol=OF_EMBEDDED, rtol=0)
        assert float(sampled[~own].abs().max() if (~own).any() else 0.0) == 0.0
