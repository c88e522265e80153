"""Names of models and their places, checks of a model's files before any library opens them, and loading errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from posttrain.errors import UsageError, first_line
from posttrain.models.config import check_folder, check_kinds, read_object
from posttrain.models.published.catalog import PUBLISHED, is_gguf
from posttrain.option_types import shorten
from posttrain.recipes.sections import EMBEDDED_MODELS
from posttrain.store.checkpoint_files import STEP_FOLDER, refuse_damaged
from posttrain.untrusted import TRUST_REMOTE_CODE, fields_of, kind_of_file

EMBEDDED: dict[str, Path] = {name: Path(__file__).parent / name for name in EMBEDDED_MODELS}
TINY = EMBEDDED["tiny"]
ADAPTER_CONFIG = "adapter_config.json"
MAX_ALPHA = 1e6  # adapter updates are scaled by alpha / rank
SCORE = "score.weight"  # head tensor in reward models
HUB_SECONDS = 2.0
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def resolve_model_name(name: str) -> str:
    """Resolve ``name`` to a folder or hub name.

    ``tiny`` and ``tiny-sft`` are embedded. Published names are fetched on first use; GGUF files are dequantized once.
    Run directories resolve to their best checkpoint, else to their newest. Checkpoints are verified against their
    manifest.

    Raises:
        UsageError: a run without checkpoints, or a missing path.
        DataError: damaged checkpoint files.
    """
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    if not name.strip():
        raise UsageError("model.name is empty; give tiny, a folder, a run directory or a hub name")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(f"model.name: {shorten(name)}: {error}; give the whole path") from None
    if kind_of_file(path / "recipe.yaml") == "file" and kind_of_file(path / "checkpoints") == "folder":
        checkpoint = _checkpoint_of(path)
        check_kinds(checkpoint)
        refuse_damaged(checkpoint)
        check_folder(checkpoint)
        return str(checkpoint)
    kind = kind_of_file(path)
    if kind == "nothing" and name in PUBLISHED:
        from posttrain.models.published.fetch import fetched

        return str(fetched(name))
    if kind == "file" and is_gguf(path):
        from posttrain.models.published.gguf import dequantized

        return str(dequantized(path))
    if kind == "folder":
        check_folder(path)
        from posttrain.models.patterns import check_tokenizer  # not for the embedded model

        check_tokenizer(path)
        if not (path / "config.json").is_file() and not (path / ADAPTER_CONFIG).is_file():
            raise UsageError(
                f"model.name: {name} is a folder without config.json or adapter_config.json; "
                "give a run directory, or a model in the Hugging Face layout"
            )
        refuse_damaged(path)
        return str(path)
    if kind != "nothing":
        raise UsageError(f"model.name: {name} is a {kind}; give a model's folder, a run or a hub name")
    if looks_local(name):
        raise UsageError(
            f"model.name: there is no folder {shorten(name)}; give one, a run, or a hub name such as org/model"
        )
    return name


def looks_local(name: str) -> bool:
    """Check if a name must be a folder rather than a hub name."""
    return name.startswith((".", "/", "~", "runs/")) or _HUB_NAME.fullmatch(name) is None


def is_missing(name: str) -> bool:
    """Check if a name must be a folder but is missing."""
    try:
        return looks_local(name) and kind_of_file(Path(name).expanduser()) == "nothing"
    except RuntimeError:  # nonexistent user home
        return True


def refuse_out_of_reach(name: str) -> None:
    """Refuse uncached hub names while the hub is unreachable; libraries would retry for minutes.

    Raises:
        UsageError: states the reason.
    """
    from huggingface_hub import constants

    if (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif _answers(constants.ENDPOINT):
        return
    else:
        why = f"{constants.ENDPOINT} does not answer"
    raise UsageError(
        f"{shorten(name)}: no such run or folder here, nor in the cache of the hub, and the hub cannot be asked "
        f"({why}). Download the model beforehand and give its folder, or use the embedded one, tiny"
    )


@cache
def _answers(endpoint: str) -> bool:
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()  # via proxy if configured
    except OSError as error:
        return isinstance(error, HTTPError)  # it refuses, and answers
    return True


def _checkpoint_of(run: Path) -> Path:
    best = run / "checkpoints" / "best"
    if best.is_dir():
        if not best.resolve().is_relative_to((run / "checkpoints").resolve()):
            raise UsageError(f"model.name: {best} leads out of the run, to {best.resolve()}; name that folder itself")
        return best.resolve()
    steps = [item for item in (run / "checkpoints").iterdir() if STEP_FOLDER.fullmatch(item.name)]
    if not steps:
        raise UsageError(f"model.name: the run {run} has no checkpoint yet")
    return max(steps, key=lambda item: int(item.name.removeprefix("step-")))


def adapter_base(source: str) -> str | None:
    """Find an adapter folder's base (folder or hub name); None for full models."""
    if not is_adapter(source):
        return None
    check_files(source)
    return base_of(source)


