"""Equations of docstrings as TeX, and the pages of methods that show them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "docs" / "reference" / "methods"


@pytest.fixture(scope="module")
def equations() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("equations")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize(
    ("plain", "tex"),
    [
        ("values = −ρ A", r"\text{values}\ = - \rho A"),
        ("ρ = π(a_t | s_t) / μ(a_t | s_t)", r"\rho = \pi (a_{t} \mid s_{t}) / \mu (a_{t} \mid s_{t})"),
        ("1 − ε_low", r"1 - \varepsilon_{\text{low}}"),
        ("m e^(−l)", r"m e^{- l}"),
        ("½ max((V − R)²)", r"\tfrac{1}{2} \max ((V - R)^2)"),
        ("KL(p‖q) = Σ_v p", r"\operatorname{KL} (p \,\Vert\, q) = \sum_{v} p"),
        ("β/|y_w| · log π(y_w)", r"\beta /| y_{w}| \cdot \log \pi (y_{w})"),
        ("π(· | x, y_<t)", r"\pi (\cdot \mid x, y_{<t})"),
        ("r_i − mean of the other rewards", "r_{i} - \\text{ mean of the other rewards}\\"),
        ("z₀ − r", r"z_0 - r"),
        ("D < 1e-4", r"D < 10^{-4}"),
        ("π_r ← α π + (1 − α) π_r", r"\pi_{r} \leftarrow \alpha \pi + (1 - \alpha) \pi_{r}"),
        ("D < 2.5e-6", r"D < 2.5 \cdot 10^{-6}"),
    ],
)
def test_to_tex_plain_equation_is_as_worked_out_by_hand(equations: ModuleType, plain: str, tex: str) -> None:
    assert equations.to_tex(plain) == tex


@pytest.mark.parametrize(
    "code", ["advantage: normalized", "train.ppo_epochs", "leave_one_out", "kl_in_reward", "--train.lr 1e-5", "raw"]
)
def test_is_equation_code_is_left_as_it_is(equations: ModuleType, code: str) -> None:
    assert not equations.is_equation(code)
    assert equations.with_mathematics(f"see `{code}`.") == f"see `{code}`."


def test_to_tex_unknown_sign_is_named(equations: ModuleType) -> None:
    with pytest.raises(ValueError, match="⊗"):
        equations.to_tex("a ⊗ b")


def test_method_pages_have_an_equation_and_a_link_to_the_paper() -> None:
    pages = [page for page in sorted(METHODS.glob("*.md")) if page.name != "index.md"]
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert re.search(r"\$[^$]+\$", text), page.name
        assert re.search(r"\]\(https://", text), page.name


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("grpo-top-entropy", ["## Mask: top_entropy", r"$1 - \rho$ quantile"]),
        ("grpo-off-policy-mask", ["## Mask: off_policy_sequence", "all wrong answers are masked"]),
        ("grpo-moving-reference", ["## Moving reference", r"\leftarrow \alpha \pi", "arXiv 2404.09656"]),
        ("tr-dpo", ["## Moving reference", "[methods](index.md#preferences)"]),
        ("reverse-kl", ["posttrain train tiny/grpo\nposttrain train distillation/reverse-kl"]),
        ("sdft", ["## Teacher", "arXiv 2601.19897"]),
        ("index", [r"$\Delta = z_w - z_l$"]),
    ],
)
def test_method_page_shows_all_that_makes_the_method(page: str, parts: list[str]) -> None:
    text = (METHODS / f"{page}.md").read_text(encoding="utf-8")
    assert [part for part in parts if part not in text] == []
