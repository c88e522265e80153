"""``posttrain sae features``, and a model steered by features in ``generate`` and in the studio."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from closeness import approx
from posttrain.cli import main
from posttrain.commands.chat.conversation import Controls
from posttrain.commands.chat.studio import Library, stream_replies
from posttrain.commands.interpret.steering import read_steering
from posttrain.commands.options import read_changes
from posttrain.errors import UsageError
from posttrain.interpret.activations.record import record_activations
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.saes.sae import SparseAutoencoder, save_sae
from posttrain.models.load import load_tokenizer
from refusing import refuses

TEXTS = ["Eva has 3 shells.", "Tom eats 2 of 7 apples.", "Eva has 3 apples."]
D, FEATURES = 128, 24
GENERATE = ["generate", "tiny", "Eva has 3 shells.", "--max-tokens", "6", "--temperature", "0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with recorded activations of three sentences and a random dictionary for them."""
    root = tmp_path_factory.mktemp("features")
    run = root / "runs" / "sae"
    documents = [load_tokenizer("tiny").encode(text) for text in TEXTS]
    store = record_activations("tiny", documents, ["resid.2"], run / "activations", dtype="fp32", outliers=0)
    metadata = {
        "model_name": "tiny",
        "site": "resid.2",
        "source": "model",
        "models": [{"name": "model", "model": "tiny", "weights_hash": store.index.sources[0].weights_hash}],
    }
    save_sae(SparseAutoencoder(D, FEATURES, kind="l1", seed=1), run / "dictionary", metadata)
    (run / "recipe.yaml").write_text(
        "activations: {model: {name: tiny}, site: resid.2, task: stories}\ndictionary: l1\n"
    )
    return root


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_from_a_run_to_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sae", "features", "sae", "--contexts", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"page: {Path('runs/sae/features.html')}\njson: {Path('runs/sae/features.json')}" in shown
    found = json.loads(Path("runs/sae/features.json").read_text())
    store = ActivationStore("runs/sae/activations")
    values = (
        SparseAutoencoder(D, FEATURES, kind="l1", seed=1).encode(store.gather(torch.arange(store.num_rows))).detach()
    )
    assert f"{FEATURES} features over {store.num_rows} rows" in shown
    tokenizer = load_tokenizer("tiny")
    assert [feature["feature"] for feature in found["features"]] == list(range(FEATURES))
    for feature, column in zip(found["features"], values.T, strict=True):
        assert feature["density"] == approx((column > 0).double().mean().item(), rel=1e-4)
        assert feature["max"] == approx(column.max().clamp(min=0).item(), rel=1e-4)
        assert len(feature["promoted"]) == len(feature["suppressed"]) == 10
        if feature["contexts"]:
            context, row = feature["contexts"][0], int(column.argmax())
            assert context["activation"] == approx(column[row].item(), rel=1e-4)
            assert context["document"] == int(store.documents(torch.tensor([row]))[0])
            text = TEXTS[context["document"]]
            assert "".join(context["tokens"]) == text
            assert len(context["tokens"]) == len(tokenizer.encode(text))
    about = found["about"]
    assert (about["model"], about["site"], about["notices"]) == ("tiny", "resid.2", [])
    assert found["features"][12]["address"] == "features.html#feature-12"
    before = Path("runs/sae/features.html").read_bytes()
    assert main(["sae", "features", "sae", "--features", "3", "--no-lens", "--quiet"]) == 0
    assert Path("runs/sae/features.html").read_bytes() == before  # the page of all features keeps its addresses
    some = json.loads(Path("runs/sae/features-some.json").read_text())["features"]
    assert [feature["address"] for feature in some] == ["features-some.html#feature-3"]
    assert "Eva has 3" not in Path("runs/sae/features.html").read_text()  # tokens by their number, each text once


