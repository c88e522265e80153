from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from posttrain.errors import RecipeError
from posttrain.registry import find
from posttrain.signatures import Range
from refusing import refuses
from torch_alone import run_with_torch_alone


def test_range_has_the_schema_of_pydantics_own_field():
    ours = TypeAdapter(Annotated[float, Range(gt=0, lt=0.5)]).json_schema()
    theirs = TypeAdapter(Annotated[float, Field(gt=0, lt=0.5)]).json_schema()
    assert ours == theirs
    assert ours["exclusiveMaximum"] == 0.5


@pytest.mark.parametrize(("value", "is_inside"), [(0, True), (-1e-9, False), (1, True), (1.5, False)])
def test_range_of_a_number_is_checked(value: float, is_inside: bool):
    adapter = TypeAdapter(Annotated[float, Range(ge=0, le=1)])
    if is_inside:
        assert adapter.validate_python(value) == value
    else:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


def test_options_outside_of_their_range_are_refused_by_name():
    with refuses(RecipeError, "objective.clip_low"):
        find("objective", "grpo").options({"clip_low": -0.1})


def test_every_component_of_the_pure_kinds_is_found_with_torch_alone():
    code = """
from posttrain.registry import entries
kinds = ("objective", "advantage", "aggregation", "correction", "mask", "selection")
print(sum(len(entries(kind)) for kind in kinds))
import sys
print([name for name in ("pydantic", "jaxtyping", "numpy", "transformers") if name in sys.modules])
"""
    num_found, loaded = run_with_torch_alone(code).splitlines()
    assert int(num_found) >= 46
    assert loaded == "[]"


def test_numbers_are_graded_and_counted_without_torch():
    code = """
from posttrain.evaluation.statistics import pass_at_k, wilson_interval
from posttrain.graders.grading import Submission
from posttrain.graders.numeric import numeric
print(pass_at_k(10, 3, 2), wilson_interval(3, 10)[0] < 0.3, numeric(Submission("", "1/2", "0.5")).value)
"""
    assert run_with_torch_alone(code, torch=False).split() == ["0.5333333333333332", "True", "1.0"]
