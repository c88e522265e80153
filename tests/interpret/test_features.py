"""Features: contexts and counts against a plain loop, the logit lens against norm and head, and the report as JSON."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
from torch import Tensor

from closeness import approx, assert_close
from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import (
    ActivationStore,
    Documents,
    RecordedModel,
    StoreIndex,
    StoreWriter,
    describe_rows,
    write_tensors,
)
from posttrain.interpret.features.features import (
    NUM_BINS,
    FeatureReport,
    check_features,
    describe_features,
    find_contexts,
    hash_prefixes,
)
from posttrain.interpret.features.lens import Lens, build_lens
from posttrain.interpret.saes.fitting import StoreRows
from posttrain.interpret.saes.sae import SparseAutoencoder
from refusing import refuses


def coordinates(d: int) -> SparseAutoencoder:
    """Feature i is coordinate i where it is positive."""
    sae = SparseAutoencoder(d, d, kind="l1")
    with torch.no_grad():
        sae.W_dec.copy_(torch.eye(d))
        sae.W_enc.copy_(torch.eye(d))
    return sae


def store_of(
    folder: Path, documents: list[list[int]], x: Tensor, kept: Tensor, rows_per_shard: int = 50
) -> ActivationStore:
    """All tokens' activations ``x``, of which the rows that are not ``kept`` were dropped."""
    index = StoreIndex(widths={"resid.1": x.shape[1]}, sources=[RecordedModel(name="model", model="m")], dtype="fp32")
    writer = StoreWriter(folder, index, Documents(documents))
    columns = {"resid.1@model": x} | describe_rows(documents, range(len(documents)))
    for part in kept.nonzero()[:, 0].split(rows_per_shard):
        writer.add({name: values[part] for name, values in columns.items()}, {})
    return writer.finish()


def sixteenths(x: Tensor) -> Tensor:
    """Return numbers of few digits: their products and sums are exact, so that equal rows tie in every order."""
    return (x * 16).round() / 16


def make_random(folder: Path, features: SparseAutoencoder) -> tuple[ActivationStore, list[list[int]], Tensor]:
    """Documents that often begin alike; their activations depend on the tokens so far, as a model's do."""
    draws = torch.Generator().manual_seed(3)
    documents: list[list[int]] = []
    for _ in range(60):
        ids = torch.randint(0, 3, (int(torch.randint(1, 12, (1,), generator=draws)),), generator=draws).tolist()
        shared = documents[-1][: int(torch.randint(0, 9, (1,), generator=draws))] if documents else []
        documents.append(shared + ids)
    by_prefix: dict[tuple[int, ...], Tensor] = {}
    rows = []
    for ids in documents:
        for end in range(1, len(ids) + 1):
            prefix = tuple(ids[:end])
            if prefix not in by_prefix:
                by_prefix[prefix] = sixteenths(torch.randn(features.d, generator=draws) * 4.0 ** (end % 4))
            rows.append(by_prefix[prefix])
    x = torch.stack(rows)
    kept = torch.rand(len(x), generator=draws) < 0.9
    return store_of(folder, documents, x, kept), documents, x


