"""YAML as recipes are written in it: what is read, as what, and what is refused with its line."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import RecipeError
from posttrain.strict_yaml import MAX_DEPTH, OldTruth, read_option, read_yaml, write_yaml
from refusing import refuses


def read(text: str) -> Any:
    return read_yaml(text, "mine.yaml")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("8", 8), ("-8", -8), ("+8", 8), ("0", 0), ("1_000", 1000), ("0x1F", 31), ("1e-4", 1e-4), ("1.", 1.0)],
        *[
            (".5", 0.5),
            ("1E3", 1000.0),
            ("-1.5e+3", -1500.0),
            ("010.5", 10.5),
            (".inf", math.inf),
            ("-.Inf", -math.inf),
        ],
        *[("~", None), ("", None), ("null", None), ("true", True), ("FALSE", False), ("yes", "yes"), ("off", "off")],
        *[(text, text) for text in ("1:30", "190:20:30", "2024-05-17", "0o17", "²", "٣", "1,000", "1e", "_1")],
        *[("=", "="), ("<<", "<<"), ("'010'", "010"), ('"\\u00e9"', "é"), ("!!str 3", "3")],
        *[("[1, [a, {b: 2}]]", [1, ["a", {"b": 2}]]), ("|\n  a\n  b\n", "a\nb\n")],
    ],
)
def test_values(text: str, value: Any) -> None:
    found = read(f"key: {text}")["key"]
    assert found == value
    assert type(found) in (type(value), OldTruth)
    assert (type(found) is OldTruth) == (text in ("yes", "off"))


def test_nan_is_a_number_for_the_types_to_refuse() -> None:
    assert math.isnan(read("key: .nan")["key"])


def test_keys_are_the_texts_that_stand_there() -> None:
    assert read("3: a\ntrue: b\n2024-05-17: c\n~: d\non: e\n") == {
        "3": "a",
        "true": "b",
        "2024-05-17": "c",
        "~": "d",
        "on": "e",
    }


def test_lines_of_every_key() -> None:
    text = "a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n"
    assert read_yaml(text, "x")[1] == {"a": 1, "a.b": 2, "a.c": 3, "a.c.0": 4, "a.c.1": 5, "a.c.1.d": 5}


def test_anchors_are_copies_and_merges_give_way() -> None:
    data = read("one: &o {a: 1, b: [2]}\ntwo: {<<: *o, a: 3}\nthree: *o\nfour: {<<: [{a: 5}, *o]}\n")
    assert data["two"] == {"a": 3, "b": [2]}
    assert data["four"] == {"a": 5, "b": [2]}
    data["three"]["b"].append(9)
    assert data["one"] == {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 010", "mine.yaml:2: 010 is octal to some and decimal to others"),
        ("a: 1\na: 2", "mine.yaml:2: a: this key stands twice; leave one of them out"),
        ("a:\n- {b: 1, b: 2}", "mine.yaml:2: a.0.b: this key stands twice"),
        ("a: *x", "mine.yaml:1: not valid YAML: found undefined alias 'x'"),
        ("<<: 3", "mine.yaml:1: << takes a mapping in"),
        ("a: !own {b: 1}", "the tag !own is not for this"),
        ("a: !!int 3", "the tag !!int is not for this"),
        ("? [1]\n: 2", "mine.yaml:1: a key must be a plain word"),
        ("a: " + "[" * 60 + "]" * 60, f"mine.yaml:1: nested more than {MAX_DEPTH} deep"),
        ("a: [1", "mine.yaml:1: not valid YAML: expected ',' or ']'"),
        (
            "a:\n\tb: 1",
            "mine.yaml:2: not valid YAML: found character '\\t' that cannot start any token; use spaces, no",
        ),
        ("a: \x07", "mine.yaml: not valid YAML: special characters are not allowed"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["!!str [1]", "!<plain> [1]", "!!str {b: 1}", "!!seq 3"])
def test_a_tag_of_another_kind_of_node_is_refused_with_its_line(text: str) -> None:
    with refuses(RecipeError, "mine.yaml:2"):
        read(f"a: 1\nkey: {text}")


def test_a_quoted_merge_key_is_a_key_and_a_depth_counts_collections() -> None:
    assert read('"<<": {b: 1}\nc: 2') == {"<<": {"b": 1}, "c": 2}
    assert read(f"key: {'[' * MAX_DEPTH}1{']' * MAX_DEPTH}")
    with refuses(RecipeError, "mine.yaml:4"):
        read("a: 1\nb: 2\nc:\n  <<: 5\n")


def test_a_long_word_of_digits_is_read_in_linear_time() -> None:
    begun = time.process_time()
    assert read(f"key: {'1' * 100_000}x")["key"].endswith("x")
    assert time.process_time() - begun < 1.0


def test_an_alias_bomb_is_counted_as_written_out() -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    with refuses(RecipeError, "mine.yaml:1"):
        read("a0: &a0 [x]\n" + levels)


def test_an_option_that_is_no_yaml_is_text() -> None:
    assert read_option("[1, 2]", "key") == [1, 2]
    for text in ("[1", "a: b: c", "*.jsonl", "*x", "!!own", "@x", "`x`"):
        assert read_option(text, "key") == text
    with refuses(RecipeError, "command line: key"):
        read_option("010", "key")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(
        [
            "\x85",
            "a\u2028b",
            "\u2029\x85\n",
            *["yes", "no", "1:30", "010", "1e5", "0x1f", ".inf", "~", "=", "<<", "1_0"],
            "- a",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(plain)
def test_what_is_written_is_read_again(value: Any) -> None:
    text = write_yaml({"key": value})
    assert read(text) == {"key": value}
