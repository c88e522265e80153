"""Two models compared from the inside: what both read, what changed, where they disagree, what the changes do.

Every part gives plain data for ``diff.json``, from which the report is drawn. Both read prompts, with answers that one
of them or both have sampled."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from posttrain.engines.models import ModelSource, complete_template, grader_for, open_model
from posttrain.errors import RunConflict, UsageError
from posttrain.evals.statistics import standard_error
from posttrain.interpret.activations.record import LARGE_BYTES, Recorder
from posttrain.interpret.activations.shards import ActivationStore, Documents, column
from posttrain.interpret.activations.sites import check_layers, read_config
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.exchange import load_dictionary, save_dictionary
from posttrain.interpret.dictionaries.fitting import fit_dictionary
from posttrain.interpret.dictionaries.measures import in_batches, measure
from posttrain.interpret.dictionaries.recipe import DictionaryWord
from posttrain.interpret.dictionaries.rows import BOTH, DIFFERENCE, StoreRows, first_held_out, sample_rows
from posttrain.interpret.differences.causal import Subject, measure_causes
from posttrain.interpret.differences.changes import Seen, mean_differences, scale_latents, see_changes
from posttrain.interpret.differences.divergence import locate_divergence, patch_curves
from posttrain.interpret.differences.findings import (
    describe_features,
    describe_overlap,
    describe_scaling,
    describe_seen,
)
from posttrain.interpret.differences.recipe import ChangesSection, DiffRecipe
from posttrain.interpret.features.logit_lens import strongest_tokens
from posttrain.randomness import permutation
from posttrain.recipes.document import flatten
from posttrain.recipes.sections import ModelSection
from posttrain.store.durable import replace_file, storage_errors
from posttrain.tasks.base import Task, build_task, choose_task
from posttrain.types import Example, Rollout
from posttrain.untrusted import harmless_json


@dataclass(slots=True)
class Answered(Documents):
    """Documents (prompt and answer, token by token as sampled) with what each answer earned.

    ``by``: who wrote it, ``base`` or ``post``.
    """

    rewards: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    by: list[str] = field(default_factory=list)

    def add(self, rollouts: Sequence[Rollout], by: str) -> None:
        for rollout in rollouts:
            self.ids.append([*rollout.prompt_ids, *rollout.completion.ids])
            self.prompt_lengths.append(len(rollout.prompt_ids))
            self.rewards.append(rollout.reward)
            self.right.append(float(rollout.parts.get("correct", 0.0) == 1.0))
            self.by.append(by)

    def facts(self) -> dict[str, Any]:
        """How many, how long, what they earned: plain data."""
        answers = self.num_tokens - sum(self.prompt_lengths)
        facts: dict[str, Any] = {
            "documents": len(self.ids),
            "tokens": self.num_tokens,
            "answer_tokens": answers,
        }
        for who in dict.fromkeys(self.by):
            mine = [i for i, by in enumerate(self.by) if by == who]
            rewards = [self.rewards[i] for i in mine]
            facts[who] = {
                "answers": len(mine),
                "reward": sum(rewards) / len(mine),
                "reward_error": standard_error(rewards),
                "accuracy": sum(self.right[i] for i in mine) / len(mine),
                "tokens": sum(len(self.ids[i]) - self.prompt_lengths[i] for i in mine) / len(mine),
            }
        return facts


def split_examples(task: Task, changes: ChangesSection) -> tuple[list[Example], list[Example]]:
    """(those whose answers are recorded, those of the causal test): different ones, a fixed draw by the seed.

    Raises:
        UsageError: the task has fewer.
    """
    tested = changes.causal.prompts if changes.causal is not None else 0
    wanted, size = changes.prompts + tested, len(task.examples)
    if wanted > size:
        raise UsageError(
            f"changes.prompts {changes.prompts} and changes.causal.prompts {tested} are {wanted}, but {task.name}/"
            f"{task.split} has {size} examples; set them lower"
        )
    order = permutation(changes.seed, "what changed: examples", 0, size)[:wanted]
    examples = [task.examples[int(i)] for i in order]
    return examples[: changes.prompts], examples[changes.prompts :]


def answer_prompts(subjects: Mapping[str, Subject], examples: Sequence[Example], changes: ChangesSection) -> Answered:
    """Sampled answers of every model given (``base``, ``post``), in the order of the examples."""
    answered = Answered()
    for by, subject in subjects.items():
        rollouts = subject.answer(
            examples,
            samples=changes.samples,
            temperature=changes.temperature,
            seed=changes.seed,
            purpose=f"what changed: answers of {by}",
        )
        answered.add(rollouts, by)
    return answered


Observe = Callable[[str], Any]
RECIPE, RESULTS = "changes.yaml", "diff.json"
LEAST_KL = 1e-9  # nats a token below which two models predict the same but for rounding


@dataclass
class Setting:
    """What a comparison is of.

    ``sections``: how both models are loaded; ``open_subject`` loads one (``base``, ``post``) ready to answer, both with
    the same template and grader. ``site`` is resolved. ``allow_large``: activations above 1 GiB may be recorded.
    """

    sections: dict[str, ModelSection]
    open_subject: Callable[[str], Subject]
    task: Task
    site: str
    allow_large: bool = False


@dataclass
class Comparison:
    """The work under way; ``report`` becomes ``diff.json``."""

    recipe: DiffRecipe
    setting: Setting
    folder: Path
    observe: Observe
    report: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)
    dictionaries: list[Dictionary] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @property
    def changes(self) -> ChangesSection:
        return self.recipe.changes

    @property
    def site(self) -> str:
        return self.setting.site

    @property
    def device(self) -> torch.device:
        """Where the post model is: the dictionaries work beside it."""
        device: torch.device = next(self.subject("post").model.parameters()).device
        return device

    def subject(self, name: str) -> Subject:
        if name not in self.subjects:
            self.subjects[name] = self.setting.open_subject(name)
        return self.subjects[name]

    @contextmanager
    def timed(self, part: str, line: str) -> Iterator[None]:
        self.observe(line)
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 1)


def prepare(
    recipe: DiffRecipe, base: ModelSource, post: ModelSource, *, allow_large: bool = False
) -> tuple[Setting, DiffRecipe]:
    """What is compared, and the recipe with the task, template and site that it leaves to the run filled in.

    Raises:
        UsageError: no such model, a reward model, or a layer that a model does not have.
    """
    sources = {"base": base, "post": post}
    for side, source in sources.items():
        try:
            read_config(source.path)
        except UsageError as error:
            raise UsageError(f"{side}: {error}") from None
        source.refuse_scorer()
    task_word = choose_task(recipe.task, post.name, post.recipe)
    template = complete_template(recipe.template, post) or post.template
    site = recipe.changes.site
    if site is None:
        site = f"resid.{max(1, read_config(post.path).get_text_config().num_hidden_layers // 2)}"
    for source in sources.values():
        check_layers(source.path, [site])
    changes = recipe.changes.model_copy(update={"site": site})
    recipe = recipe.model_copy(update={"task": task_word, "template": template, "changes": changes})
    grader = grader_for(post, template)

    def open_subject(name: str) -> Subject:
        model = open_model(sources[name], template)
        own = (model.engine, model.tokenizer, grader, model.context_tokens, model.model)
        return Subject(*own, recipe.changes.max_tokens or post.max_tokens, model.label)

    sections = {name: source.section() for name, source in sources.items()}
    return Setting(sections, open_subject, build_task(task_word, "task"), site, allow_large), recipe


def compare_in(
    folder: Path,
    recipe: DiffRecipe,
    setting: Setting,
    about: Mapping[str, Any],
    observe: Observe = lambda line: None,
    started: float | None = None,
) -> dict[str, Any]:
    """``compare``, in a folder that is this comparison's: ``diff.json`` is what it returns, with ``about`` before it.

    ``started``: where ``time.monotonic`` stood when the work began, if that was before this call.

    Raises:
        RunConflict: the folder holds something else, or another comparison; nothing was changed.
        UsageError: too few examples or activations, or models that cannot be compared.
    """
    started = time.monotonic() if started is None else started
    is_new, is_new_root = not folder.exists(), not folder.parent.exists()
    _claim(folder, recipe)
    try:
        content = dict(about) | compare(recipe, setting, folder, observe)
    except UsageError:
        with suppress(OSError):  # what was worked out before stays
            if is_new and [item.name for item in folder.iterdir()] == [RECIPE]:
                shutil.rmtree(folder)
            if is_new_root:
                folder.parent.rmdir()
        raise
    content["seconds"]["all"] = round(time.monotonic() - started, 1)
    replace_file(folder / RESULTS, harmless_json(json.dumps(content, indent=1, ensure_ascii=False)).encode() + b"\n")
    return content


def _claim(folder: Path, recipe: DiffRecipe) -> None:
    """Make the folder this comparison's, or accept that it is.

    Raises:
        RunConflict: it holds something else, or another comparison; nothing was changed.
    """
    path = folder / RECIPE
    if path.is_file():
        stored, now = flatten(yaml.safe_load(path.read_text(encoding="utf-8"))), flatten(recipe.dump())
        changed = sorted(key for key in {**stored, **now} if stored.get(key) != now.get(key))
        if changed:
            shown = ", ".join(f"{key} ({stored.get(key)!r} there, {now.get(key)!r} now)" for key in changed[:3])
            raise RunConflict(
                f"{folder}: this comparison was made by another recipe; it differs in {shown}. Nothing was changed; "
                "choose another name with --run NAME"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunConflict(f"{folder} holds something else. Nothing was changed; choose another name with --run NAME")
    with storage_errors("the comparison", folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, recipe.to_yaml().encode())


def compare(recipe: DiffRecipe, setting: Setting, folder: Path, observe: Observe = lambda line: None) -> dict[str, Any]:
    """All of it; returns the content of ``diff.json``.

    What is in the folder already (activations, dictionaries) is kept.

    Raises:
        UsageError: too few examples or activations, or models that cannot be compared.
    """
    work = Comparison(recipe, setting, folder, observe)
    changes = recipe.changes
    asked, tested = split_examples(setting.task, changes)
    with work.timed("answers", f"{len(asked)} prompts are answered {changes.samples} times by {changes.by}"):
        who = ("base", "post") if changes.by == "both" else (changes.by,)
        answered = answer_prompts({name: work.subject(name) for name in who}, asked, changes)
        work.report["documents"] = answered.facts()
    with work.timed("recording", f"both models read {answered.num_tokens:,} tokens"):
        store = _record(work, answered)
    with work.timed("dictionaries", "dictionaries of the base are trained"):
        start = held_out_start(store, changes)
        work.dictionaries = _dictionaries(work, store, start)
    with work.timed("changes", "changes of every feature are measured"):
        _see(work, store, start)
    with work.timed("difference", "the difference itself is looked at"):
        _look_at_difference(work, store, start)
    with work.timed("divergence", "KL is measured token by token, and patched"):
        _diverge(work, store, answered)
    if changes.causal is not None:
        with work.timed("causal", "causal test: the models answer with features taken away or amplified"):
            limit = _limit(store, work.site, "post")
            subjects = {name: work.subject(name) for name in ("base", "post")}
            work.report["causal"] = measure_causes(
                subjects, work.site, tested, changes, work.dictionaries, work.seen, limit, work.observe
            )
    work.report["seconds"] = work.seconds
    return work.report


def held_out_start(store: ActivationStore, changes: ChangesSection) -> int:
    """The first row of the documents that no dictionary learns from."""
    return first_held_out(StoreRows(store, None, "base"), max(1, round(store.num_rows * changes.held_out)), 2)


def _record(work: Comparison, answered: Answered) -> ActivationStore:
    changes, setting = work.changes, work.setting
    answered.data |= {"source": "answers", "task": setting.task.name, "split": setting.task.split, "by": changes.by}
    recorder = Recorder(
        [setting.sections["base"], setting.sections["post"]],
        answered,
        [work.site],
        dtype=changes.dtype,
        outliers=changes.outliers,
        seed=changes.seed,
    )
    if recorder.size.num_bytes > LARGE_BYTES and not setting.allow_large:
        raise UsageError(
            f"{recorder.size.rows:,} tokens of activations of both models take {recorder.size.num_bytes / 1e9:.1f} GB; "
            "add --yes to record them, or set changes.prompts lower"
        )
    store = recorder.write(work.folder / "activations")
    index = store.index
    work.report["activations"] = {
        "site": work.site,
        "layer_convention": index.layer_convention,
        "rows": index.rows,
        "dropped": index.dropped,
        "norms": {source: index.norms[column(work.site, source)].median for source in ("base", "post")},
        "weights": {source.name: source.weights_hash for source in index.sources},
    }
    return store


def _dictionaries(work: Comparison, store: ActivationStore, start: int) -> list[Dictionary]:
    """Those of the recipe's folders, else one for each seed."""
    changes = work.changes
    if changes.dictionaries:
        loaded = [load_dictionary(folder).to(work.device) for folder in changes.dictionaries]
        for folder, dictionary in zip(changes.dictionaries, loaded, strict=True):
            if (dictionary.d, dictionary.sources) != (store.width(work.site), 1):
                raise UsageError(
                    f"changes.dictionaries: {folder} is of {dictionary.sources} x {dictionary.d} numbers, but "
                    f"{work.site} has {store.width(work.site)}"
                )
        return loaded
    rows = StoreRows(store, work.site, "base")
    return [
        _fitted(work, f"seed-{seed}", rows, start, changes.dictionary, changes.seed + seed)
        for seed in range(changes.seeds)
    ]