def test_find_contexts_equals_a_plain_loop(tmp_path: Path) -> None:
    sae = SparseAutoencoder(6, 9, kind="topk", options={"k": 3})
    store, documents, _ = make_random(tmp_path / "s", sae)
    rows = StoreRows(store)
    every = torch.arange(store.num_rows)
    values = sae.encode(rows.gather(every)).detach()
    places = list(zip(store.documents(every).tolist(), store.positions(every).tolist(), strict=True))
    row_of = {place: row for row, place in enumerate(places)}
    before, after, wanted = 3, 2, 7
    whole = find_contexts(sae, rows, contexts=wanted, before=before, after=after)
    for feature in range(9):
        column = values[:, feature]
        best: dict[int, tuple[float, int]] = {}
        for row, (document, _) in enumerate(places):
            if float(column[row]) > best.get(document, (0.0, 0))[0]:
                best[document] = (float(column[row]), row)
        top: list[tuple[float, int]] = []
        seen = set()
        for value, row in sorted(best.values(), key=lambda pair: (-pair[0], pair[1])):
            document, position = places[row]
            prefix = tuple(documents[document][: position + 1])
            if prefix not in seen:
                seen.add(prefix)
                top.append((value, row))
        top = top[:wanted]
        assert whole.top_rows[: len(top), feature].tolist() == [row for _, row in top]
        assert whole.top[: len(top), feature].tolist() == approx([value for value, _ in top], rel=1e-5)
        for k, (_, row) in enumerate(top):
            document, position = places[row]
            for w, place in enumerate(range(position - before, position + after + 1)):
                there = row_of.get((document, place))
                got = whole.windows[k, feature, w]
                if there is None:
                    assert torch.isnan(got)
                else:
                    assert_close(got, column[there], atol=1e-5, rtol=1e-5)
        active = column[column > 0].double()
        assert whole.active[feature] == len(active)
        assert whole.total[feature].item() == approx(active.sum().item(), rel=1e-5)
        width = 2.0 ** whole.exponents[feature].item() / NUM_BINS
        assert width * NUM_BINS / 2 <= active.max() < width * NUM_BINS
        expected = torch.bincount((active / width).long(), minlength=NUM_BINS)
        assert torch.equal(whole.counts[feature], expected)


