"""Documents: what is laid over what, where every key stands, and what is written down again."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from posttrain.errors import RecipeError
from posttrain.recipes.document import Content, Document
from posttrain.recipes.sections import Component, Section
from refusing import refuses


class Inner(Section):
    size: int = Field(default=1, ge=1)
    limit: float | None = 1.0


class Mine(Content):
    label: ClassVar[str] = "a thing"
    description: str = ""
    inner: Inner = Field(default_factory=Inner)
    word: Component | None = None
    parts: dict[str, dict[str, int]] = Field(default_factory=dict)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_document_over_another_one_and_the_command_line(tmp_path: Path) -> None:
    below = write(tmp_path / "below.yaml", "description: old\ninner: {size: 3, limit: 2.0}\nword: {name: a, k: 1}\n")
    path = write(tmp_path / "mine.yaml", "extends: below.yaml\ninner:\n  limit: null\n")
    document = Document.load(Mine, path).extend().override([("inner.size", "5")])
    mine = document.check()
    assert mine.dump() == {
        "description": "",
        "inner": {"size": 5, "limit": None},
        "word": {"name": "a", "k": 1},
        "parts": {},
    }
    assert document.line_of("inner.size") == "command line: "
    assert document.line_of("inner.limit") == f"{path}:3: "
    assert document.line_of("word.k") == f"{below}:3: "
    assert document.line_of("nothing") == f"{path}: "
    again = Document.read(Mine, "again.yaml", mine.to_yaml()).check()
    assert again.dump() == mine.dump()
    moved = again.model_copy(update={"description": "said otherwise"})
    assert moved.fingerprint() == mine.fingerprint()
    assert Document.load(Mine, below).check().fingerprint() != mine.fingerprint()


def test_every_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "iner: 3\ninner:\n  size: 0\n  sice: 2\n")
    with pytest.raises(RecipeError) as caught:
        Document.load(Mine, path).extend().check()
    assert sorted(str(caught.value).splitlines()) == [
        f"{path}:1: iner: a thing has no key 'iner'. Did you mean 'inner'? "
        "Known keys: description, inner, word, parts, extends",
        f"{path}:3: inner.size: Input should be greater than or equal to 1; got 0",
        f"{path}:4: inner.sice: section 'inner' has no key 'sice'. Did you mean 'size'? Known keys: size, limit",
    ]


def test_a_part_of_a_document_states_where_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "several.yaml", "parts:\n  first:\n    inner:\n      size: 0\n")
    document = Document.load(Mine, path)
    with pytest.raises(RecipeError, match=rf"^{path}:4: inner.size: Input should be greater"):
        document.part(Mine, "parts.first", document.content["parts"]["first"]).check()
    with refuses(RecipeError, "command line: inner.size"):
        document.part(Mine, "parts.first", {"inner": {"size": -1}}, ["parts.first.inner.size"]).check()


def test_a_section_that_the_command_line_began_is_the_command_lines(tmp_path: Path) -> None:
    document = Document.load(Mine, write(tmp_path / "mine.yaml", "inner: {size: 2}\n"))
    with refuses(RecipeError, "command line: iner", "'iner'", "'inner'"):
        document.override([("iner.size", "3")]).check()
    overridden = document.override([("inner.limit", "3")])
    assert overridden.line_of("inner") == f"{tmp_path / 'mine.yaml'}:1: "


def test_what_only_a_file_may_say(tmp_path: Path) -> None:
    document = Document(Mine, {}, "command line")
    with refuses(RecipeError, "extends"):
        document.override([("extends", "below.yaml")])
    path = write(tmp_path / "mine.yaml", "word: {name: a, trust_remote_code: true}\n")
    with pytest.raises(RecipeError, match=rf"{path}:1: word.trust_remote_code: a file cannot allow"):
        Document.load(Mine, path).check()
