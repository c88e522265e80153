"""An unmodified client of OpenAI gets the greedy answers of ``posttrain evaluate``, and calls tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answered import MAX_TOKENS, Answered

from calling_model import make_player, make_shown, play, questions
from posttrain import registry
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.contract import build_toolset
from serving import Served, serving

pytestmark = pytest.mark.adapters


def test_greedy_answers_are_those_of_evaluate(served: Served, evaluated: Answered) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    for question, answer in evaluated.answers.items():
        messages: list[Any] = [{"role": "user", "content": question}]
        request: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        assert client.chat.completions.create(**request).choices[0].message.content == answer
        pieces = client.chat.completions.create(**request, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer


def test_a_calculator_is_called_as_in_training(tmp_path: Path) -> None:
    """The client's own messages are sent back as they came; the answers are those of the engine of training."""
    import openai

    calculator: Any = registry.find("environment", "calculator").bind({})()
    tool = build_toolset(Component(name="calculator")).tools["calculator"]
    run = make_player(make_shown(tmp_path), tmp_path, "player", show_tools=False)
    with serving(tmp_path, str(run)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        request: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": MAX_TOKENS}
        for question in questions():
            episode = play(run, question)
            messages: list[Any] = [{"role": "user", "content": question}]
            for turn in episode.turns:
                message = client.chat.completions.create(
                    messages=messages, tools=[dict(tool.schema)], **request
                ).choices[0]
                messages.append(message.message)
                assert message.finish_reason == ("tool_calls" if turn.calls else "stop")
                for call, played in zip(message.message.tool_calls or [], turn.calls, strict=True):
                    arguments = json.loads(call.function.arguments)
                    result = calculator.calculator(**arguments)
                    assert (arguments, result) == ({"expression": played.raw_arguments}, played.result)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            assert len(episode.turns) == 2
            assert message.message.content == episode.turns[-1].text
