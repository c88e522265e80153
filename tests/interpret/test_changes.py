"""Changes of features between two models: the estimates, their intervals, and the findings by chance alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from planted import plant, plant_change
from torch import Tensor

from closeness import allclose, approx
from posttrain.evaluation.comparisons import holm
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.differences.changes import (
    Changes,
    DictionaryChanges,
    match_rates,
    measure_changes,
    paired_changes,
    random_features,
    scale_latents,
    sum_by_document,
    two_sided_p,
    unpaired_changes,
)
from posttrain.interpret.differences.summaries import WINDOW, feature_contexts, mean_differences, overlap
from posttrain.interpret.saes.sae import SparseAutoencoder

DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2])
BASE = torch.tensor([[1.0], [0.0], [2.0], [0.0], [1.0], [0.0]])
POST = torch.tensor([[2.0], [1.0], [2.0], [3.0], [0.0], [1.0]])


def changes_of(base: Tensor, post: Tensor, documents: Tensor, **options) -> Changes:
    sizes = documents.unique(return_counts=True)[1]
    moved = (post - base).double().square().sum(0)
    return paired_changes(sum_by_document(base, documents), sum_by_document(post, documents), sizes, moved, **options)


def test_a_small_case_by_hand() -> None:
    """Sums by document: base (1, 3, 0), post (3, 5, 1); fires base (1, 2, 0), post (2, 2, 1); tokens (2, 3, 1)."""
    found = changes_of(BASE, POST, DOCUMENTS, min_documents=1)
    assert found.base[:, 0].tolist() == approx([3 / 6, 4 / 6])
    assert found.post[:, 0].tolist() == approx([5 / 6, 9 / 6])
    assert found.ratio[:, 0].tolist() == approx([5 / 3, 9 / 4])
    delta = 5 / 6
    spread = sum((d - delta * n) ** 2 for d, n in ((2, 2), (2, 3), (1, 1)))
    assert float(found.error[1, 0]) == approx(math.sqrt(1.5 * spread) / 6)
    log_error = math.sqrt(1.5 * sum((p / 9 - b / 4) ** 2 for p, b in ((3, 1), (5, 3), (1, 0))))
    # three documents: Student's t with two degrees of freedom
    assert float(found.low[1, 0]) == approx(9 / 4 * math.exp(-4.302653 * log_error), rel=1e-6)
    assert float(found.high[1, 0]) == approx(9 / 4 * math.exp(4.302653 * log_error), rel=1e-6)
    assert found.documents.tolist() == [3]


def test_the_p_is_students_with_the_documents_that_it_fires_in() -> None:
    found = changes_of(BASE, POST, DOCUMENTS, min_documents=1)
    t = float(found.change[1, 0] / found.error[1, 0])
    # two degrees of freedom: P(|T| > t) = 1 − t/√(2 + t²)
    assert float(found.p[1, 0]) == approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)


def test_a_rare_feature_is_judged_by_the_documents_that_know_it() -> None:
    """Five of 200 documents: t ≈ 2.2 is beyond 5 % by the normal distribution, not with 4 degrees of freedom."""
    base, post = torch.zeros(200, 1), torch.zeros(200, 1)
    post[:5, 0] = torch.tensor([1.0, 1.2, 0.9, 1.1, 0.8]) * 4
    base[:5, 0] = 1.0
    found = changes_of(base, post, torch.arange(200), min_documents=2)
    t = float(found.change[1, 0] / found.error[1, 0])
    assert 2.0 < t < 2.4
    assert float(found.p[1, 0]) == approx(float(two_sided_p(torch.tensor([t]).double(), torch.tensor([4]))))
    assert float(found.p[1, 0]) > 0.08


def clustered(seed: int, features: int = 150, documents: int = 100, tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Two models that do not differ, whose noise hangs together within documents."""
    draws = torch.Generator().manual_seed(seed)
    place = torch.arange(documents * tokens) // tokens
    shared = torch.randn(documents * tokens, features, generator=draws)
    sides = [torch.relu(shared + torch.randn(documents, features, generator=draws)[place] - 1.5) for _ in range(2)]
    return sides[0], sides[1], place


def flagged_by_tokens(base: Tensor, post: Tensor) -> int:
    """Count the features that a test with tokens as units would flag, by the same rule."""
    delta = (post - base).double()
    t = delta.mean(0) / (delta.std(0) / math.sqrt(len(delta)))
    return int((holm(two_sided_p(t, torch.full_like(t, 10_000))) < 0.05).sum())


def test_chance_is_not_flagged_though_tokens_hang_together() -> None:
    flagged, by_tokens = [], []
    for seed in range(8):
        base, post, place = clustered(seed)
        flagged.append(int(changes_of(base, post, place).significant.sum()))
        by_tokens.append(flagged_by_tokens(base, post))
    assert sum(count > 0 for count in flagged) <= 2  # 5 % of the data sets may have one
    assert min(by_tokens) > 30  # of 150: what tokens alone would call changed


