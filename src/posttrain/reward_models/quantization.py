"""A model in 8 or 4 bits: made, saved, and compared with the original by its distributions or held-out verdicts."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear, Parameter
from transformers.utils import logging as transformers_logging

from posttrain import registry
from posttrain.engines.base import Engine, Sampling
from posttrain.engines.models import Device, Dtype, ModelSource, complete_template, grader_for
from posttrain.engines.rollout import encode_prompts
from posttrain.errors import UsageError
from posttrain.evals.drift import MAX_TOKENS, kl_of_states
from posttrain.evals.generation import held_out_indices
from posttrain.evals.statistics import paired_bootstrap, student_t_quantile
from posttrain.models.comparison import check_same, read_probe
from posttrain.models.config import context_length
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.models.load import QUANTIZED_FOLDERS, LoadedModel, load_model, num_parameters, quantized_bits
from posttrain.models.scorer import save_scorer
from posttrain.models.sources import EMBEDDED, adapter_base, resolve_model_name
from posttrain.randomness import derive_key
from posttrain.recipes.sections import EMBEDDED_MODELS, AdapterSection, ModelSection, Word
from posttrain.render import Template, end_id, stop_ids
from posttrain.render.template import build_template
from posttrain.reward_models.evaluation import evaluate_reward_model
from posttrain.reward_models.scoring import HEADS, RewardModel, open_reward_model
from posttrain.store.checkpoint_files import remove_tree, rename_into_place, seal
from posttrain.store.durable import aside_of, refuse_links, remove_asides, replace_file, storage_errors
from posttrain.tasks.base import Task, build_task, choose_task
from posttrain.types import Sample, collate
from posttrain.untrusted import STORED_RECIPE

REPORT = "quantization.json"


@torch.no_grad()
def compare_policies(
    engine: Engine,
    tokenizer: Any,
    template: Template,
    task: Task,
    *,
    before: Forward,
    after: Forward,
    n: int,
    sampling: Sampling,
    context_tokens: int,
    seed: int = 0,
) -> dict[str, float]:
    """One answer that ``engine`` samples from ``before`` to each of ``n`` fixed prompts of a task, read by both models.

    ``kl_per_token``: KL(before‖after) of the next token's distribution in nats, the mean over generated tokens, exact
    at each state (beyond 1,024 candidates the rest counts as one). ``kl_max``: of one token. ``top1_agreement``: the
    share of tokens at which both find the same token likeliest. Both means with a 95 % interval (``_low``, ``_high``)
    in which an answer is the unit of chance. ``num_answers``, ``num_tokens``; ``prompts_too_long`` are left out.

    Args:
        engine: samples from the model in ``before``, at the temperature of both.

    Raises:
        UsageError: no prompt that fits into the model.
    """
    examples = [task.examples[i] for i in held_out_indices(len(task.examples), n)]
    kept, prompts, dropped = encode_prompts(tokenizer, template, examples, context_tokens - 1)
    if not kept:
        raise UsageError(f"task {task.name!r}: none of {len(examples)} prompts fits into {context_tokens} tokens")
    keys = [[derive_key(seed, "quantization", index)] for index in kept]
    answers = [group[0].ids for group in engine.generate(prompts, keys, sampling)]
    batch = collate(
        [
            Sample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), group=index, prefix=len(prompt))
            for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    )
    kl, agreed, most = [0.0] * len(answers), [0.0] * len(answers), 0.0
    for rows in split_rows(batch, MAX_TOKENS):
        part = batch.select(rows)
        of_states = kl_of_states(part, before, nullcontext(after)).cpu()
        first, second = (forward.top_candidates(part, 1)[0][..., 0].cpu() for forward in (before, after))
        same = (first == second) & part.mask.cpu()
        most = max(most, float(of_states.max()))
        for place, row in enumerate(rows):
            kl[row], agreed[row] = float(of_states[place].sum()), float(same[place].sum())
    lengths = [float(len(answer)) for answer in answers]
    facts = _mean_per_token("kl_per_token", kl, lengths) | {"kl_max": most}
    facts |= _mean_per_token("top1_agreement", agreed, lengths, most=1.0)
    counts = {"num_answers": len(answers), "num_tokens": math.fsum(lengths), "prompts_too_long": dropped}
    return facts | {name: float(count) for name, count in counts.items()}


def compare_scorers(before: RewardModel, after: RewardModel, task: Task, *, n: int) -> dict[str, float]:
    """The accuracy of both on the same ``n`` fixed examples of a task, and how far it moved.

    ``accuracy_before`` and ``accuracy_after`` with their intervals, ``change`` with the interval of the paired
    difference (bootstrap over items), ``same_verdict``: the share of items on which both are right or both wrong.
    ``num_items`` were scored and ``dropped`` were not (``evaluate_reward_model``).

    Raises:
        UsageError: nothing in the task that could be scored.
    """
    both = [evaluate_reward_model(model, task, n=n) for model in (before, after)]
    right = [[float(item["right"]) for item in evaluation.items] for evaluation in both]
    assert [i["id"] for i in both[0].items] == [i["id"] for i in both[1].items], "lengths alone decide what is scored"
    change = paired_bootstrap(*right)
    facts = {"num_items": float(change.n), "dropped": both[0].results["dropped"]}
    for name, evaluation in zip(("before", "after"), both, strict=True):
        for bound in ("", "_low", "_high"):
            facts[f"accuracy_{name}{bound}"] = evaluation.results[f"accuracy{bound}"]
    facts |= {"change": change.difference, "change_low": change.low, "change_high": change.high}
    facts["same_verdict"] = sum(a == b for a, b in zip(*right, strict=True)) / change.n
    return facts


def with_trunk(scorer: RewardModel, model: Any) -> RewardModel:
    """The reward model with its own head on another language model of the same width."""
    forward = scorer.forward
    moved = Forward(model.requires_grad_(False), head=forward.head, reads=forward.reads, scores_only=True)
    return replace(scorer, forward=moved)


def _mean_per_token(
    name: str, sums: Sequence[float], lengths: Sequence[float], most: float = math.inf
) -> dict[str, float]:
    """``Σ sums / Σ lengths`` and its 95 % interval within 0..``most``.

    A ratio of two random sums: its standard error is that of the mean of ``sum − ratio · length``, divided by the mean
    length (Cochran 1977, "Sampling Techniques", section 6.3).
    """
    total, n = math.fsum(lengths), len(lengths)
    ratio = math.fsum(sums) / total
    spread = math.fsum((part - ratio * length) ** 2 for part, length in zip(sums, lengths, strict=True))
    half = student_t_quantile(n - 1) * math.sqrt(spread * n / (n - 1)) / total if n > 1 else 0.0
    return {name: ratio, f"{name}_low": max(0.0, ratio - half), f"{name}_high": min(most, ratio + half)}


@dataclass(frozen=True)
class QuantizationRequest:
    """A request: the model, the bits, the folder, and what the loss is measured on.

    ``task``, ``template``: None is the run's own; ``n``: examples to measure on, 0: none. ``out``: None is in the
    checkpoint, or below ``quantized``.
    """

    source: ModelSource
    bits: int
    dtype: Dtype | None = None
    device: Device | None = None
    task: Word | None = None
    template: Word | None = None
    n: int = 200
    max_tokens: int | None = None
    seed: int = 0
    out: Path | None = None


def quantize_model(asked: QuantizationRequest) -> tuple[dict[str, Any], Path]:
    """Quantize, save, load what was saved and measure the loss.

    Returns the report, which is stored in the model's folder, and that folder.

    Raises:
        UsageError: a model that is quantized already, words that cannot be, or a folder that holds something else.
        MissingExtra: bitsandbytes is not installed.
    """
    from posttrain.models.quantize import weight_bytes  # says what to install before anything else is done

    source, word, task = asked.source, None, None
    is_known = (
        (asked.task is not None and asked.task.name) or source.recipe is not None or source.name in EMBEDDED_MODELS
    )
    if asked.n and is_known:
        word = choose_task(asked.task, source.name, source.recipe)
        task = build_task(word, "--task")
    template = complete_template(asked.template, source)
    if template is not None:  # before hours of work
        build_template(template, "--template")
    path = resolve_model_name(source.path)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.") or "model"
    is_folder = Path(path).is_dir() and Path(path) not in EMBEDDED.values()
    default = Path(path) / QUANTIZED_FOLDERS[asked.bits] if is_folder else Path(f"quantized/{plain}-int{asked.bits}")
    out = asked.out or default
    is_ours = (out / REPORT).is_file() and (out / "config.json").is_file()
    if out.exists() and not is_ours and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: {out} holds something else than a quantized model; give another folder")
    # an empty adapter asks for a base with its adapters added
    section = source.section(asked.dtype, asked.device).model_copy(update={"name": path, "adapter": AdapterSection()})
    before = load_model(section, seed=0)
    stored = quantized_bits(before.model)
    if stored is not None:
        raise UsageError(f"{source.name} is quantized to {stored} bits already; name the model that it was made from")
    scorer = with_trunk(open_reward_model(source), before.model) if source.is_scorer else None
    after = _write(asked, section, scorer, out)
    report: dict[str, Any] = {
        "model": source.name,
        "source": path,
        "bits": asked.bits,
        "dtype": section.dtype,
        "num_parameters": num_parameters(after.model),
        "disk_bytes_before": _bytes_on_disk(path),
        "disk_bytes_after": _bytes_on_disk(str(out)),
        "memory_bytes_before": weight_bytes(before.model),
        "memory_bytes_after": weight_bytes(after.model),
    }
    if word is not None and task is not None:
        report |= {"task": word.model_dump(), "seed": asked.seed}
        if scorer is not None:
            report["results"] = compare_scorers(scorer, with_trunk(scorer, after.model), task, n=asked.n)
        else:
            rendered = grader_for(source, template).template
            report["results"] = compare_policies(
                registry.find("engine", "native").bind({}, "engine")(before.model, before.tokenizer),
                before.tokenizer,
                rendered,
                task,
                before=Forward(before.model),
                after=Forward(after.model),
                n=asked.n,
                sampling=Sampling(asked.max_tokens or source.max_tokens, stop_ids=stop_ids(before.tokenizer, rendered)),
                context_tokens=context_length(before.model.config),
                seed=asked.seed,
            )
    replace_file(out / REPORT, json.dumps(report, indent=1).encode() + b"\n")
    return report, out


def _write(asked: QuantizationRequest, section: ModelSection, scorer: RewardModel | None, out: Path) -> LoadedModel:
    """Write the quantized model to ``out``, whole or not at all; one that was there is replaced.

    Returns it as it is loaded again.

    Raises:
        RunFailure: what was written is not the quantized model; nothing was changed.
    """
    aside, run = aside_of(out), asked.source.run
    quantized = load_model(section.model_copy(update={"load_bits": asked.bits}), seed=0)
    refuse_links(run or out)
    with storage_errors("quantized model", out):
        remove_asides(out)
        try:
            aside.mkdir(parents=True)
            _save(quantized, scorer, aside)
            if scorer is not None:
                shutil.copyfile(Path(section.name) / HEADS, aside / HEADS)
            if run is not None and not out.resolve().is_relative_to(run.resolve()):
                shutil.copyfile(run / STORED_RECIPE, aside / STORED_RECIPE)  # elsewhere, too, it is asked as in its run
            probe = read_probe(quantized.model)
            del quantized
            again = {"name": str(aside), "load_bits": None, "adapter": None}
            after = load_model(section.model_copy(update=again), seed=0)
            is_exact = section.dtype != "bfloat16"
            check_same(probe, read_probe(after.model), f"{out} in {asked.bits} bits", exact=is_exact)
            seal(aside, 0)
            rename_into_place(aside, out)
        finally:
            remove_tree(aside)
    return after


def _save(quantized: LoadedModel, scorer: RewardModel | None, folder: Path) -> None:
    """Save model and tokenizer; a reward model as a sequence classifier, where that layout fits."""
    model, is_shown, is_saved = quantized.model, transformers_logging.is_progress_bar_enabled(), False
    transformers_logging.disable_progress_bar()
    try:
        if scorer is not None:
            assert scorer.forward.head is not None, "a reward model has a head"
            weight = scorer.forward.head.weight.detach()
            model.score = Linear(
                weight.shape[1], weight.shape[0], bias=False
            )  # a quantized model saves its own tensors
            model.score.weight = Parameter(weight)
            is_saved = save_scorer(folder, model, weight, end_id(scorer.tokenizer, scorer.template))
            del model.score
        if not is_saved:
            model.save_pretrained(folder)
        quantized.tokenizer.save_pretrained(folder)
    finally:
        if is_shown:
            transformers_logging.enable_progress_bar()


def _bytes_on_disk(path: str) -> int | None:
    """Bytes of the weights in a folder, with those of an adapter's base; None for what is not here under that name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    own = sum(f.stat().st_size for kind in ("model", "adapter_model") for f in folder.glob(f"{kind}*.safetensors"))
    base = adapter_base(path)
    if base is None:
        return own
    below = _bytes_on_disk(base)
    return None if below is None else own + below
