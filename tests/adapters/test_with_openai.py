"""An unmodified client of OpenAI gets the greedy answers of ``posttrain evaluate``."""

from __future__ import annotations

from typing import Any

import pytest
from answered import MAX_TOKENS, Answered

from serving import Served

pytestmark = pytest.mark.adapters


def test_greedy_answers_are_those_of_evaluate(served: Served, evaluated: Answered) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    for question, answer in evaluated.answers.items():
        messages: list[Any] = [{"role": "user", "content": question}]
        asked: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        assert client.chat.completions.create(**asked).choices[0].message.content == answer
        pieces = client.chat.completions.create(**asked, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer
