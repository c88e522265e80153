"""One step of training a dictionary, and a training in memory that is made of such steps.

What Lightning runs with checkpoints and metrics (``training``) are the same steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.loss import Measured, dictionary_loss
from posttrain.interpret.dictionaries.recipe import DictionaryTrainSection, DictionaryWord
from posttrain.interpret.dictionaries.rows import RowBatches, Rows, sample_rows

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_dictionary(rows: Rows, word: DictionaryWord, seed: int) -> Dictionary:
    """A dictionary for such rows, with its first weights; ``input_scale`` and ``b_dec`` are not set yet.

    Raises:
        UsageError: prefixes that do not fit the number of features.
    """
    features, prefixes = word.num_features(rows.d), word.prefixes(rows.d) or None
    return Dictionary(
        rows.d, features, rows.sources, word.name, word.options, prefixes, seed,
        transcoder=rows.has_targets, skip=word.skip,
    )  # fmt: skip


class Learner:
    """A prepared dictionary that learns: its loss, gradient clipping, optimizer and schedule.

    ``measured`` and ``grad_norm`` are of the last step. A feature is dead that no row of ``dead_rows`` activated.
    """

    def __init__(self, dictionary: Dictionary, settings: DictionaryTrainSection) -> None:
        self.dictionary, self.settings = dictionary, settings
        self.auxk = settings.auxk if settings.auxk is not None else (1 / 32 if dictionary.needs_rank else 0.0)
        self.dead_rows = max(1, round(settings.dead_after * settings.steps * settings.batch))
        self.parameters = [p for p in dictionary.parameters() if p.requires_grad]
        self.measured: Measured | None = None
        self.grad_norm: Tensor | None = None

    def optimizer(self) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LambdaLR]:
        """Adam, and its rate that rises over the first and falls over the last steps."""
        settings, steps = self.settings, self.settings.steps
        optimizer = torch.optim.Adam(self.parameters, settings.learning_rate(self.dictionary.features), fused=True)
        rising, falling = settings.warmup * steps, settings.decay * steps

        def factor(step: int) -> float:
            up = (step + 1) / rising if rising else 1.0
            down = (steps - step) / falling if falling else 1.0
            return max(0.0, min(1.0, up, down))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        """The loss of raw rows [n, M, d], of a transcoder [n, 2, d], at a step.

        Which features fired, and the running threshold, are kept.
        """
        dictionary = self.dictionary
        read, wanted = dictionary.sides(batch)
        loss, measured = dictionary_loss(
            dictionary,
            dictionary.scaled(read),
            progress=step / self.settings.steps,
            auxk=self.auxk,
            dead=dictionary.since_fired > self.dead_rows if self.auxk else None,
            dtype=_DTYPES[self.settings.precision],
            targets=dictionary.scaled_target(wanted) if dictionary.transcoder else None,
        )
        self.measured = measured
        dictionary.since_fired.add_(len(batch)).masked_fill_(measured.fired, 0)
        if measured.threshold is not None:
            dictionary.threshold.copy_(measured.threshold)
        return loss

    def clip(self) -> None:
        """Bring the gradient to at most ``max_grad_norm``, and note how long it was."""
        limit = self.settings.max_grad_norm
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)


def fit_dictionary(
    rows: Rows,
    num_rows: int,
    word: DictionaryWord,
    settings: DictionaryTrainSection,
    *,
    seed: int,
    frozen_decoder: bool = False,
    device: torch.device | str = "cpu",
) -> Dictionary:
    """A dictionary of the first ``num_rows`` rows, on raw activations, trained like one of `posttrain sae train`.

    Args:
        frozen_decoder: its directions stay the random ones of the beginning; only the encoder learns. The baseline that
            says what a set of directions gives that knows nothing of the model.
    """
    dictionary = build_dictionary(rows, word, seed).to(device)
    dictionary.prepare(sample_rows(rows, num_rows, seed).to(device))
    dictionary.W_dec.requires_grad_(not frozen_decoder)
    learner = Learner(dictionary, settings)
    optimizer, schedule = learner.optimizer()
    for step, batch in enumerate(RowBatches(rows, num_rows, min(settings.batch, num_rows), settings.steps, seed)):
        optimizer.zero_grad(set_to_none=True)
        learner.loss(batch.to(device), step).backward()
        learner.clip()
        optimizer.step()
        schedule.step()
        dictionary.normalize()
    return dictionary.requires_grad_(False).fold()
