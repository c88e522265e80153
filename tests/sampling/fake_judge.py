"""A chat endpoint that judges by a rule, for tests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

from fake_vllm import FakeVllm
from posttrain.types import Completion

TEXTS = re.compile(r"<(text-[0-9a-f]{16}) ([a-z-]+)>\n(.*?)\n</\1>", re.DOTALL)
Answer = Callable[[dict[str, Any], int], Any]


def judgement(value: Any, key: str = "score") -> str:
    return json.dumps({"reasoning": "because", key: value})


class FakeJudge(FakeVllm):
    """A chat endpoint whose reply is a function of the request and of how often it has come."""

    def __init__(self, reply: Answer, **options: Any) -> None:
        super().__init__(lambda body: Completion((), (), "stop"), **options)
        self.reply, self.request = reply, 0
        self.seen: dict[str, int] = {}
        self.chats: list[dict[str, Any]] = []
        self.busy, self.most_busy, self.lock = 0, 0, threading.Lock()
        self.posts["/v1/chat/completions"] = self.chat

    def chat(self, body: dict[str, Any]) -> Any:
        with self.lock:
            self.chats.append(body)
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            name = json.dumps(body)
            self.seen[name] = count = self.seen.get(name, 0) + 1
        try:
            reply = self.reply(body, count)
        finally:
            with self.lock:
                self.busy -= 1
        if isinstance(reply, str):
            message = {"role": "assistant", "content": reply}
            return {"choices": [{"message": message}], "usage": {"prompt_tokens": 100, "completion_tokens": 7}}
        return reply


def quoted(body: dict[str, Any]) -> dict[str, str]:
    """The texts that a request quotes, by name."""
    return {name: text for _, name, text in TEXTS.findall(body["messages"][1]["content"])}


def by_length(body: dict[str, Any], count: int) -> str:
    """Scores an answer by its length; of two prefers the longer."""
    texts = quoted(body)
    if "answer" in texts:
        return judgement(min(10, len(texts["answer"])))
    first, second = len(texts["first-answer"]), len(texts["second-answer"])
    return judgement("first" if first > second else "second" if second > first else "tie", "winner")