def test_unpaired_errors_are_those_of_two_independent_means() -> None:
    """With documents of one token each, they are Welch's."""
    torch.manual_seed(1)
    a, b = torch.relu(torch.randn(2, 500, 4))
    one = torch.arange(500)
    found = unpaired_changes(*((sum_by_document(x, one), torch.ones(500)) for x in (a, b)))
    welch = (a.double().var(0) / 500 + b.double().var(0) / 500).sqrt()
    assert allclose(found.error[1], welch, rtol=1e-9)
    assert allclose(found.change[1], (b.double().mean(0) - a.double().mean(0)))


def planted_changes(seed: int = 0) -> tuple[Changes, Tensor, Tensor, Tensor]:
    """The planted change seen through the true directions: (changes, factors, added, latent scaling post/base)."""
    planted = plant(d=64, features=64, l0=3.0, noise=0.02, seed=seed)
    change = plant_change(planted, 12_000)
    # reading by the pseudo-inverse on what is active would need a solver; the codes themselves are the best encoder
    codes = planted.codes(12_000)
    before = codes.clone()
    before[:, change.added] = 0.0
    after = codes * change.factors
    reconstruction = before @ planted.directions
    there = [scale_latents(before, x - reconstruction, planted.directions)[1] for x in (change.base, change.post)]
    found = changes_of(before, after, torch.arange(12_000) // 40)
    return found, change.factors, change.added, there[1] / there[0]


def test_planted_changes_are_read_and_nothing_else() -> None:
    found, factors, added, amplification = planted_changes()
    planted = (factors != 1).clone()
    planted[added] = True
    assert found.changed.tolist() == planted.tolist()
    amplified = factors == 1.8
    assert allclose(found.ratio[1][amplified], torch.tensor(1.8, dtype=torch.float64), rtol=1e-5)
    assert float(amplification[amplified].min()) > 1.62
    assert float(amplification[amplified].max()) < 1.98
    assert float(amplification[factors == 0].abs().max()) < 0.1
    assert (found.base[0][added] == 0).all()
    assert int(found.ranking()[:24].sort().values.tolist() == planted.nonzero()[:, 0].tolist()) == 1


def test_a_sure_but_small_change_is_significant_and_not_called_one() -> None:
    torch.manual_seed(0)
    base = torch.relu(torch.randn(4000, 3))
    found = changes_of(base, base * 1.1, torch.arange(4000) // 20)
    assert found.significant.tolist() == [True] * 3
    assert found.changed.tolist() == [False] * 3


def test_rare_features_are_not_tested() -> None:
    documents = torch.arange(100)
    base = torch.zeros(100, 2)
    post = base.clone()
    post[:11, 0] = 1.0
    post[:12, 1] = 1.0
    found = changes_of(base, post, documents, min_documents=12)
    assert found.tested.tolist() == [False, True]
    assert found.p[:, 0].tolist() == [1.0, 1.0]


def test_holm_by_hand() -> None:
    p = torch.tensor([0.04, 0.01, 0.03], dtype=torch.float64)
    assert holm(p).tolist() == approx([0.06, 0.03, 0.06])
    assert holm(torch.tensor([0.6, 0.7], dtype=torch.float64)).tolist() == [1.0, 1.0]


def test_matched_features_fire_as_often_and_none_is_taken_twice() -> None:
    rates = torch.tensor([0.5, 0.1, 0.49, 0.0, 0.11, 0.48, 0.01])
    sizes = torch.ones(7)
    forbidden = torch.tensor([False, False, True, False, False, False, False])
    assert match_rates([0, 1], rates, sizes, forbidden, [0.0, 0.0]) == [5, 4]
    # the nearest of the free ones is drawn by the number; silent and forbidden ones never
    assert match_rates([0, 1], rates, sizes, forbidden, [0.99, 0.99]) == [6, 5]
    assert match_rates([0, 1, 5, 4], rates, sizes, forbidden, [0.0] * 4) == [6]


def least_squares(feature: Tensor, direction: Tensor, y: Tensor) -> float:
    """The β of min Σ ‖β f d − y‖², by a solver."""
    column = (feature[:, None] * direction).reshape(-1, 1).double()
    return float(torch.linalg.lstsq(column, y.reshape(-1, 1).double()).solution)


def test_latent_scaling_is_that_of_least_squares() -> None:
    torch.manual_seed(0)
    features, directions, errors = torch.relu(torch.randn(300, 6)), torch.randn(6, 16), torch.randn(300, 16)
    energy, present = scale_latents(features, errors, directions)
    beta = present / (energy * directions.double().square().sum(1))
    for j in range(6):
        own = features[:, j : j + 1] * directions[j]
        assert float(beta[j]) == approx(least_squares(features[:, j], directions[j], errors + own), abs=1e-5)
    assert float(energy[0]) == approx(float(features[:, 0].double().square().sum()))


def test_random_features_did_not_change_and_are_a_function_of_the_seed() -> None:
    torch.manual_seed(0)
    base = torch.relu(torch.randn(3000, 40))
    post = base.clone()
    post[:, :10] *= 2
    changes = changes_of(base, post, torch.arange(3000) // 20)
    ranked = changes.ranking()[:8].tolist()
    assert set(ranked) <= set(range(10))
    drawn = random_features(changes, ranked, 0, 1)
    assert drawn == random_features(changes, ranked, 0, 1)
    assert drawn != random_features(changes, ranked, 0, 2)
    assert len(set(drawn)) == 8
    assert min(drawn) >= 10


def test_overlap_by_hand() -> None:
    """Features 0..3 of the second are 3, 2, 1, 0 of the first; feature 4 of each is unlike all others."""
    first = torch.eye(5, 8)
    second = torch.stack([first[3], first[2], first[1], first[0], torch.eye(8)[7]])
    rose = torch.ones(5)
    signs = torch.tensor([-1.0, 1, 1, 1, 1])  # what is feature 0 of the second, 3 of the first, went the other way
    chosen = torch.tensor([0, 3, 4])
    found = overlap((first, second), (chosen, torch.tensor([3, 0])), (rose, signs))
    assert found["count"] == 3
    assert found["share"] == approx(1 / 3)  # 0 alone: 3 has another sign, 4 no partner
    assert found["by_chance"] == approx(1 / 5)
    assert found["cosine"] == approx(2 / 3)
    nothing = overlap((first, second), (torch.tensor([], dtype=torch.long), torch.tensor([3])), (rose, signs))
    assert math.isnan(nothing["share"])


# Recorded models through one dictionary.

WIDTH, TEXTS, LENGTH = 8, 60, 30


class Letters:
    """A tokenizer whose token i is the letter i."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def axes() -> SparseAutoencoder:
    """Feature j is coordinate j where it is above 0."""
    made = SparseAutoencoder(WIDTH, WIDTH, kind="l1").requires_grad_(False)
    made.W_enc.copy_(torch.eye(WIDTH))
    made.W_dec.copy_(torch.eye(WIDTH))
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """Coordinate 0 is doubled in post, 1 is gone, 2 is new at token 3 ("d"), the others are as they were."""
    draws = torch.Generator().manual_seed(0)
    rows = TEXTS * LENGTH
    tokens = torch.randint(0, 6, (TEXTS, LENGTH), generator=draws)
    base = torch.relu(torch.randn(rows, WIDTH, generator=draws)) + 0.1
    base[:, 2] = -1.0
    post = base.clone()
    post[:, 0] *= 2
    post[:, 1] = -1.0
    post[:, 2] = torch.where(tokens.flatten() == 3, 5.0, -1.0)
    post[100, 2] = 9.0
    folder = tmp_path_factory.mktemp("store") / "both"
    return write_tensors(folder, {"resid.2": [base, post]}, documents=tokens.tolist())


def see(store: ActivationStore) -> DictionaryChanges:
    return measure_changes(store, "resid.2", axes(), held_out_start=1500, seed=0, min_documents=12, min_change=0.2)


def test_what_changed_is_seen_and_the_nulls_are_silent(store: ActivationStore) -> None:
    seen = see(store)
    assert seen.changes.changed.tolist() == [True, True, True] + [False] * 5
    assert float(seen.changes.ratio[1, 0]) == approx(2.0, rel=1e-6)
    assert float(seen.changes.ratio[0, 0]) == approx(1.0)  # as often, twice as strongly
    assert {name: null.num_changed for name, null in seen.nulls.items()} == {"itself": 0, "swapped": 0, "halves": 0}
    assert {name: int(null.tested.sum()) for name, null in seen.nulls.items()}["swapped"] == 8
    # seven coordinates are above 0 in the base; in post one of them is gone, and a sixth of the tokens have the new one
    assert seen.quality["base"]["l0"] == approx(7.0)
    assert 6.0 < seen.quality["post"]["l0"] < 6.3


def test_scaling_reads_the_factors(store: ActivationStore) -> None:
    amplification = see(store).amplification
    assert float(amplification[0]) == approx(2.0, rel=1e-5)
    assert amplification[3:].tolist() == approx([1.0] * 5, rel=1e-5)


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
    assert allclose(means[0], delta.mean(0), atol=1e-5)
    assert allclose(means[1], delta[::LENGTH].mean(0), atol=1e-5)
