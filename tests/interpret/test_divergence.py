"""Where two models disagree: shares and means are of the KL that a plain forward pass gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from posttrain.interpret.differences.changes import ChangeSums, Scaling, Seen, paired_changes, random_features
from posttrain.interpret.differences.divergence import locate_divergence, token_kl
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection

DOCUMENTS = [[0, 50, 51, 70, 71, 70, 72], [0, 52, 70, 73, 71], [0, 53, 54, 55, 70, 71]]
PROMPTS = [3, 2, 4]


@pytest.fixture(scope="module")
def located() -> tuple[dict[str, Any], list[torch.Tensor]]:
    loaded = load_model(ModelSection(name="tiny", device="cpu"), seed=0)
    post = copy.deepcopy(loaded.model)
    torch.manual_seed(0)
    with torch.no_grad():
        post.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    every, _ = token_kl(loaded.model, post, DOCUMENTS, PROMPTS)
    return locate_divergence(loaded.model, post, DOCUMENTS, PROMPTS, loaded.tokenizer), every


def test_sums_and_means(located: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    found, every = located
    answers = [kl[n:] for kl, n in zip(every, PROMPTS, strict=True)]
    total = float(torch.cat(answers).sum())
    assert total > 0.01
    assert found["tokens"] == 9
    assert found["per_token"] == pytest.approx(total / 9)
    assert found["per_answer"] == pytest.approx(total / 3)
    assert found["share_of_top_tenth"] == pytest.approx(float(torch.cat(answers).max()) / total)
    prompts = torch.cat([kl[1:n] for kl, n in zip(every, PROMPTS, strict=True)])
    assert found["per_prompt_token"] == pytest.approx(float(prompts.mean()))
    assert [p["answers"] for p in found["places"]] == [3, 3, 2]  # places that fewer than two reach are left out
    assert found["places"][1]["kl"] == pytest.approx(sum(float(kl[1]) for kl in answers) / 3)


def test_tokens_that_carry_it(located: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    found, every = located
    total = found["per_token"] * found["tokens"]
    for key in ("tokens_at", "tokens_after"):
        assert sum(entry["share"] for entry in found[key]) == pytest.approx(1.0)
        assert sum(entry["count"] for entry in found[key]) == 9
    # token 70 stands in the answers at places 3 and 5 of the first, 2 of the second and 4 of the third document
    at = float(every[0][3] + every[0][5] + every[1][2] + every[2][4])
    entry = next(e for e in found["tokens_at"] if e["count"] == 4)
    assert entry["share"] == pytest.approx(at / total)
    assert entry["mean"] == pytest.approx(at / 4)
    # and goes before places 4 and 6 of the first, 3 of the second and 5 of the third
    after = float(every[0][4] + every[0][6] + every[1][3] + every[2][5])
    assert next(e for e in found["tokens_after"] if e["count"] == 4)["mean"] == pytest.approx(after / 4)


def test_whole_answers_are_shown(located: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    found, every = located
    assert [len(s["tokens"]) for s in found["shown"]] == [4, 3, 2]
    assert found["shown"][1]["kl"] == pytest.approx(every[1][2:].tolist(), abs=1e-4)


def test_random_features_did_not_change_and_are_a_function_of_the_seed() -> None:
    torch.manual_seed(0)
    base = torch.relu(torch.randn(3000, 40))
    post = base.clone()
    post[:, :10] *= 2
    sums = ChangeSums(40)
    sums.add(base, post, torch.arange(3000) // 20)
    changes = paired_changes(sums)
    seen = Seen(changes, {}, Scaling(torch.zeros(2, 40), torch.zeros(40)), {})
    ranked = changes.ranking()[:8].tolist()
    assert set(ranked) <= set(range(10))
    drawn = random_features(seen, ranked, 0, 1)
    assert drawn == random_features(seen, ranked, 0, 1)
    assert drawn != random_features(seen, ranked, 0, 2)
    assert len(set(drawn)) == 8
    assert min(drawn) >= 10
