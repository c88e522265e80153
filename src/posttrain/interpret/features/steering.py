"""A model steered by features of a dictionary: directions added to a site, features taken out.

At every token, prompt and reply alike, the site's output x becomes

    x − Σ_ablated f_i(x) d_i + Σ_steered strength · d_i / ‖d_i‖

with d_i the decoder row of feature i and f(x) the activations without the change. The contributions of the other
features, and the reconstruction error, stay exactly as they were. Strengths are lengths in the model's own activations;
the largest activation of the feature, which `posttrain sae features` shows, is a natural unit.
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
    """Changes of features made ready for one model; they take effect inside ``applied()``.

    ``changes``: by feature the strength to add, or None to take it out. Strength 0 is the model itself, bit for bit.

    Raises:
        UsageError: no such site or feature, or a dictionary of another width.
    """

    def __init__(self, model: Model, sae: SparseAutoencoder, site: str, changes: FeatureChanges) -> None:
        backbone = backbone_of(model)
        width = backbone.config.get_text_config().hidden_size
        if sae.d != width:
            raise UsageError(f"the dictionary is for activations of width {sae.d}; this model has {width}")
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
        """True if the model stays as it is."""
        return self.added is None and not len(self.ablated)

    def change(self, x: Tensor) -> Tensor:
        """Return the site's output [..., d] in its dtype, changed; computed in float32."""
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
        """Inside, every forward pass of the model's modules is changed. May be entered again and again."""
        if self.is_nothing:
            yield
            return
        with replaced(self.model, self.site, self.change):
            yield


def load_steering(model: Model, folder: str | Path, changes: FeatureChanges) -> Steering:
    """Prepare changes with the dictionary in a folder, at the site that its ``cfg.json`` names.

    ``UsageError``: no site is known, or a feature of a dictionary of differences is to be taken out.
    """
    sae = load_sae(folder)
    metadata = read_metadata(folder)
    if metadata.site is None:
        raise UsageError(f"{folder}: its cfg.json has no 'site' in 'metadata', such as resid.20; add it there")
    if None in changes.values() and metadata.source == DIFFERENCE:
        raise UsageError(
            f"{folder}: its features are of the difference of two models' activations; they can be added but not taken "
            "out of one model"
        )
    return Steering(model, sae, metadata.site, changes)
