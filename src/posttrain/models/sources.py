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
MAX_ALPHA = 1e6  # of an adapter: what it adds is scaled by alpha / rank
SCORE = "score.weight"  # among the weights of a reward model, its head
HUB_SECONDS = 2.0
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def resolve_model_name(name: str) -> str:
    """Return the folder or hub name that ``name`` stands for.

    ``tiny`` and ``tiny-sft`` are embedded; a published name is fetched on first use; a GGUF file is dequantized once. A
    run directory is its best checkpoint, else its newest. A checkpoint is compared with its manifest.

    Raises:
        UsageError: a run without a checkpoint, or a path that does not exist.
        DataError: a checkpoint with a damaged file.
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
    """Return True if a name can only be that of a folder, not of the hub."""
    return name.startswith((".", "/", "~", "runs/")) or _HUB_NAME.fullmatch(name) is None


def is_missing(name: str) -> bool:
    """Return True if a name can only be that of a folder, and there is none."""
    try:
        return looks_local(name) and kind_of_file(Path(name).expanduser()) == "nothing"
    except RuntimeError:  # the home of a user that there is not
        return True


def refuse_out_of_reach(name: str) -> None:
    """Refuse a name of the hub that is not in its cache while the hub does not answer; libraries would try for minutes.

    Raises:
        UsageError: with the reason.
    """
    from huggingface_hub import constants

    if (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return
    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        return
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
    raise UsageError(
        f"{shorten(name)}: no such run or folder here, nor in the cache of the hub, and the hub cannot be asked "
        f"({why}). Download the model beforehand and give its folder, or use the embedded one, tiny"
    )


@cache
def _answers(endpoint: str) -> bool:
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()  # through a proxy where there is one
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
    """Return the base of an adapter folder, as a folder or hub name; None for a model."""
    if not is_adapter(source):
        return None
    check_files(source)
    return base_of(source)


def check_files(source: str) -> None:
    """Refuse a folder whose files could run code when they are loaded: pickles, and adapters that name modules.

    peft imports what an adapter's ``megatron_core`` names, and other kinds than LoRA have loaders of their own.

    Raises:
        UsageError: such a folder, or adapters that are their own base.
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
    other = next(iter(sorted(folder.glob(pickled))), None)
    if other is not None and not any(folder.glob(safe)):
        raise UsageError(
            f"model.name: {other} is a pickle, and loading one can run any code; give the weights as safetensors "
            "(save_pretrained writes them with safe_serialization=True)"
        )


def is_adapter(source: str) -> bool:
    """Return True if a folder holds an adapter."""
    return kind_of_file(Path(source) / ADAPTER_CONFIG) == "file"


def base_of(adapter: str) -> str:
    """Return the base that an adapter folder names.

    The embedded model is found where another installation of this package wrote its path. A relative path is read from
    here, else from the folders above the adapter.

    Raises:
        UsageError: it names none, or one that is not there.
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
    above = None
    if not Path(base).is_absolute() and ".." not in Path(base).parts and kind_of_file(base) == "nothing":
        above = next((up / base for up in Path(adapter).absolute().parents if (up / base).is_dir()), None)
    if above is None and is_missing(base):
        raise UsageError(
            f"model.name: {place}: this adapter names the base {shorten(base)}, which is not there, neither from here "
            "nor from a folder above the adapter; put the base there, or write its place under base_model_name_or_path"
        )
    return resolve_model_name(base if above is None else str(above))


def first_names(names: Iterable[str]) -> str:
    """Return the first three names, sorted, and the number of others."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:3])
    if len(ordered) > 3:
        shown += f" and {len(ordered) - 3} more"
    return shown


def _configuration_class(message: str) -> str:
    """Return the name of the class in transformers' message on a configuration that it does not take."""
    named = re.search(r"<class '[\w.]*?(\w+)'>", message)
    return "unknown" if named is None else named[1]


def explain_loading(name: str, source: str, error: BaseException) -> str:
    """Return the message for an error of transformers or peft with the model ``name``, which is ``source``."""
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
