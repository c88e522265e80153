"""Labels for features by a judge, and how well a label tells where its feature is active.

The judge sees every other one of a feature's strongest contexts, with the tokens marked at which it is active, and
names what they have in common (Bills et al. 2023). The label is scored by detection (Paulo et al. 2024): given the
label alone, the judge says of unmarked contexts whether the feature is active in them. Some are the strong ones that it
was not shown; as many are drawn from the rows, where the feature is active at no token.

    balanced accuracy = (share of active contexts recognized + share of silent ones rejected) / 2

1 is a label that tells them apart, 0.5 one that says nothing. Departure: one context is asked about at a time, not
five. An answer that is neither yes nor no counts as wrong, and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from posttrain.engines.judging.asking import RemoteJudge
from posttrain.engines.rollout import Sampler
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.features import Context, Feature, FeatureReport, Label
from posttrain.randomness import generator
from posttrain.render import encode_prompt
from posttrain.types import Message

# Who labels features: a model that is loaded here, or one that a server answers for.

# Asked questions in, an answer to each out, in the same order.
Judge = Callable[[Sequence[str]], Sequence[str]]
MAX_TOKENS = 512  # of an answer, with what a model may think before it


def model_judge(sampler: Sampler, max_tokens: int = MAX_TOKENS) -> Judge:
    """A model that is loaded here, asked greedily under its template.

    Raises, when asked:
        UsageError: a question that leaves no room in the model's context.
    """

    def ask(questions: Sequence[str]) -> list[str]:
        template = sampler.grader.template
        prompts = [encode_prompt(sampler.tokenizer, template, [Message("user", text)]) for text in questions]
        keys = [[0]] * len(prompts)
        answers = sampler.engine.generate(prompts, keys, sampler.sampling(max_tokens, temperature=0.0))
        return [sampler.tokenizer.decode(answer.ids, skip_special_tokens=True) for (answer,) in answers]

    return ask


def remote_judge(url: str, model: str | None = None) -> Judge:
    """A model behind a server that knows ``/v1/chat/completions``, asked greedily.

    Args:
        model: its name there; None: the only one that the server has.

    A key, where the server wants one, is read from the environment variable JUDGE_API_KEY; to another machine it goes
    only if JUDGE_API_HOST names that.

    Raises:
        UsageError: no URL of a server, or a key that may not go there. When asked: nobody answers there, the request
            is refused, or which model is meant is not known.
        RunFailure: when asked, an answer without a text.
    """
    return RemoteJudge(url, model, max_tokens=MAX_TOKENS, place_key="--judge", model_key="--judge-model").reply


NUM_WINDOWS = 128  # from which the silent contexts of all features are taken
MAX_LABEL_CHARS = 200
LABEL_QUESTION = """\
Here are excerpts of texts. The tokens at which one feature of a language model is active stand between << and >>.

{contexts}

What do the marked tokens, or the texts around them, have in common? Answer with one short phrase and nothing else."""
DETECTION_QUESTION = """\
A feature of a language model is active on this: {label}

Here is an excerpt of a text:
{context}

Is the feature active in it? Answer yes or no and nothing else."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Excerpts of the rows: ``ids`` of each, and ``largest`` [n, F], how strongly each feature is active there."""

    ids: list[tuple[int, ...]]
    largest: Tensor


@torch.no_grad()
def draw_windows(dictionary: Dictionary, rows: StoreRows, seed: int) -> Windows:
    """Excerpts around rows drawn by the seed, as long as the contexts are; rows that were dropped count as silent."""
    store, before, after = rows.store, 20, 10
    drawn = generator(seed, "silent contexts").permutation(rows.num_rows)[:NUM_WINDOWS]
    ids, largest = [], []
    for row in np.sort(drawn).tolist():
        near = torch.arange(max(0, row - before), min(rows.num_rows, row + after + 1))
        document, position = (int(fact(torch.tensor([row]))[0]) for fact in (store.documents, store.positions))
        positions = store.positions(near)
        inside = (
            (store.documents(near) == document) & (positions >= position - before) & (positions <= position + after)
        )
        ids.append(tuple(store.document_tokens(document)[max(0, position - before) : position + after + 1]))
        x = rows.gather(near[inside]).to(dictionary.b_dec.device)
        largest.append(dictionary.encode(x).amax(0).cpu())
    return Windows(ids, torch.stack(largest))