def test_find_contexts_does_not_depend_on_chunks(tmp_path: Path) -> None:
    sae = SparseAutoencoder(6, 9, kind="l1")
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(sixteenths(parameter))
    store, _, _ = make_random(tmp_path / "s", sae)
    rows, chosen = StoreRows(store), torch.tensor([8, 2])
    whole = find_contexts(sae, rows, contexts=5)
    for size in (17, 100):
        parts = find_contexts(sae, rows, features=chosen, contexts=5, chunk_rows=size)
        for name, one in vars(whole).items():
            other = getattr(parts, name)
            if isinstance(one, Tensor) and name != "chosen":
                picked = one[:, chosen] if name in ("top", "top_rows", "windows", "keys") else one[chosen]
                assert_close(other, picked, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_prefixes_are_distinguished() -> None:
    one, other = hash_prefixes([5, 6, 7, 5]), hash_prefixes([5, 7, 6, 5])
    assert one[0] == other[0]
    assert not (one[1:] == other[1:]).any()  # the same tokens in another order are another text
    assert len(set(hash_prefixes([0] * 1000).tolist())) == 1000


# The report.

DOCUMENTS = [[10, 11, 12, 13, 14], [10, 11, 20], [30, 31]]


class Letters:
    """A tokenizer whose token i is chr(i + 87)."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(i + 87) for i in ids)


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    x = torch.zeros(10, 3)
    x[:, 0] = torch.tensor([0, 2, 0, 4, 1, 0, 2, 3, -1, -1], dtype=torch.float32)
    x[9, 1] = 1.5
    return write_tensors(tmp_path / "store", {"resid.1": x}, documents=DOCUMENTS)


@pytest.fixture
def sae() -> SparseAutoencoder:
    return coordinates(3)  # the third is silent


def describe(sae: SparseAutoencoder, store: ActivationStore, **options) -> FeatureReport:
    unembedding = torch.zeros(40, 3)
    unembedding[33, 0], unembedding[34, 0], unembedding[35, 1] = 2.0, -1.0, 8.0
    lens = Lens(unembedding, torch.tensor([1.0, 0.5, 1.0]), centres=False)
    return describe_features(sae, StoreRows(store), lens=lens, tokenizer=Letters(), tokens=2, **options)


def test_numbers_contexts_and_tokens(sae: SparseAutoencoder, store: ActivationStore) -> None:
    report = describe(sae, store, about={"dictionary": "mine"})
    first, second, third = report["features"]
    assert [first[key] for key in ("feature", "active", "density", "mean", "max")] == [0, 5, 0.5, 12 / 5, 4.0]
    assert first["histogram"]["bin_width"] == 8 / 32
    assert [(i, n) for i, n in enumerate(first["histogram"]["counts"]) if n] == [(4, 1), (8, 2), (12, 1), (16, 1)]
    places = [[c[key] for key in ("activation", "document", "position", "start")] for c in first["contexts"]]
    assert places == [[4, 0, 3, 0], [3, 1, 2, 0]]
    assert first["contexts"][0]["tokens"] == ["a", "b", "c", "d", "e"]
    assert first["contexts"][0]["activations"] == [0, 2, 0, 4, 1]
    # logits 2 and -1 of the first coordinate, minus their mean over 40 tokens; the second's are halved by the gain
    assert first["promoted"][0] == ["x", 33, 2 - 1 / 40]
    assert first["suppressed"][0] == ["y", 34, -1 - 1 / 40]
    assert second["promoted"][0] == ["z", 35, 4 - 4 / 40]
    assert (second["density"], second["contexts"][0]["activation"]) == (0.1, 1.5)
    assert second["contexts"][0]["tokens"] == ["u", "v"]
    assert (third["active"], third["mean"], third["contexts"], third["histogram"]["counts"]) == (0, 0.0, [], [])
    about = report["about"]
    assert (about["rows"], about["documents"], about["silent"], about["dictionary"]) == (10, 3, 1, "mine")
    assert about["active_per_row"] == approx(0.6)


def test_windows_around_the_strongest_token(sae: SparseAutoencoder, tmp_path: Path) -> None:
    x = torch.zeros(200, 3)
    x[150, 0], x[3, 1] = 1.0, 1.0
    store = write_tensors(tmp_path / "long", {"resid.1": x}, documents=[list(range(200))])
    first, second, _ = describe_features(sae, StoreRows(store))["features"]
    context = first["contexts"][0]
    assert (context["position"], context["start"]) == (150, 130)
    assert context["tokens"] == [f"<{i}>" for i in range(130, 161)]  # without a model ids stand for tokens
    assert (context["activations"][20], first["promoted"]) == (1, [])
    assert (second["contexts"][0]["start"], len(second["contexts"][0]["tokens"])) == (0, 14)


def test_only_some_features(sae: SparseAutoencoder, store: ActivationStore) -> None:
    every = describe(sae, store)["features"]
    some = describe(sae, store, features=[1, 0, 1], contexts=1)["features"]
    assert [feature["feature"] for feature in some] == [1, 0]
    assert some[0] == every[1]
    assert some[1]["contexts"] == every[0]["contexts"][:1]
    with refuses(UsageError, "3: this dictionary"):
        check_features(sae, [0, 3])


# The logit lens.


@pytest.mark.parametrize(
    ("family", "offset", "centres"), [("qwen3", 0, False), ("gpt2", 0, True), ("gemma2", 1, False)]
)
def test_build_lens_measures_the_gain_of_the_final_norm(family: str, offset: float, centres: bool) -> None:
    model = families.build(family)
    lens = build_lens(model)
    norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
    assert_close(lens.gain, norm.weight.detach() + offset, rtol=1e-4, atol=1e-5)
    assert lens.centres is centres


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "olmo2", "gpt_neox"])
@torch.no_grad()
def test_lens_equals_norm_and_head(family: str) -> None:
    """norm(u) = gain * (u, centred or not) / size, so the head's logits are the lens's divided by that size."""
    model = families.build(family)
    lens, head = build_lens(model), model.get_output_embeddings()
    backbone = model.transformer if family == "gpt2" else model.gpt_neox if family == "gpt_neox" else model.model
    norm = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}.get(family, "norm")
    u = torch.randn(3, 32)
    unit = u / u.norm(dim=1, keepdim=True)
    inner = unit - unit.mean(1, keepdim=True) if lens.centres else unit
    size = inner.square().mean(1, keepdim=True).sqrt()
    normed = getattr(backbone, norm)
    # far above the norm's epsilon, so that it does not matter
    logits = (head(normed(1e4 * unit)) - head(normed(-1e4 * unit))) / 2 * size
    assert_close(lens.logits(5 * u), logits - logits.mean(1, keepdim=True), rtol=1e-3, atol=1e-4)


def test_build_lens_a_backbone_is_refused() -> None:
    with refuses(UsageError, "no LM head"):
        build_lens(families.build("qwen3").model)
