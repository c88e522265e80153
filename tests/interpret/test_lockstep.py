"""Two models over one text: the writer alone is the engine's greedy answer; with all of the donor it is the donor's."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.interpret.differences.causal import Added, write_with
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection

PROMPTS = [[0, 5, 9, 30, 41], [0, 77, 3], [0, 12, 200, 201, 55, 60, 61, 62, 63], [0, 300]]
STOPS = frozenset({0, 13, 14})
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def writer() -> Any:
    return load_model(ModelSection(name="tiny", device="cpu"), seed=0).model


@pytest.fixture(scope="module")
def donor(writer: Any) -> Any:
    """The writer with its first two blocks disturbed: all that differs is in the residual stream after layer 2."""
    changed = copy.deepcopy(writer)
    torch.manual_seed(1)
    with torch.no_grad():
        for block in changed.model.layers[:2]:
            block.mlp.down_proj.weight += 0.08 * torch.randn_like(block.mlp.down_proj.weight)
    return changed


def greedy(model: Any) -> list[list[int]]:
    keys = [[0] for _ in PROMPTS]
    found = NativeEngine(model).generate(PROMPTS, keys, Sampling(MAX_TOKENS, 0.0, stop_ids=STOPS))
    return [list(group[0].ids) for group in found]


def write(writer: Any, donor: Any, treatments: list[Added], site: str = "resid.2") -> list[list[list[int]]]:
    return write_with(writer, donor, site, PROMPTS, treatments, max_tokens=MAX_TOKENS, stop_ids=STOPS)


def nothing(x: Tensor, _: Tensor) -> Tensor:
    return torch.zeros_like(x)


def everything(x: Tensor, other: Tensor) -> Tensor:
    return other - x


def test_ids_beyond_the_tokenizer_are_not_written(writer: Any) -> None:
    def write_within(num_tokens: int | None) -> list[list[int]]:
        return write_with(
            writer, None, "resid.2", PROMPTS, [nothing], max_tokens=8, stop_ids=frozenset(), num_tokens=num_tokens
        )[0]

    largest = max(id for ids in write_within(None) for id in ids)
    engine = NativeEngine(writer)
    engine.num_tokens = largest
    found = engine.generate(PROMPTS, [[0] for _ in PROMPTS], Sampling(8, 0.0))
    assert write_within(largest) == [list(group[0].ids) for group in found]
    assert largest not in {id for ids in write_within(largest) for id in ids}


def test_treatments_side_by_side_are_each_what_they_are_alone(writer: Any, donor: Any) -> None:
    own, other = greedy(writer), greedy(donor)
    assert own != other
    assert len({len(ids) for ids in own}) > 1  # rows end at different times
    assert write(writer, donor, [nothing, everything, nothing]) == [own, other, own]
    assert write(donor, writer, [everything]) == [own]


@pytest.mark.parametrize("site", ["resid.1", "resid.4"])
def test_a_donor_that_is_the_writer_changes_nothing_anywhere(writer: Any, site: str) -> None:
    def far(x: Tensor, other: Tensor) -> Tensor:
        return 100.0 * (other - x)

    assert write(writer, writer, [far], site) == [greedy(writer)]


def test_at_the_embeddings_too_each_treatment_sees_its_own_text(writer: Any) -> None:
    """A donor of no blocks has no cache, by which prompts and answers could be told apart."""

    def shove(x: Tensor, other: Tensor) -> Tensor:
        return torch.ones_like(x) + 100.0 * (other - x)

    shoved = write(writer, writer, [shove], "resid.0")[0]
    assert shoved != greedy(writer)
    assert write(writer, writer, [nothing, shove], "resid.0") == [greedy(writer), shoved]


def test_treatments_see_the_same_tokens_of_both_models(writer: Any, donor: Any) -> None:
    """Along one answer, the rows that a treatment is given are those of a forward pass over the whole text."""
    from families import activations_of

    seen: list[tuple[Tensor, Tensor]] = []

    def look(x: Tensor, other: Tensor) -> Tensor:
        seen.append((x.clone(), other.clone()))
        return torch.zeros_like(x)

    prompt = PROMPTS[0]
    ids = write_with(writer, donor, "resid.2", [prompt], [look], max_tokens=6, stop_ids=frozenset())[0][0]
    assert len(ids) == 6
    read = [*prompt, *ids[:-1]]
    for index, model in enumerate((writer, donor)):
        rows = torch.cat([pair[index] for pair in seen])
        assert torch.allclose(rows, activations_of(model, [read], ["resid.2"])["resid.2"].float(), atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_are_counted_from_the_first_token_of_each_prompt(family: str) -> None:
    """Shorter prompts are padded in front; learned positions (GPT-2) would tell."""
    model = families.build(family)
    prompts = [[3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13]]
    batch = write_with(model, model, "resid.3", prompts, [nothing], max_tokens=8, stop_ids=frozenset())[0]
    for prompt, written in zip(prompts, batch, strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert written == ids[len(prompt) :]
