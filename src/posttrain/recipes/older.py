"""Recipes of runs that earlier versions have stored, in the keys of this version.

A stored recipe has every key that its version knew, defaults included, so a key that is absent did not exist. If such a
run is resumed with a later version, a key that came since must not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Sections with a key called name that is no component's.
_NAMED_SECTIONS = ("model", "teacher")
_MAX_DEPTH = 20


@dataclass(frozen=True)
class Older:
    """Keys that differ between versions: ``train.lr`` in a section, ``grpo.clip_low`` as an option of a component.

    Args:
        sections: sections of every recipe of the kind that a run has stored. A recipe that somebody writes has fewer,
            and means today's defaults.
        added: keys whose default is not what earlier versions did, with the value that is.
        removed: keys that this version does not have, with the value with which they did what it does now.
        renamed: the key of today (its last part) by the earlier key.
    """

    sections: frozenset[str] = frozenset()
    added: Mapping[str, object] = field(default_factory=dict)
    removed: Mapping[str, object] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def bring_up_to_date(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return a stored recipe with the keys of this version; any other recipe as it is.

        A removed key with another value stays, and is refused by its name.
        """
        if "extends" in content or not content.keys() >= self.sections:
            return dict(content)
        changed: dict[str, Any] = self._change(content, "")
        return changed

    def _change(self, value: Any, place: str) -> Any:
        """Change what is at a dotted key, and all below."""
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


# Since 0.2.0: the auxiliary loss of routers that a model's configuration asks for was not trained.
OLDER_RECIPES = Older(
    sections=frozenset({"model", "prompt", "optimizer", "train", "eval"}), added={"train.router_aux_loss_coef": 0.0}
)