def test_a_folder_with_other_rows(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    write_tensors("other", {"resid.2": torch.randn(30, D)}, about="made up")
    folder = "runs/sae/dictionary"
    save_sae(SparseAutoencoder(D, 5, kind="l1"), "bare")
    assert main(["sae", "features", "bare"]) == 2
    assert "give --activations FOLDER" in capsys.readouterr().err
    assert main(["sae", "features", "bare", "--activations", "other", "--out", "page.html"]) == 0
    assert "note:" in capsys.readouterr().out
    chosen = ["--features", "3,17", "--no-lens", "--out", "two.html", "--activations", "other", "--quiet"]
    assert main(["sae", "features", folder, *chosen]) == 0
    assert capsys.readouterr().out == ""
    found = json.loads(Path("two.json").read_text())
    assert [feature["feature"] for feature in found["features"]] == [3, 17]
    assert found["features"][0]["promoted"] == []
    write_tensors("pair", {"resid.2": [torch.randn(30, D), torch.randn(30, D)]})
    for arguments, message in (
        (["sae", "--activations", "pair"], "--source"),
        (["sae", "--activations", "nowhere"], "nowhere"),
        (["sae", "--features", "24"], "24: this dictionary"),
        (["sae", "--out", "page.txt"], "must end in"),
        (["sae", "--site", "resid.3"], "`posttrain sae features --site`"),
        (["sae", "--model", "./nobody"], "--no-lens"),
        (["seo"], "seo:"),
    ):
        assert main(["sae", "features", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["sae", "features", "sae", "--activations", "pair", "--source", "post", "--quiet"]) == 0


def test_rows_of_another_model_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {"site": "resid.2", "source": "model", "models": [{"model": "tiny", "weights_hash": "0" * 64}]}
    save_sae(SparseAutoencoder(D, 5, kind="l1"), "other-sae", metadata)
    assert main(["sae", "features", "other-sae", "--activations", "runs/sae/activations", "--features", "2"]) == 0
    note = "the dictionary was trained on a different model than these activations (tiny)"
    assert f"note: {note}" in capsys.readouterr().out
    assert f"<li>Mind: {note}.</li>" in Path("other-sae/features-some.html").read_text()


def test_generation_is_steered(capsys: pytest.CaptureFixture[str]) -> None:
    def generate(*options: str) -> str:
        assert main([*GENERATE, *options]) == 0
        return capsys.readouterr().out

    plain = generate()
    assert "steered" not in plain
    nothing = generate("--sae", "sae", "--steer", "3=0")
    assert nothing.replace("steered at resid.2: 3 +0\n", "") == plain
    pushed = generate("--sae", "runs/sae/dictionary", "--steer", "3=60,4=-2,5=off")
    assert pushed.startswith("steered at resid.2: 3 +60, 4 -2, 5 off\n")
    assert pushed.splitlines()[1:] != plain.splitlines()
    assert generate("--sae", "sae", "--steer", "3=60", "--steer", "4=-2", "--steer", "5=off") == pushed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steer", "3=1"], "--steer needs --sae"),
        (["--sae", "sae"], "FEATURE=STRENGTH"),
        (["--sae", "nowhere", "--steer", "1=off"], "nowhere"),
        (["--sae", "sae", "--steer", "99=off"], "99: this dictionary"),
    ],
)
def test_what_generation_refuses(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, *options]) == 2
    assert message in capsys.readouterr().err


def test_changes_as_text() -> None:
    assert read_changes("12=8, 40=-4.5,7=off") == {12: 8.0, 40: -4.5, 7: None}
    assert read_changes(" ") == {}
    for text in ("12", "12=", "=3", "a=1", "12=x", "-1=2", "3=nan", "3=inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            read_changes(text)


def test_one_side_of_the_studio_is_steered() -> None:
    library = Library(["tiny"], "runs")
    controls = Controls(0.0, max_tokens=6)

    def replies(features: str) -> list[str]:
        *_, sides = stream_replies(
            library, None, TEXTS[0], ["tiny", "tiny"], controls, steering=("sae", features, "left")
        )
        return [side.conversation.text for side in sides]

    left, right = replies("")
    assert left == right
    steered, plain = replies("3=60")
    assert plain == right
    assert steered != plain
    with refuses(UsageError, "select a dictionary"):
        read_steering("3=60", " ", None, "runs")
    with refuses(UsageError, "steering", "FEATURE=STRENGTH"):
        read_steering("3", "sae", None, "runs")
    assert read_steering(" ", "", None, "runs") is None
