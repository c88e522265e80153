"""Upgrade stored recipes from earlier versions to current keys.

Stored recipes contain every key known to their version, including defaults, so a missing key did not exist yet. Newer
keys must not change an older run on resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Sections with a plain ``name`` key instead of a component name.
_NAMED_SECTIONS = ("model", "teacher")
_MAX_DEPTH = 20


@dataclass(frozen=True)
class Older:
    """Key changes between versions, e.g. ``train.lr`` in a section or ``grpo.clip_low`` in a component.

    Args:
        sections: sections present in every stored recipe. Handwritten recipes have fewer, and use current defaults.
        marker: key of the document that every current version stores. Recipes with it are up to date. Required because
            stored recipes omit keys that are None by default, so a missing ``added`` key alone does not show an age.
        added: new keys, with values that reproduce earlier behavior.
        removed: deleted keys, with values that match current behavior.
        renamed: earlier key name to new key name (last part only).
    """

    sections: frozenset[str] = frozenset()
    marker: str = ""
    added: Mapping[str, object] = field(default_factory=dict)
    removed: Mapping[str, object] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def bring_up_to_date(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Upgrade a stored recipe to current keys. Other recipes are returned unchanged.

        If a removed key has a different value, it stays and validation rejects it by name.
        """
        is_current = bool(self.marker) and self.marker in content
        if is_current or "extends" in content or not content.keys() >= self.sections:
            return dict(content)
        changed: dict[str, Any] = self._change(content, "")
        return changed

    def _change(self, value: Any, place: str) -> Any:
        """Upgrade a value and everything nested in it."""
        if place.count(".") > _MAX_DEPTH:
            return value
        if isinstance(value, list):
            return [self._change(item, place) for item in value]
        if not isinstance(value, Mapping):
            return value
        owner = place
        if isinstance(value.get("name"), str) and place not in _NAMED_SECTIONS:
            owner = value["name"]
        changed: dict[str, Any] = {}
        for key, inner in value.items():
            known = f"{owner}.{key}" if owner else key
            if known in self.removed and self.removed[known] == inner:
                continue
            below = f"{place}.{key}" if place else key
            changed[self.renamed.get(known, key)] = self._change(inner, below)
        for known, earlier in self.added.items():
            above, _, key = known.rpartition(".")
            if above == owner and key not in changed:
                changed[key] = earlier
        return changed


# Before 0.2.0, router auxiliary losses requested by model configs were not trained.
OLDER_RECIPES = Older(
    sections=frozenset({"model", "prompt", "optimizer", "train", "eval"}),
    marker="masks",
    added={"train.router_aux_loss_coef": 0.0},
)