def _fitted(
    work: Comparison, name: str, rows: StoreRows, start: int, word: DictionaryWord, seed: int, frozen: bool = False
) -> Dictionary:
    """The dictionary of that name in the folder, trained if it is not there."""
    place = work.folder / "dictionaries" / name
    if not (place / "cfg.json").is_file():
        work.observe(f"dictionary {name}: {word.num_features(rows.d)} features, {work.changes.train.steps} steps")
        dictionary = fit_dictionary(
            rows, start, word, work.changes.train, seed=seed, frozen_decoder=frozen, device=work.device
        )
        models = [source.model for source in rows.store.index.sources]
        facts = {"model_name": models[0], "models": models, "site": work.site, "source": rows.source, "seed": seed}
        save_dictionary(dictionary, place, facts)
    return load_dictionary(place).to(work.device)


def _see(work: Comparison, store: ActivationStore, start: int) -> None:
    """Changes by every dictionary, how the seeds agree, and the frozen decoder beside them."""
    changes = work.changes

    def see(dictionary: Dictionary, seed: int) -> Seen:
        return see_changes(
            store,
            work.site,
            dictionary,
            held_out_start=start,
            seed=changes.seed + seed,
            min_documents=changes.min_documents,
            min_change=changes.min_change,
        )

    work.seen = [see(dictionary, seed) for seed, dictionary in enumerate(work.dictionaries)]
    work.report["dictionaries"] = [describe_seen(seen, work.dictionaries[i]) for i, seen in enumerate(work.seen)]
    work.report["overlap"] = describe_overlap(work.dictionaries, work.seen)
    head, tokenizer = work.subject("post").model, work.subject("post").tokenizer
    work.report["features"] = describe_features(
        store, work.site, work.dictionaries[0], work.seen[0], head, tokenizer, changes.show
    )
    frozen = _fitted(
        work, "frozen", StoreRows(store, work.site, "base"), start, changes.dictionary, changes.seed, frozen=True
    )
    seen = see(frozen, 0)
    work.report["frozen"] = describe_seen(seen, frozen)
    work.report["frozen"]["ranking"] = seen.changes.ranking().tolist()


