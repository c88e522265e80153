"""Quantize a model to 8 or 4 bits, save it, and measure the loss: KL, or change in held-out reward accuracy."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.nn import Linear, Parameter

from posttrain import registry
from posttrain.data.base import Task, build_task, choose_task
from posttrain.data.render import end_id
from posttrain.data.rendered import take_rendered
from posttrain.errors import UsageError
from posttrain.evaluation.generation import Questions, evaluate_sampler
from posttrain.evaluation.plan import slug
from posttrain.evaluation.reward_models.measures import ACCURACIES, evaluate_reward_model
from posttrain.evaluation.reward_models.scoring import HEADS, RewardModel, open_reward_model
from posttrain.evaluation.statistics import paired_bootstrap
from posttrain.evaluation.win_rate import measure_answer_kl, summarize_kl
from posttrain.models.answer_end import write_ends
from posttrain.models.config import context_length
from posttrain.models.export_comparison import check_same, read_probe
from posttrain.models.forward.forward import Forward
from posttrain.models.load import (
    QUANTIZED_FOLDERS,
    LoadedModel,
    load_model,
    num_parameters,
    quantized_bits,
    quiet_transformers,
)
from posttrain.models.scorer import save_scorer
from posttrain.models.sources import EMBEDDED, adapter_base, resolve_model_name
from posttrain.models.written.untrained import find_untrained
from posttrain.option_types import Dtype
from posttrain.recipes.sections import EMBEDDED_MODELS, AdapterSection, Component, ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.models import Device, ModelSource, complete_template, grader_for
from posttrain.sampling.rollout import Grader, Sampler
from posttrain.store.checkpoint_files import rename_into_place, seal
from posttrain.store.durable import aside_of, refuse_links, remove_asides, remove_tree, storage_errors, write_json
from posttrain.types import Model
from posttrain.untrusted import STORED_RECIPE

REPORT = "quantization.json"


def compare_policies(
    sampler: Sampler, task: Task, *, before: Forward, after: Forward, n: int, sampling: Sampling, seed: int = 0
) -> dict[str, float]:
    """Sample one answer for ``n`` fixed prompts from ``before``, and compute its KL under both models.

    ``kl``: mean KL(before‖after) per answer in nats with a 95 % interval, exact per token
    (``evaluation/kl_from_initial.py``); ``kl_per_token``. ``num_answers``, ``num_tokens``; ``prompts_too_long``
    are skipped.

    Raises:
        UsageError: all prompts are too long.
    """
    evaluation = evaluate_sampler(sampler, Questions(task, sampling, n, seed=seed))
    answers = evaluation.rollouts
    results = summarize_kl("kl", answers, measure_answer_kl(answers, before, after))
    results["num_tokens"] = float(sum(len(answer.completion.ids) for answer in answers))
    results["num_answers"] = float(len(answers))
    results["prompts_too_long"] = evaluation.results["prompts_too_long"]
    return results


def compare_scorers(before: RewardModel, after: RewardModel, task: Task, *, n: int) -> dict[str, float]:
    """Compare accuracy on ``n`` fixed examples, before and after quantization.

    ``accuracy_before``, ``accuracy_after`` and the paired ``change`` have intervals; ``same_verdict``: fraction of
    items with the same correctness. ``num_items`` were scored, ``dropped`` were not.

    Raises:
        UsageError: no scorable items.
    """
    of_before = evaluate_reward_model(before, task, n=n)
    of_after = evaluate_reward_model(after, task, n=n)
    ids_before = [item["id"] for item in of_before.items]
    ids_after = [item["id"] for item in of_after.items]
    assert ids_before == ids_after, "whether an item is scored depends only on its length"
    correct_before = [float(item["right"]) for item in of_before.items]
    correct_after = [float(item["right"]) for item in of_after.items]
    change = paired_bootstrap(correct_before, correct_after)
    info = {"num_items": float(change.n), "dropped": of_before.results["dropped"]}
    for name, evaluation in (("before", of_before), ("after", of_after)):
        accuracy = ACCURACIES[evaluation.view]
        for bound in ("", "_low", "_high"):
            info[f"accuracy_{name}{bound}"] = evaluation.results[f"{accuracy}{bound}"]
    info |= {"change": change.difference, "change_low": change.low, "change_high": change.high}
    num_same = sum(a == b for a, b in zip(correct_before, correct_after, strict=True))
    info["same_verdict"] = num_same / change.n
    return info


def with_trunk(scorer: RewardModel, model: Any) -> RewardModel:
    """Attach the reward head to a different trunk with the same hidden size."""
    forward = scorer.forward
    moved = Forward(model.requires_grad_(False), head=forward.head, reads=forward.reads, scores_only=True)
    return replace(scorer, forward=moved)


@dataclass(frozen=True)
class QuantizationRequest:
    """Model to quantize, number of bits, output folder, and evaluation data.

    ``task``, ``template``: default to the run's. ``n``: number of evaluation examples; 0 skips. ``out``: defaults to a
    folder inside the checkpoint, or below ``quantized``.
    """

    source: ModelSource
    bits: int
    dtype: Dtype | None = None
    device: Device | None = None
    task: Component | None = None
    template: Component | None = None
    n: int = 200
    max_tokens: int | None = None
    seed: int = 0
    out: Path | None = None


def quantize_model(request: QuantizationRequest) -> tuple[dict[str, Any], Path]:
    """Quantize and save a model, reload the files, and measure the loss.

    Returns the report, also stored in the output folder, and this folder's path.

    Raises:
        UsageError: already quantized, an unusable option, or unrelated files in the folder.
        MissingExtra: bitsandbytes is not installed.
    """
    from posttrain.models.quantize import weight_bytes  # fails early if bitsandbytes is missing

    source = request.source
    component = None
    task = None
    is_named = request.task is not None and bool(request.task.name)
    if request.n and (is_named or source.recipe is not None or source.name in EMBEDDED_MODELS):
        component = choose_task(request.task, source.name, source.task)
        task = build_task(component, "--task")
    grader = grader_for(source, complete_template(request.template, source))  # check before hours of work
    path = resolve_model_name(source.path)
    out = _choose_folder(request, path)
    section = source.section(request.dtype, request.device)
    # an empty adapter section merges adapters into the base
    section = section.model_copy(update={"name": path, "adapter": AdapterSection()})
    before = load_model(section, seed=0)
    stored = quantized_bits(before.model)
    if stored is not None:
        raise UsageError(f"{source.name}: already quantized to {stored} bits. Give the original model")
    scorer = None
    if source.is_scorer:
        scorer = with_trunk(open_reward_model(source), before.model)
    if task is not None:
        template = grader.template
        if scorer is not None:
            template = scorer.template
        task = take_rendered(task, template, before.tokenizer, "--task")
    _warn_of_other_parts(before.model, path)
    after = _write(request, section, scorer, out)
    report: dict[str, Any] = {
        "model": source.name,
        "source": path,
        "bits": request.bits,
        "dtype": section.dtype,
        "num_parameters": num_parameters(after.model),
        "disk_bytes_before": _bytes_on_disk(path),
        "disk_bytes_after": _bytes_on_disk(str(out)),
        "memory_bytes_before": weight_bytes(before.model),
        "memory_bytes_after": weight_bytes(after.model),
    }
    if component is not None and task is not None:
        report |= {"task": component.model_dump(), "seed": request.seed}
        if scorer is not None:
            report["results"] = compare_scorers(scorer, with_trunk(scorer, after.model), task, n=request.n)
        else:
            report["results"] = _compare_answers(request, before, after, grader, task)
    write_json(out / REPORT, report)
    return report, out


def _warn_of_other_parts(model: Model, path: str) -> None:
    """Warn if the checkpoint at ``path`` contains weights outside the language model."""
    parts = find_untrained(model, path)
    if parts is not None and parts.tensors:
        warnings.warn(
            f"model.name: {path}: {len(parts.tensors)} tensors of {parts.architecture} are missing from the "
            "quantized folder, which contains only the language model",
            stacklevel=2,
        )


def _compare_answers(
    request: QuantizationRequest, before: LoadedModel, after: LoadedModel, grader: Grader, task: Task
) -> dict[str, float]:
    """Compare both models on answers sampled from the original (``compare_policies``)."""
    engine = registry.find("engine", "native").bind({}, "engine")(before.model, before.tokenizer)
    sampler = Sampler(engine, before.tokenizer, grader, context_length(before.model.config))
    sampling = sampler.sampling(request.max_tokens or request.source.max_tokens, 1.0)
    return compare_policies(
        sampler,
        task,
        before=Forward(before.model),
        after=Forward(after.model),
        n=request.n,
        sampling=sampling,
        seed=request.seed,
    )


def _choose_folder(request: QuantizationRequest, path: str) -> Path:
    checkpoint = Path(path)
    if request.out:
        out = request.out
    elif checkpoint.is_dir() and checkpoint not in EMBEDDED.values():
        out = checkpoint / QUANTIZED_FOLDERS[request.bits]
    else:
        out = Path(f"quantized/{slug(request.source.name)}-int{request.bits}")
    is_ours = (out / REPORT).is_file() and (out / "config.json").is_file()
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_ours and not is_free:
        raise UsageError(f"--out: {out} contains something other than a quantized model; give a different folder")
    return out


def _write(request: QuantizationRequest, section: ModelSection, scorer: RewardModel | None, out: Path) -> LoadedModel:
    """Write the quantized model to ``out`` atomically, replacing any earlier one.

    Returns the reloaded model.

    Raises:
        RunFailure: the reloaded model differs; ``out`` is unchanged.
    """
    aside = aside_of(out)
    run = request.source.run
    quantized = load_model(section.model_copy(update={"load_bits": request.bits}), seed=0)
    refuse_links(run or out)
    with storage_errors("quantized model", out):
        remove_asides(out)
        try:
            aside.mkdir(parents=True)
            _save(quantized, scorer, aside)
            if scorer is not None:
                shutil.copyfile(Path(section.name) / HEADS, aside / HEADS)
            if run is not None and not out.resolve().is_relative_to(run.resolve()):
                # use the run's template outside its folder, too
                shutil.copyfile(run / STORED_RECIPE, aside / STORED_RECIPE)
            probe = read_probe(quantized.model)
            del quantized
            again = {"name": str(aside), "load_bits": None, "adapter": None}
            after = load_model(section.model_copy(update=again), seed=0)
            is_exact = section.dtype != "bf16"
            check_same(probe, read_probe(after.model), f"{out} in {request.bits} bits", exact=is_exact)
            seal(aside, 0)
            rename_into_place(aside, out)
        finally:
            remove_tree(aside)
    return after


def _save(quantized: LoadedModel, scorer: RewardModel | None, folder: Path) -> None:
    """Save model and tokenizer; if possible, store reward models as sequence classifiers."""
    model = quantized.model
    is_saved = False
    with quiet_transformers():
        if scorer is not None:
            assert scorer.forward.head is not None, "a reward model has a head"
            weight = scorer.forward.head.weight.detach()
            # save_pretrained of a quantized model saves its own state dict, so attach the head
            model.score = Linear(weight.shape[1], weight.shape[0], bias=False)
            model.score.weight = Parameter(weight)
            is_saved = save_scorer(folder, model, weight, end_id(scorer.tokenizer, scorer.template))
            del model.score
        if not is_saved:
            model.save_pretrained(folder)
        quantized.tokenizer.save_pretrained(folder)
        write_ends(folder, quantized.tokenizer)


def _bytes_on_disk(path: str) -> int | None:
    """Sum weight file sizes in a folder, including an adapter's base; None if not stored locally."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    own = 0
    for kind in ("model", "adapter_model"):
        for file in folder.glob(f"{kind}*.safetensors"):
            own += file.stat().st_size
    base = adapter_base(path)
    if base is None:
        return own
    below = _bytes_on_disk(base)
    if below is None:
        return None
    return own + below
