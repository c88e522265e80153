"""``posttrain quantize``: a model's linear layers in 8 or 4 bits, saved, loaded again and compared with what it was."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch.nn import Linear, Parameter
from transformers.utils import logging as transformers_logging

from posttrain import registry
from posttrain.commands.console import Text, open_console
from posttrain.commands.options.words import chosen_words
from posttrain.engines.base import Sampling
from posttrain.engines.models import ModelSource, complete_template, grader_for
from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.load import (
    QUANTIZED_FOLDERS,
    LoadedModel,
    context_length,
    load_model,
    num_parameters,
    quantized_bits,
)
from posttrain.models.scorer import save_scorer
from posttrain.models.sources import TINY, adapter_base, resolve_model_name
from posttrain.recipes.recipe import AdapterSection, ModelSection, Word
from posttrain.render import end_id, stop_ids
from posttrain.render.template import build_template
from posttrain.reward_models.quantization import compare_policies, compare_scorers, with_trunk
from posttrain.reward_models.scoring import COMPANIONS, RewardModel, open_reward_model
from posttrain.runs.models import find_source
from posttrain.store.checkpoint_files import remove_tree, rename_into_place
from posttrain.store.durable import aside_of, remove_asides, storage_errors
from posttrain.store.links import refuse_links
from posttrain.store.manifest import seal
from posttrain.tasks.base import Task, build_task, choose_task

REPORT = "quantization.json"


@dataclass(frozen=True)
class Original:
    """What is quantized: the model in full precision, and with a reward model its head."""

    source: ModelSource
    path: str  # the folder or hub name that was loaded
    loaded: LoadedModel
    section: ModelSection
    scorer: RewardModel | None = None


def run_quantize(arguments: argparse.Namespace) -> int:
    """Quantize, save, load what was saved, measure what was lost, and say so."""
    from posttrain.models.quantize import weight_bytes  # says what to install before anything else is done

    source = find_source(arguments.model, arguments.runs_dir)
    words = chosen_words(arguments)
    task = _task_to_measure(words.get("task"), source, arguments.n)
    template = complete_template(words.get("template"), source)
    if template is not None:  # before hours of work
        build_template(template, "--template")
    path = resolve_model_name(source.path)
    out = Path(arguments.out) if arguments.out else _default_out(source, path, arguments.bits)
    _check_out(out)
    original = _load_original(source, path, arguments)
    _write(original, out, arguments.bits)
    section = original.section.model_copy(update={"name": str(out), "load_bits": None, "adapter": None})
    after = load_model(section, seed=0)
    report: dict[str, Any] = {
        "model": arguments.model,
        "source": path,
        "bits": arguments.bits,
        "dtype": section.dtype,
        "num_parameters": num_parameters(after.model),
        "disk_bytes_before": _bytes_on_disk(path),
        "disk_bytes_after": _bytes_on_disk(str(out)),
        "memory_bytes_before": weight_bytes(original.loaded.model),
        "memory_bytes_after": weight_bytes(after.model),
    }
    if task is not None:
        word, examples = task
        report |= {"task": word.model_dump(), "seed": arguments.seed}
        report["results"] = _measure(original, after, examples, template, arguments)
    _store(out, report)
    if not arguments.quiet:
        _print_report(report, out)
    return 0


def _task_to_measure(given: Word | None, source: ModelSource, n: int) -> tuple[Word, Task] | None:
    """The task with its word; None where nothing is to be measured, or nothing says on what."""
    unknown = (given is None or not given.name) and source.recipe is None and source.name != "tiny"
    if n == 0 or unknown:
        return None
    word = choose_task(given, source.name, source.recipe)
    return word, build_task(word, "--task")


def _default_out(source: ModelSource, path: str, bits: int) -> Path:
    """Inside the checkpoint or folder; of the embedded model and of hub names under ``quantized`` here."""
    if Path(path).is_dir() and path != str(TINY):
        return Path(path) / QUANTIZED_FOLDERS[bits]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.") or "model"
    return Path("quantized") / f"{plain}-int{bits}"


def _check_out(out: Path) -> None:
    ours = (out / REPORT).is_file() and (out / "config.json").is_file()
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: {out} holds something else than a quantized model; give another folder")


def _load_original(source: ModelSource, path: str, arguments: argparse.Namespace) -> Original:
    """The model as it is, an adapter added to its base."""
    merged = {"name": path, "adapter": AdapterSection()}  # asks for a base with adapters added
    section = source.section(arguments.dtype, arguments.device).model_copy(update=merged)
    loaded = load_model(section, seed=0)
    stored = quantized_bits(loaded.model)
    if stored is not None:
        raise UsageError(f"{source.name} is quantized to {stored} bits already; name the model that it was made from")
    scorer = None
    if source.is_scorer:
        scorer = with_trunk(open_reward_model(source), loaded.model)
    return Original(source, path, loaded, section, scorer)


def _write(original: Original, out: Path, bits: int) -> None:
    """The quantized model in ``out``, whole or not at all; one that was there is replaced."""
    aside = aside_of(out)
    quantized = load_model(original.section.model_copy(update={"load_bits": bits}), seed=0)
    refuse_links(original.source.run or out)
    with storage_errors("quantized model", out):
        remove_asides(out)
        try:
            aside.mkdir(parents=True)
            _save(quantized, original, aside)
            seal(aside, 0)
            rename_into_place(aside, out)
        finally:
            remove_tree(aside)


def _save(quantized: LoadedModel, original: Original, folder: Path) -> None:
    """Model and tokenizer; of a reward model the head, too, in the layout that it was saved in before."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        if original.scorer is None or not _save_with_head(quantized.model, original.scorer, folder):
            quantized.model.save_pretrained(folder)
        if original.scorer is not None:
            shutil.copyfile(Path(original.path) / COMPANIONS, folder / COMPANIONS)
        quantized.tokenizer.save_pretrained(folder)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _save_with_head(model: Any, scorer: RewardModel, folder: Path) -> bool:
    """Save as a sequence classifier; False where that layout does not fit."""
    assert scorer.forward.head is not None, "a reward model has a head"
    weight = scorer.forward.head.weight.detach()
    model.score = Linear(weight.shape[1], weight.shape[0], bias=False)  # of a quantized model its own tensors are saved
    model.score.weight = Parameter(weight)
    try:
        return save_scorer(folder, model, weight, end_id(scorer.tokenizer, scorer.template))
    finally:
        del model.score