def _look_at_difference(work: Comparison, store: ActivationStore, start: int) -> None:
    """The mean difference through the lens, and dictionaries of the difference and of both models."""
    changes = work.changes
    post = work.subject("post")
    names, means = mean_differences(store, work.site)
    tokens = strongest_tokens(post.model, means, post.tokenizer)
    norm = work.report["activations"]["norms"]["base"]
    work.report["lens"] = [
        {"where": name, "norm": float(mean.norm()) / norm, **entry}
        for name, mean, entry in zip(names, means, tokens, strict=True)
    ]
    if changes.difference is not None:
        rows = StoreRows(store, work.site, DIFFERENCE)
        if not bool(sample_rows(rows, rows.num_rows, changes.seed).any()):
            work.observe("both models compute the same at this site, so there is no dictionary of their difference")
            return
        fitted = _fitted(work, "difference", rows, start, changes.difference, changes.seed)
        work.report["difference"] = _describe(work, store, start, fitted, rows)
    if changes.crosscoder is not None:
        rows = StoreRows(store, work.site, BOTH)
        fitted = _fitted(work, "crosscoder", rows, start, changes.crosscoder, changes.seed)
        work.report["crosscoder"] = _describe(work, store, start, fitted, rows)


def _describe(
    work: Comparison, store: ActivationStore, start: int, dictionary: Dictionary, rows: StoreRows
) -> dict[str, Any]:
    quality = measure(dictionary, in_batches(rows, start, rows.num_rows))
    post = work.subject("post")
    scaling = scale_latents(store, work.site, dictionary)
    return describe_scaling(dictionary, scaling, quality, post.model, post.tokenizer)


