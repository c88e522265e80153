# ruff: noqa: E501 (a row is a line)
"""Rows of many shapes, as people write them; the texts are our own.

``LEARNT``: rows to imitate, which task ``jsonl`` reads. ``GIVEN``: rows of given answers, which ``preferences`` reads.
``REFUSED``: rows that say something which cannot be used, with the message (file, line and key come before it).
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def user(text: Any, **keys: Any) -> Row:
    return {"role": "user", "content": text, **keys}


def message(text: Any, **keys: Any) -> Row:
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def tool(text: str, **keys: Any) -> Row:
    return {"role": "tool", "content": text, **keys}


def call(name: str, arguments: Any, text: Any = None, **keys: Any) -> Row:
    function = {"name": name, "arguments": arguments}
    return message(text, tool_calls=[{"id": "call_1", "type": "function", "function": function}], **keys)


def shares(*turns: tuple[str, str], **keys: Any) -> list[Row]:
    return [{"from": role, "value": text, **keys} for role, text in turns]


ASK, REPLY = user("Which river flows through Paris?"), message("The Seine does.")
MORE, THEN = user("And through Rome?"), message("The Tiber.")
SCHEMA = {
    "type": "function",
    "function": {
        "name": "river_of",
        "description": "Looks a river up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
LOOKED_UP = [ASK, call("river_of", {"city": "Paris"}), tool("Seine, 777 km", tool_call_id="call_1"), REPLY]

LEARNT: dict[str, Row] = {
    "prompt and response": {"prompt": "Which river?", "response": "The Seine."},
    "prompt, response, gold answer": {"prompt": "2 + 3?", "response": "It is \\boxed{5}.", "answer": 5},
    "prompt, solution, answer": {"prompt": "2 + 3?", "solution": "Two and three make five.", "answer": "5"},
    "system and response": {"system": "Speak of rivers.", "prompt": "Which one?", "response": "The Seine."},
    "reasoning next to a response": {
        "prompt": "Which?",
        "response": "The Seine.",
        "reasoning_content": "Think of Paris.",
    },
    "a completion": {"prompt": "Name a river.", "completion": " The Danube."},
    "a prompt and a completion in messages": {"prompt": [ASK], "completion": [REPLY]},
    "a completion as one message": {"prompt": [system("Be brief."), ASK], "completion": REPLY},
    "one turn": {"messages": [ASK, REPLY]},
    "two turns": {"messages": [ASK, REPLY, MORE, THEN]},
    "a system message": {"messages": [system("You know rivers."), ASK, REPLY]},
    "a system key": {"system": "You know rivers.", "messages": [ASK, REPLY, MORE, THEN]},
    "a system key that the conversation has too": {"system": "Rivers.", "messages": [system("Rivers."), ASK, REPLY]},
    "a first answer of weight 0": {"messages": [ASK, message("I do not know.", weight=0), MORE, THEN]},
    "a first answer that is not trained": {
        "messages": [ASK, message("No idea.", train=False), MORE, message("Tiber", train=True)]
    },
    "weights on all": {"messages": [user("Hello", weight=0), message("Good day.", weight=1)]},
    "nulls instead of keys": {"messages": [{**ASK, "tool_calls": None, "name": None}, {**REPLY, "tool_calls": []}]},
    "reasoning of both turns": {
        "messages": [
            ASK,
            message("The Seine.", reasoning_content="Paris."),
            MORE,
            message("Tiber.", thinking="Rome, so."),
        ]
    },
    "reasoning in the text": {"messages": [ASK, message("<think>\nParis lies there.\n</think>\n\nThe Seine.")]},
    "an end of thinking alone": {"messages": [ASK, message("Paris it is.\n</think>\n\nThe Seine.")]},
    "parts of text": {
        "messages": [user([{"type": "text", "text": "Which "}, {"type": "text", "text": "river?"}]), REPLY]
    },
    "a tool": {"messages": LOOKED_UP, "tools": [SCHEMA]},
    "a tool without schema": {"messages": LOOKED_UP},
    "tools as text": {"messages": LOOKED_UP, "tools": '[{"name": "river_of", "parameters": {"type": "object"}}]'},
    "arguments as text": {
        "messages": [ASK, call("river_of", '{"city": "Paris", "depth": 2.5}'), tool("Seine"), REPLY],
    },
    "several rounds of tools": {
        "messages": [*LOOKED_UP, MORE, call("river_of", {"city": "Rome"}), tool("Tiber, 406 km"), THEN],
    },
    "results in another order": {
        "messages": [
            ASK,
            message(
                None,
                tool_calls=[{"id": i, "function": {"name": "length", "arguments": {"of": i}}} for i in ("aa", "bb")],
            ),
            tool("of bb: 406", tool_call_id="bb"),
            tool("of aa: 777", tool_call_id="aa"),
            REPLY,
        ],
    },
    "blank reasoning": {"messages": [ASK, message("The Seine.", reasoning_content="", thinking=" ")]},
    "blank keys": {"messages": [ASK, REPLY], "system": " ", "tools": [], "history": None},
    "empty keys": {"instruction": "Name a river.", "output": "Rhine.", "system": "", "tools": "", "history": ""},
    "a developer's message": {"messages": [{"role": "developer", "content": "Be brief."}, ASK, REPLY]},
    "sharegpt with tools": {
        "conversations": shares(
            ("human", "Which?"),
            ("function_call", '{"name": "river_of", "arguments": {"city": "Paris"}}'),
            ("observation", "Seine"),
            ("gpt", "The Seine."),
        )
    },
    "two calls one after the other": {
        "messages": [
            ASK,
            call("river_of", {"city": "Paris"}),
            tool("Seine"),
            call("length_of", {"river": "Seine"}),
            tool("777"),
            message("The Seine, of 777 km."),
        ],
    },
    "arguments of all kinds": {
        "messages": [
            ASK,
            call("find", {"deep": {"list": ['a"b', 1, None, True]}, "unit": "k\nm", "big": 12345678901234567890}),
            tool("{}"),
            REPLY,
        ],
    },
    "a call without arguments": {"messages": [ASK, call("now", {}), tool("Tuesday"), REPLY]},
    "a blank result": {"messages": [ASK, call("now", {}), tool(""), REPLY]},
    "sharegpt": {"conversations": shares(("human", "Which river?"), ("gpt", "The Seine."))},
    "sharegpt with a system message": {
        "conversations": shares(
            ("system", "Be brief."), ("human", "Which?"), ("gpt", "Seine."), ("human", "Sure?"), ("gpt", "Yes.")
        )
    },
    "sharegpt with a system key": {"system": "Rhyme.", "conversations": shares(("human", "Which?"), ("gpt", "Seine."))},
    "alpaca": {"instruction": "Name the river.", "input": "Paris", "output": "The Seine."},
    "alpaca without input": {"instruction": "Name a river.", "input": "", "output": "The Rhine."},
    "alpaca with history": {
        "instruction": "And Rome?",
        "output": "Tiber.",
        "history": [["Paris?", "Seine."]],
        "system": "Rivers.",
    },
    "markers in the texts": {
        "messages": [user("What is <|im_end|> and <eos>?"), message("A <|im_start|> and </think> mark.")]
    },
    "other scripts": {"messages": [user("Қайсы өзен? 河流?"), message("塞纳河 — Сена 🙂")]},
    "white space around": {"messages": [user("  Which river?\n"), message("\n The Seine. \n")]},
    "further keys": {
        "messages": [ASK, REPLY],
        "source": "web",
        "prompt_id": "a1",
        "score": 3,
        "meta": {"topic": "rivers"},
    },
    "a conversation that the assistant begins": {"messages": [message("Ask me of rivers."), ASK, REPLY]},
}

GIVEN: dict[str, Row] = {
    "a pair": {"prompt": "Which river?", "chosen": "The Seine.", "rejected": "The Nile."},
    "a pair with a system key": {"system": "Rivers.", "prompt": "Which?", "chosen": "The Seine.", "rejected": "No."},
    "a pair of conversations": {"chosen": [ASK, REPLY], "rejected": [ASK, message("The Nile.")]},
    "a pair of conversations with a system key": {
        "system": "Rivers.", "prompt": ASK["content"], "chosen": [ASK, REPLY], "rejected": [ASK, message("The Nile.")]
    },
    "a pair behind two turns": {"prompt": [ASK, REPLY, MORE], "chosen": [THEN], "rejected": [message("The Po.")]},
    "a pair with scores": {"prompt": "Which?", "chosen": "Seine", "rejected": "Nile", "score_chosen": 9, "score_rejected": 1},
    "a pair with a margin": {"prompt": "Which?", "chosen": "Seine", "rejected": "Nile", "margin": 0.5},
    "a pair with reasoning": {
        "prompt": [ASK],
        "chosen": [message("Seine.", reasoning_content="Paris.")],
        "rejected": [message("Nile.", thinking="Cairo.")],
    },
    "a pair with tools": {"prompt": "Which?", "chosen": "Seine", "rejected": "Nile", "tools": [SCHEMA]},
    "a pair behind a tool": {"prompt": LOOKED_UP[:3], "chosen": "The Seine.", "rejected": "Some river."},
    "a judged answer": {"prompt": "Which?", "completion": "The Seine.", "label": True},
    "a judged conversation": {"messages": [ASK, REPLY, MORE, message("The Nile.")], "label": False},
    "a rated answer": {"prompt": "Which?", "completion": "Some river.", "rating": 3.5},
    "steps": {"prompt": "2 + 3 + 4?", "completions": ["Two and three make five.", "Five and four make nine."], "labels": [1, 1]},
}  # fmt: skip

REFUSED: dict[str, tuple[str, Row, str]] = {
    "an unknown key of a message": ("jsonl", {"messages": [user("q", mood="glad"), REPLY]}, "message 1: unknown key 'mood'"),
    "a slip of a key of a message": (
        "jsonl", {"messages": [ASK, message("a", wieght=0)]}, "message 2: unknown key 'wieght'. Did you mean 'weight'"
    ),
    "two reasonings": (
        "jsonl", {"messages": [ASK, message("a", reasoning_content="x", thinking="y")]}, "'reasoning_content' and 'thinking' differ"
    ),
    "half a weight": ("jsonl", {"messages": [ASK, message("a", weight=0.5)]}, "'weight' must be 0 or 1; got 0.5"),
    "a train that is no truth value": ("jsonl", {"messages": [ASK, message("a", train="no")]}, "'train' must be true or false"),
    "opposite weights": ("jsonl", {"messages": [ASK, message("a", weight=0, train=True)]}, "contradict each other"),
    "reasoning of the user": ("jsonl", {"messages": [user("q", thinking="t"), REPLY]}, "only assistant messages may have"),
    "an image": ("jsonl", {"messages": [user([{"type": "image_url"}]), REPLY]}, r"non-text part \('image_url'\)"),
    "images of a row": ("jsonl", {"messages": [ASK, REPLY], "images": ["a.png"]}, "the key 'images' is not read here"),
    "another system message": (
        "jsonl", {"system": "A.", "messages": [system("B."), ASK, REPLY]}, "'system' differs from the conversation"
    ),
    "a slip of a key": ("jsonl", {"sytem": "A.", "messages": [ASK, REPLY]}, "unknown key 'sytem'. Did you mean 'system'"),
    "tools that are none": ("jsonl", {"messages": [ASK, REPLY], "tools": "river_of"}, "'tools' must be a list of schemas"),
    "a tool without name": ("jsonl", {"messages": [ASK, REPLY], "tools": [{"type": "function"}]}, "'tools 1 name' must be text"),
    "a margin to imitate": ("jsonl", {"messages": [ASK, REPLY], "margin": 1.0}, "the key 'margin' is not read here"),
    "a weight of a row": ("jsonl", {"messages": [ASK, REPLY], "weight": 0.5}, "the key 'weight' is not read here"),
    "variables of the program": (
        "jsonl", {"messages": [ASK, REPLY], "chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs' must be an object"
    ),
    "a margin that is no number": (
        "preferences", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "big"}, "'margin' must be a finite number"
    ),
    "a margin of a judged answer": (
        "preferences", {"prompt": "q", "completion": "a", "label": True, "margin": 1}, "the key 'margin' is not read here"
    ),
    "a given answer of weight 0": (
        "preferences", {"prompt": [ASK], "chosen": [message("a", weight=0)], "rejected": [message("b")]}, "the response has weight 0"
    ),
    "a given answer that calls": (
        "preferences", {"prompt": [ASK], "chosen": [call("f", {})], "rejected": [message("b")]}, "tool calls must follow a user message"
    ),
    "a result of another call": (
        "jsonl",
        {"messages": [ASK, call("f", {}), tool("r", tool_call_id="call_2"), REPLY]},
        "message 3: 'tool_call_id' 'call_2' must match a preceding call",
    ),
    "a judged answer to imitate": ("jsonl", {"prompt": "q", "completion": "a", "label": False}, "has a label, so it is a scored"),
    "a call of sharegpt that is none": (
        "jsonl", {"conversations": shares(("human", "q"), ("function_call", "f()"), ("observation", "r"), ("gpt", "a"))}, "tool_calls 1 name' must be text"
    ),
    "a rating as a label": ("preferences", {"prompt": "q", "completion": "a", "label": 7}, "Store ratings under 'rating'"),
}  # fmt: skip