def _store(out: Path, report: dict[str, Any]) -> None:
    with storage_errors(REPORT, out):
        (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(
    original: Original, after: LoadedModel, task: Task, template: Word | None, arguments: argparse.Namespace
) -> dict[str, float]:
    if original.scorer is not None:
        return compare_scorers(original.scorer, with_trunk(original.scorer, after.model), task, n=arguments.n)
    source, before = original.source, original.loaded
    rendered = grader_for(source, template).template
    stops = stop_ids(before.tokenizer, rendered)
    return compare_policies(
        registry.find("engine", "native").bind({}, "engine")(before.model, before.tokenizer),
        before.tokenizer,
        rendered,
        task,
        before=Forward(before.model),
        after=Forward(after.model),
        n=arguments.n,
        sampling=Sampling(arguments.max_tokens or source.max_tokens, stop_ids=stops),
        context_tokens=context_length(before.model.config),
        seed=arguments.seed,
    )


def _bytes_on_disk(path: str) -> int | None:
    """Of the weights in a folder, with those of an adapter's base; None for what is not here under that name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    own = sum(f.stat().st_size for kind in ("model", "adapter_model") for f in folder.glob(f"{kind}*.safetensors"))
    base = adapter_base(path)
    if base is None:
        return own
    below = _bytes_on_disk(base)
    return None if below is None else own + below


def _print_report(report: dict[str, Any], out: Path) -> None:
    console = open_console()
    title = f"{report['model']}, {report['num_parameters']:,} parameters, linear layers in {report['bits']} bits"
    console.print(Text(title))
    table = Table()
    table.add_column("")
    for column in ("before", "after", "ratio"):
        table.add_column(column, justify="right")
    for place in ("disk", "memory"):
        before, now = report[f"{place}_bytes_before"], report[f"{place}_bytes_after"]
        ratio = "–" if not before else f"{now / before:.2f}"
        table.add_row(f"weights {'on disk' if place == 'disk' else 'in memory'}", _size(before), _size(now), ratio)
    console.print(table)
    results = report.get("results")
    if results is None:
        console.print("what was lost was not measured; name a task: --task NAME")
    else:
        lines = LINES["accuracy_before" in results](results)
        console.print("\n".join([f"on {report['task']['name']}:", *(f"  {line}" for line in lines)]))
    console.print(Text(f"the model and {REPORT}: {out}"))


def _policy_lines(results: dict[str, float]) -> list[str]:
    shown = {name: _interval(results, name) for name in ("kl_per_token", "top1_agreement")}
    return [
        f"KL from the original per generated token: {shown['kl_per_token']} nats, at most {results['kl_max']:.4g}",
        f"same likeliest token: {shown['top1_agreement']}",
        f"{results['num_tokens']:.0f} tokens in {results['num_answers']:.0f} answers of the original at temperature 1",
    ]


def _scorer_lines(results: dict[str, float]) -> list[str]:
    return [
        f"accuracy before: {_interval(results, 'accuracy_before')}",
        f"accuracy after:  {_interval(results, 'accuracy_after')}",
        f"change: {_interval(results, 'change')}, same verdict on {results['same_verdict']:.1%} "
        f"of {results['num_items']:.0f}",
    ]


LINES: dict[bool, Callable[[dict[str, float]], list[str]]] = {False: _policy_lines, True: _scorer_lines}


def _interval(results: dict[str, float], name: str) -> str:
    value, low, high = (results[f"{name}{bound}"] for bound in ("", "_low", "_high"))
    return f"{value:.4g} (95 % interval {low:.4g} to {high:.4g})"


def _size(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:,.2f} MB"
