"""Rollouts that wait in a checkpoint, as earlier versions stored them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from posttrain.training.sources import stored
from posttrain.types import Completion, Example, Message, Rollout


@pytest.fixture
def written() -> Iterator[dict[str, object]]:
    example = Example("a/1", (Message("user", "How many?"),), answer="4")
    rollout = Rollout(example, (1, 2), Completion((3,), (-0.5,), "stop"), "4", {"correct": 1.0}, 1.0, 1, 0, 0, 0)
    stored._groups_type.cache_clear()
    yield stored._write_rollout(rollout)
    stored._groups_type.cache_clear()


def accepts(row: dict[str, object]) -> bool:
    try:
        stored._groups_type().validate_json(json.dumps([[row]]), strict=True)
    except ValidationError:
        return False
    return True


def test_stored_rollout_without_a_field_that_has_a_default_is_read(written: dict[str, object]) -> None:
    assert accepts(written)
    assert accepts({name: value for name, value in written.items() if name not in ("extracted", "outcome")})
    assert not accepts({name: value for name, value in written.items() if name != "reward"})


def test_stored_rollout_with_a_field_that_is_gone_is_read_and_with_an_unknown_one_refused(
    written: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not accepts(written | {"speed": 1.5})
    stored._groups_type.cache_clear()
    monkeypatch.setattr(stored, "_GONE", ("speed",))
    assert accepts(written | {"speed": 1.5})
    assert not accepts(written | {"another": 1.5})
