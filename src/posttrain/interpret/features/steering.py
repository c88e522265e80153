"""Steer a model with dictionary features: add directions at a site, or ablate features.

For prompt and response tokens, the site's output x becomes

    x − Σ_ablated f_i(x) d_i + Σ_steered strength · d_i / ‖d_i‖

where d_i is feature i's decoder row and f(x) are activations before the change. Other features and the reconstruction
error are unchanged. Strength is a length in activation units; a feature's maximum activation (see
`posttrain sae features`) is a natural scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import backbone_of, blocks_of, device_of, refuse_layers, replaced
from posttrain.interpret.features.features import check_features
from posttrain.interpret.saes.sae import SparseAutoencoder, load_sae, read_metadata
from posttrain.interpret.saes.sae_recipe import DIFFERENCE
from posttrain.types import Model

FeatureChanges = Mapping[int, float | None]


class Steering:
    """Feature changes prepared for one model, active inside ``applied()``.

    ``changes``: strength to add by feature, or None to ablate. Strength 0 leaves the model bit-identical.

    Raises:
        UsageError: no such site or feature, or a mismatched dictionary width.
    """

    def __init__(self, model: Model, sae: SparseAutoencoder, site: str, changes: FeatureChanges) -> None:
        backbone = backbone_of(model)
        width = backbone.config.get_text_config().hidden_size
        if sae.d != width:
            raise UsageError(f"the dictionary expects width {sae.d}, but this model has {width}")
        refuse_layers([site], len(blocks_of(backbone)), "this model")
        strengths = {feature: strength for feature, strength in changes.items() if strength}
        gone = [feature for feature, strength in changes.items() if strength is None]
        self.model = model
        self.site = site
        self.dictionary = sae.to(device_of(model))
        steered = check_features(sae, list(strengths))
        ablated = check_features(sae, gone)
        rows = sae.W_dec.detach().float() / sae.input_scale
        unit = rows[steered] / rows[steered].norm(dim=1, keepdim=True)
        self.added: Tensor | None = None
        if strengths:
            self.added = torch.tensor(list(strengths.values()), device=rows.device) @ unit
        self.ablated = ablated.to(rows.device)
        self.rows = rows[ablated]

    @property
    def is_nothing(self) -> bool:
        """True if no changes apply."""
        return self.added is None and not len(self.ablated)

    def change(self, x: Tensor) -> Tensor:
        """Apply changes to site output [..., d] in float32; keeps its dtype."""
        if self.is_nothing:
            return x
        exact = x.float().reshape(-1, x.shape[-1])
        moved = torch.zeros_like(exact)
        if len(self.ablated):
            moved = -self.dictionary.encode(exact)[:, self.ablated] @ self.rows
        if self.added is not None:
            moved = moved + self.added
        return (exact + moved).reshape(x.shape).to(x.dtype)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Modify all forward passes within the context. Reusable."""
        if self.is_nothing:
            yield
            return
        with replaced(self.model, self.site, self.change):
            yield


def load_steering(model: Model, folder: str | Path, changes: FeatureChanges) -> Steering:
    """Load a dictionary folder, and prepare changes at the site given in ``cfg.json``.

    ``UsageError``: missing site, or ablation with a difference dictionary.
    """
    sae = load_sae(folder)
    metadata = read_metadata(folder)
    if metadata.site is None:
        raise UsageError(f"{folder}: cfg.json lacks 'site' in 'metadata'; add it, such as resid.20")
    if None in changes.values() and metadata.source == DIFFERENCE:
        raise UsageError(
            f"{folder}: trained on the difference between two models' activations; its features can be added, but not "
            "ablated"
        )
    return Steering(model, sae, metadata.site, changes)