def label_features(
    report: FeatureReport, windows: Windows, texts: dict[int, str], judge: Judge, seed: int = 0
) -> FeatureReport:
    """The report with labels and their scores; ``about["labels"]`` counts what was labelled and what was not.

    Args:
        windows: of the same dictionary and rows (``draw_windows``).
        texts: of every token in contexts and windows.
    """
    asked = [feature for feature in report.features if len(feature.contexts) > 1]
    questions = [LABEL_QUESTION.format(contexts=_marked(feature.contexts[::2], texts)) for feature in asked]
    names = [read_label(answer) for answer in _ask(judge, questions)]
    named = [(feature, name) for feature, name in zip(asked, names, strict=True) if name]
    trials = [_trials(feature, windows, texts, seed) for feature, _ in named]
    flat = [
        DETECTION_QUESTION.format(label=name, context=text)
        for (_, name), each in zip(named, trials, strict=True)
        for text, _ in each
    ]
    verdicts = iter([read_verdict(answer) for answer in _ask(judge, flat)])
    labels = {
        feature.number: score(name, [(truth, next(verdicts)) for _, truth in each])
        for (feature, name), each in zip(named, trials, strict=True)
    }
    counts = {
        "labelled": len(labels),
        "too_few_contexts": len(report.features) - len(asked),
        "no_label": len(asked) - len(labels),
        "without_silent_contexts": sum(label.balanced_accuracy is None for label in labels.values()),
        "unreadable_answers": sum(label.unreadable for label in labels.values()),
    }
    features = [replace(feature, label=labels.get(feature.number)) for feature in report.features]
    return replace(report, features=features, about=report.about | {"labels": counts})


def _ask(judge: Judge, questions: Sequence[str]) -> Sequence[str]:
    answers = judge(questions) if questions else []
    assert len(answers) == len(questions), "a judge gives an answer to each question"
    return answers


def score(text: str, said: Sequence[tuple[bool, bool | None]]) -> Label:
    """A label with its score, from (whether the feature is active, what the judge said: None for neither) pairs."""
    active = [answer for truth, answer in said if truth]
    silent = [answer for truth, answer in said if not truth]
    recognized, rejected = active.count(True), silent.count(False)
    known = bool(active) and bool(silent)
    accuracy = (recognized / len(active) + rejected / len(silent)) / 2 if known else None
    unreadable = active.count(None) + silent.count(None)
    return Label(text, accuracy, len(active), recognized, len(silent), rejected, unreadable)


def _trials(feature: Feature, windows: Windows, texts: dict[int, str], seed: int) -> list[tuple[str, bool]]:
    """Contexts with whether the feature is active there: those that were not shown, and as many silent ones."""
    strong = [context.ids for context in feature.contexts[1::2]]
    silent = (windows.largest[:, feature.number] == 0).nonzero()[:, 0].numpy()
    chosen = generator(seed, "silent contexts", feature.number).permutation(silent)[: len(strong)]
    pairs = [(ids, True) for ids in strong] + [(windows.ids[i], False) for i in chosen.tolist()]
    order = generator(seed, "detection", feature.number).permutation(len(pairs)).tolist()
    return [("".join(texts[index] for index in pairs[i][0]), pairs[i][1]) for i in order]


def _marked(contexts: Sequence[Context], texts: dict[int, str]) -> str:
    lines = []
    for number, context in enumerate(contexts, 1):
        tokens = [
            f"<<{texts[index]}>>" if activation else texts[index]
            for index, activation in zip(context.ids, context.activations, strict=True)
        ]
        lines.append(f"{number}. {''.join(tokens)}")
    return "\n".join(lines)


def _said(answer: str) -> str:
    return answer.rpartition("</think>")[2]  # without what a model thinks first


def read_label(answer: str) -> str:
    """The first line of an answer that says something, at most 200 characters; empty where there is none."""
    lines = (line.strip(" \t\"'`*") for line in _said(answer).splitlines())
    return next((line for line in lines if line), "")[:MAX_LABEL_CHARS]


def read_verdict(answer: str) -> bool | None:
    """Whether the first word that is yes or no is yes; None where there is neither."""
    match = re.search(r"\b(yes|no)\b", _said(answer).lower())
    return None if match is None else match[1] == "yes"
