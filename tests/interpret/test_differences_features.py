"""Two recorded models through one dictionary: changes, nulls, scaling, where features changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.changes import (
    WINDOW,
    feature_contexts,
    mean_differences,
    scale_difference,
    see_changes,
)

WIDTH, DOCUMENTS, LENGTH = 8, 60, 30


class Letters:
    """A tokenizer whose token i is the letter i."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def axes() -> Dictionary:
    """Feature j is coordinate j where it is above 0."""
    made = Dictionary(WIDTH, WIDTH, kind="l1").requires_grad_(False)
    made.W_enc.copy_(torch.eye(WIDTH))
    made.W_dec.copy_(torch.eye(WIDTH))
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """Coordinate 0 is doubled in post, 1 is gone, 2 is new at token 3 ("d"), the others are as they were."""
    draws = torch.Generator().manual_seed(0)
    rows = DOCUMENTS * LENGTH
    tokens = torch.randint(0, 6, (DOCUMENTS, LENGTH), generator=draws)
    base = torch.relu(torch.randn(rows, WIDTH, generator=draws)) + 0.1
    base[:, 2] = -1.0
    post = base.clone()
    post[:, 0] *= 2
    post[:, 1] = -1.0
    post[:, 2] = torch.where(tokens.flatten() == 3, 5.0, -1.0)
    post[100, 2] = 9.0
    folder = tmp_path_factory.mktemp("store") / "both"
    return write_tensors(folder, {"resid.2": [base, post]}, documents=tokens.tolist())


def see(store: ActivationStore) -> Any:
    return see_changes(store, "resid.2", axes(), held_out_start=1500, seed=0, min_documents=12, min_change=0.2)


def test_what_changed_is_seen_and_the_nulls_are_silent(store: ActivationStore) -> None:
    seen = see(store)
    assert seen.changes.changed.tolist() == [True, True, True] + [False] * 5
    assert float(seen.changes.ratio[1, 0]) == pytest.approx(2.0, rel=1e-6)
    assert float(seen.changes.ratio[0, 0]) == pytest.approx(1.0)  # as often, twice as strongly
    assert {name: null.num_changed for name, null in seen.nulls.items()} == {"itself": 0, "swapped": 0, "halves": 0}
    assert {name: int(null.tested.sum()) for name, null in seen.nulls.items()}["swapped"] == 8
    # seven coordinates are above 0 in the base; in post one of them is gone, and a sixth of the tokens have the new one
    assert seen.quality["base"]["l0"] == pytest.approx(7.0)
    assert 6.0 < seen.quality["post"]["l0"] < 6.3


def test_scaling_reads_the_factors(store: ActivationStore) -> None:
    amplification = see(store).amplification
    assert float(amplification[0]) == pytest.approx(2.0, rel=1e-5)
    assert amplification[3:].tolist() == pytest.approx([1.0] * 5, rel=1e-5)


def test_a_latent_that_post_has_alone_has_no_part_in_the_base(store: ActivationStore) -> None:
    """Latents of the difference: coordinate 0 rose along with what the base has, coordinate 2 is new."""
    scaling = scale_difference(store, "resid.2", axes())
    nu = scaling.beta[0] / scaling.beta[1]
    assert abs(float(nu[2])) < 0.05
    assert float(nu[0]) == pytest.approx(0.5, abs=0.02)
    assert torch.isnan(nu[3])


def test_contexts_are_where_it_changed_most(store: ActivationStore) -> None:
    new, gone = feature_contexts(store, "resid.2", axes(), [2, 1], Letters(), count=2)
    # 9 at row 100, 5 at every "d"
    assert new["contexts"][0]["document"] == 100 // LENGTH
    first = new["contexts"][0]
    assert (first["post"][first["at"]], first["base"][first["at"]]) == (9.0, 0.0)
    assert first["at"] == min(WINDOW, 100 % LENGTH)
    ids = store.document_tokens(100 // LENGTH)
    start = max(0, 100 % LENGTH - WINDOW)
    assert first["tokens"] == [Letters().decode([i]) for i in ids[start : 100 % LENGTH + WINDOW + 1]]
    other = new["contexts"][1]
    assert other["document"] != first["document"]
    assert other["tokens"][other["at"]] == "d"
    assert new["tokens"][0][0] == "d"
    assert new["tokens"][0][1] > 0.95
    assert gone["contexts"][0]["base"][gone["contexts"][0]["at"]] > 2.0  # what fell is shown where the base had it
    assert gone["tokens"][0][2] < 0.0


def test_mean_differences_by_hand(store: ActivationStore) -> None:
    names, means = mean_differences(store, "resid.2", 1)
    assert names == ["answers", "answers, token 1"]  # these documents have no prompts
    rows = torch.arange(store.num_rows)
    delta = store.gather(rows, "resid.2", "post") - store.gather(rows, "resid.2", "base")
    assert torch.allclose(means[0], delta.mean(0), atol=1e-5)
    assert torch.allclose(means[1], delta[::LENGTH].mean(0), atol=1e-5)