def _limit(store: ActivationStore, site: str, source: str) -> float:
    return store.index.limits.get(column(site, source), float("inf"))


def _diverge(work: Comparison, store: ActivationStore, answered: Answered) -> None:
    changes = work.changes
    base, post = work.subject("base"), work.subject("post")
    shown = range(min(changes.kl_documents, len(answered.ids)))
    work.report["divergence"] = locate_divergence(
        base.model,
        post.model,
        [answered.ids[i] for i in shown],
        [answered.prompt_lengths[i] for i in shown],
        post.tokenizer,
    )
    ranking = work.report["frozen"].pop("ranking")
    if changes.patching is None:
        return
    if work.report["divergence"]["per_token"] < LEAST_KL:
        work.observe("both models predict the same, so there is nothing that patching could recover")
        return
    frozen = load_dictionary(work.folder / "dictionaries" / "frozen").to(work.device)
    difference = work.folder / "dictionaries" / "difference"
    count = min(changes.patching.documents, len(answered.ids))
    work.report["patching"] = patch_curves(
        (base.model, post.model),
        work.site,
        (answered.ids[-count:], answered.prompt_lengths[-count:]),
        changes,
        work.dictionaries,
        work.seen,
        frozen=(frozen, ranking),
        difference=load_dictionary(difference).to(work.device) if "difference" in work.report else None,
        limit=min(_limit(store, work.site, source) for source in ("base", "post")),
        observe=work.observe,
    )
