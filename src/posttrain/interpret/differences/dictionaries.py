"""Dictionaries for a comparison: trained in one go on activations, several seeds of them, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.loss import dictionary_loss
from posttrain.interpret.dictionaries.recipe import DictionaryTrainSection, DictionaryWord
from posttrain.interpret.dictionaries.training_rows import RowBatches, Rows, sample_rows

SAMPLE_ROWS = 65_536
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fit_dictionary(
    rows: Rows,
    num_rows: int,
    word: DictionaryWord,
    settings: DictionaryTrainSection,
    *,
    seed: int,
    frozen_decoder: bool = False,
    device: torch.device | str = "cpu",
    observe: Callable[[int], None] = lambda step: None,
) -> Dictionary:
    """A dictionary of the first ``num_rows`` rows, on raw activations, trained like one of `posttrain sae train`.

    Args:
        frozen_decoder: its directions stay the random ones of the beginning; only the encoder learns. The baseline that
            says what a set of directions gives that knows nothing of the model.
        observe: told the number of steps done.
    """
    dictionary = Dictionary(
        rows.d,
        word.num_features(rows.d),
        rows.sources,
        word.name,
        word.options,
        word.prefixes(rows.d) or None,
        seed,
    ).to(device)
    dictionary.prepare(sample_rows(rows, num_rows, SAMPLE_ROWS, seed).to(device))
    dictionary.W_dec.requires_grad_(not frozen_decoder)
    trained = [p for p in dictionary.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, settings.learning_rate(dictionary.features), fused=True)
    auxk = settings.auxk if settings.auxk is not None else (1 / 32 if dictionary.needs_rank else 0.0)
    dead_rows = max(1, round(settings.dead_after * settings.steps * settings.batch))
    rate = optimizer.param_groups[0]["lr"]
    batch_size = min(settings.batch, num_rows)
    for step, batch in enumerate(RowBatches(rows, num_rows, batch_size, settings.steps, seed)):
        x = batch.to(device)
        loss, measured = dictionary_loss(
            dictionary,
            dictionary.scaled(x),
            progress=step / settings.steps,
            auxk=auxk,
            dead=dictionary.since_fired > dead_rows if auxk else None,
            dtype=_DTYPES[settings.precision],
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if settings.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm)
        optimizer.param_groups[0]["lr"] = rate * _schedule(step, settings)
        optimizer.step()
        dictionary.normalize()
        with torch.no_grad():
            dictionary.since_fired.add_(len(x)).masked_fill_(measured.fired, 0)
            if measured.threshold is not None:
                dictionary.threshold.copy_(measured.threshold)
        observe(step + 1)
    return dictionary.requires_grad_(False).fold()


def _schedule(step: int, settings: DictionaryTrainSection) -> float:
    rising, falling = settings.warmup * settings.steps, settings.decay * settings.steps
    up = (step + 1) / rising if rising else 1.0
    down = (settings.steps - step) / falling if falling else 1.0
    return max(0.0, min(1.0, up, down))


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far two dictionaries' changed features are the same ones.

    ``share``: of the first's, those whose most similar feature (by decoder cosine) of the second is one of the second's
    and went the same way. ``by_chance``: the mean of that share for equally many features drawn at random from the
    first. ``cosine``: the mean similarity of the first's changed features to their partners; ``count`` of them.
    """

    share: float
    by_chance: float
    cosine: float
    count: int


def overlap(
    directions: tuple[Tensor, Tensor], chosen: tuple[Tensor, Tensor], signs: tuple[Tensor, Tensor], least: float = 0.7
) -> Overlap:
    """The overlap of two sets of features.

    Args:
        directions: decoder rows [F, d] of both.
        chosen: int64, the changed features of each.
        signs: [F] of each, above 0 where a feature's mean activation rose.
        least: partners that are less similar do not count.
    """
    unit = [x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-12) for x in directions]
    cosine, partner = (unit[0] @ unit[1].T).max(dim=1)
    is_chosen = torch.zeros(len(unit[1]), dtype=torch.bool, device=partner.device)
    is_chosen[chosen[1]] = True
    same = is_chosen[partner] & (cosine >= least) & ((signs[0] > 0) == (signs[1] > 0)[partner])
    count = len(chosen[0])
    if not count:
        return Overlap(float("nan"), float(same.double().mean()), float("nan"), 0)
    return Overlap(
        float(same[chosen[0]].double().mean()), float(same.double().mean()), float(cosine[chosen[0]].mean()), count
    )