def check_files(source: str) -> None:
    """Refuse folders that could run code during loading: pickles, or adapters naming modules.

    peft imports modules listed in ``megatron_core``; adapter types other than LoRA use separate loaders.

    Raises:
        UsageError: unsafe folder, or circular adapter bases.
    """
    seen: list[str] = []
    while is_adapter(source):
        if os.path.realpath(source) in seen:
            raise UsageError(f"model.name: {source}: this adapter is its own base in {ADAPTER_CONFIG}")
        seen.append(os.path.realpath(source))
        settings = read_object(Path(source) / ADAPTER_CONFIG)
        if settings.get("peft_type") != "LORA" or settings.get("megatron_config") is not None:
            raise UsageError(
                f"model.name: {source}: {ADAPTER_CONFIG} describes something else than a plain LoRA adapter, and that "
                "could run code of its choice; merge it into its base with what made it, and give the merged model"
            )
        from posttrain.models.patterns import check_adapter_patterns, check_tokenizer

        check_adapter_patterns(settings, f"model.name: {source}: {ADAPTER_CONFIG}: ")
        check_tokenizer(Path(source))
        of_patterns = fields_of(settings.get("alpha_pattern")).values()
        for alpha in (settings.get("lora_alpha"), *of_patterns):
            if isinstance(alpha, int | float) and not abs(alpha) <= MAX_ALPHA:  # peft takes any; sampling cannot
                raise UsageError(
                    f"model.name: {source}: {ADAPTER_CONFIG}: an alpha of {shorten(str(alpha))} scales by no number"
                )
        _refuse_pickle(Path(source), "adapter_model.safetensors", "adapter_model.bin")
        source = base_of(source)
    _refuse_pickle(Path(source), "model*.safetensors", "pytorch_model*.bin")


def _refuse_pickle(folder: Path, safe: str, pickled: str) -> None:
    others = sorted(folder.glob(pickled))
    if others and not any(folder.glob(safe)):
        raise UsageError(
            f"model.name: {others[0]} is a pickle, and loading one can run any code; give the weights as safetensors "
            "(save_pretrained writes them with safe_serialization=True)"
        )


def is_adapter(source: str) -> bool:
    """Check for adapter files."""
    return kind_of_file(Path(source) / ADAPTER_CONFIG) == "file"


def base_of(adapter: str) -> str:
    """Find the base named by an adapter folder.

    Paths written by other installations of this package resolve to the embedded model. Relative paths are tried
    against the working directory, then against each parent of the adapter.

    Raises:
        UsageError: base unnamed or missing.
    """
    place = Path(adapter) / ADAPTER_CONFIG
    base = read_object(place).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise UsageError(f"model.name: {place}: base_model_name_or_path must be a model's name; got {shorten(base)}")
    embedded = EMBEDDED.get(Path(base).name)
    if embedded is not None and Path(base).parts[-3:] == embedded.parts[-3:]:
        return str(embedded)
    if Path(base).name in PUBLISHED and kind_of_file(base) == "nothing":  # in another user's cache
        return resolve_model_name(Path(base).name)
    if not Path(base).is_absolute() and ".." not in Path(base).parts and kind_of_file(base) == "nothing":
        for parent in Path(adapter).absolute().parents:
            if (parent / base).is_dir():
                return resolve_model_name(str(parent / base))
    if is_missing(base):
        raise UsageError(
            f"model.name: {place}: this adapter names the base {shorten(base)}, which is not there, neither from here "
            "nor from a folder above the adapter; put the base there, or write its place under base_model_name_or_path"
        )
    return resolve_model_name(base)


def first_names(names: Iterable[str]) -> str:
    """List three names in sorted order, then count the rest."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:3])
    if len(ordered) > 3:
        shown += f" and {len(ordered) - 3} more"
    return shown


def _configuration_class(message: str) -> str:
    """Extract the class name from transformers' unsupported-configuration error."""
    named = re.search(r"<class '[\w.]*?(\w+)'>", message)
    if named is None:
        return "unknown"
    return named[1]


def explain_loading(name: str, source: str, error: BaseException) -> str:
    """Explain a transformers or peft error for model ``name``, resolved to ``source``."""
    first = first_line(error)
    if "trust_remote_code" in str(error):
        return (
            f"model.name: {source} comes with Python of its own, which is not run unless you say so: "
            f"{TRUST_REMOTE_CODE}, after you have read it"
        )
    if "Unrecognized configuration class" in first:  # of a vision or audio model, an encoder
        return (
            f"model.name: {source} is of a kind ({_configuration_class(first)}) for which transformers has no causal "
            "language model, so it cannot be trained on text. Give the language model that it was built on"
        )
    if kind_of_file(source) != "nothing":
        return f"model.name: {source} cannot be loaded as a causal language model: {first}"
    return (
        f"model.name: {name!r} is neither tiny, nor a folder or run here, and could not be had from the hub: {first} "
        "Download it beforehand and give its folder, or use the embedded model, tiny"
    )
