"""Dictionaries that others published: fetched by a name on the hub, and the site that their files mean."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.models.sources import refuse_out_of_reach
from posttrain.option_types import shorten

# A repository, and the folder of the dictionary in it: org/repo/layer_20/width_16k.
_HUB_NAME = re.compile(r"(?!runs/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.=+-]*)*")
REMEDY = "Download its folder beforehand (hf download) and give that"
# What other tools call a place in the block with index n, and ours: the layer is n, or n + 1 for what a block gives.
_HOOKS = {
    "hook_resid_pre": ("resid", 0),
    "hook_resid_post": ("resid", 1),
    "hook_mlp_out": ("mlp", 1),
    "hook_attn_out": ("attn", 1),
    "hook_mlp_in": ("mlp_in", 1),
    "ln2.hook_normalized": ("mlp_in", 1),
}
_HOOK = re.compile(r"blocks\.([0-9]{1,6})\.(.+)")
_MODULE = re.compile(r"(?:model\.|transformer\.|gpt_neox\.)?(?:layers|h)\.([0-9]{1,6})(?:\.output)?")


def site_of_hook(hook: object) -> str | None:
    """``blocks.19.hook_resid_post`` and the module ``model.layers.19`` are ``resid.20``; None for what is no site here.

    ``blocks.20.hook_resid_pre``, what that block reads, is ``resid.20`` too.
    """
    if not isinstance(hook, str):
        return None
    if module := _MODULE.fullmatch(hook):
        return f"resid.{int(module[1]) + 1}"
    match = _HOOK.fullmatch(hook)
    if match is None or match[2] not in _HOOKS:
        return None
    place, offset = _HOOKS[match[2]]
    return f"{place}.{int(match[1]) + offset}"


def is_hub_name(name: str) -> bool:
    """Whether this can be a repository of the hub, with or without a folder in it."""
    return _HUB_NAME.fullmatch(name) is not None


def fetch_dictionary(name: str, files: tuple[str, ...]) -> Path:
    """The folder, in the hub's cache, of a dictionary called ``org/repo/folder``; only its ``files`` are downloaded.

    Raises:
        UsageError: the hub does not answer (at once, without retries), or has no such repository or file.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, repository, *inside = name.split("/")
    refuse_out_of_reach(f"{owner}/{repository}", "dictionary or run", REMEDY)
    try:
        paths = [Path(hf_hub_download(f"{owner}/{repository}", "/".join([*inside, file]))) for file in files]
    except LocalEntryNotFoundError:
        raise UsageError(
            f"{shorten(name)}: not all of it is in the cache of the hub, which cannot be asked. {REMEDY}"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UsageError(
            f"{shorten(name)}: neither a folder here nor a dictionary on the hub ({type(error).__name__}): it wants "
            f"{' and '.join(files)} in that folder of a repository, org/repo/folder"
        ) from None
    return paths[0].parent
