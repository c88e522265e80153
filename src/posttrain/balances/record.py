"""The record of an update: what was meant, what was sampled or given, and what was computed.

Shapes: N answers of a batch, B rows of an update, T tokens, U units (rows or pairs). A record of a running update has
``tokens``; one that is read from a file has sums over the trained tokens of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from posttrain.types import TRUNCATED, KeptSets

Fields = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Formula:
    """A component by its registered name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MaskFacts(Formula):
    """A mask; ``divisor``: the tokens that the means divide by, ``all`` or those that are ``kept``."""

    divisor: str = "all"


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The optimizer and the course of its learning rate, as the recipe says; ``steps``: of the whole run."""

    name: str
    lr: float
    steps: int | None = None
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    max_grad_norm: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """A reference that moves after every so many updates, by a share ``mixing`` towards the policy."""

    every: int
    mixing: float

    def last_move(self, step: int) -> int:
        """Return the update before ``step`` after which it moved last; 0 if it did not yet."""
        return (step - 1) // self.every * self.every


@dataclass(frozen=True, slots=True)
class PenaltyFacts:
    """A KL penalty in the reward, as ``kl_in_reward`` of a recipe."""

    estimator: str
    weight: float
    target: float | None = None
    horizon: int = 10_000


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """The rules by which answers are sampled and chosen.

    rewards: weight of each part; None where it is not known. max_tokens, context: limits of an answer, and of prompt
    and answer together. num_examples: of a task whose prompts are passed over in turn (None of a mixture). takes_all:
    every answer is trained on. divides_all: answers that a limit cut off and that are masked count in means. redraws:
    further prompts replace groups of equal rewards. is_cut: of a part of the distribution, where log-probabilities are
    of the whole; replays: where they are over the sets of the answers, of at most most_kept tokens. has_stop_texts: an
    answer may end with any token. ignores_rules: the trainer scores without the rules of sampling. turn_weight: of the
    rewards of turns. at_scored_temperature: the trainer scores at the temperature of sampling. draws: False of an
    engine that answers from a script. keeps_unscored: an answer without a reward is a row with the advantage 0; else it
    takes no part.
    """

    num_prompts: int
    group_size: int
    rewards: Mapping[str, float] | None = None
    max_tokens: int | None = None
    context: int | None = None
    stop_ids: tuple[int, ...] = ()
    num_examples: int | None = None
    takes_all: bool = True
    masks_truncated: bool = False
    divides_all: bool = False
    redraws: bool = False
    is_cut: bool = False
    replays: bool = False
    most_kept: int | None = None
    has_stop_texts: bool = False
    ignores_rules: bool = False
    has_turns: bool = False
    turn_weight: float = 0.0
    staleness: int = 0
    old_from_trainer: bool = False
    temperature: float = 1.0
    at_scored_temperature: bool = True
    draws: bool = True
    keeps_unscored: bool = True
    penalty: PenaltyFacts | None = None


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """The facts that balances read of a recipe and of what was built from it.

    sampler_limit, trainer_limit: the largest mean KL, in nats per token, between sampler and trainer, and between two
    passes of the trainer over the same weights (``limits.py``). updates: of a batch. has_dropout: while it trains.
    trains_whole: the weights that are trained are all of the model's.
    """

    objective: Formula
    aggregation: Formula
    level: Literal["token", "row", "pair"] = "token"
    advantage: Formula | None = None
    correction: Formula | None = None
    masks: tuple[MaskFacts, ...] = ()
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    reference: ReferenceFacts | None = None
    sampling: SamplingFacts | None = None
    optimizer: OptimizerFacts | None = None
    sampler_limit: float = 1e-8
    trainer_limit: float = 1e-8
    updates: int = 1
    num_minibatches: int = 1
    has_dropout: bool = False
    num_given: int | None = None


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer as it was sampled and graded; ``own`` marks the ids that the model wrote, None: all.

    ``logprobs``: of the sampler, one for each id; None where they were not recorded. ``turns``: the rewards of turns.
    ``skipped``: rewards that returned None. ``is_scored``: False if all did.
    ``kept``: the sets that the log-probabilities are over; None: the whole vocabulary.
    """

    prompt_index: int
    epoch: int
    rollout_index: int
    prompt: Sequence[int]
    ids: Sequence[int]
    own: Sequence[bool] | None
    logprobs: Sequence[float] | None
    parts: Mapping[str, float]
    reward: float
    advantage: float | None
    finish: str
    version: int
    outcome: str = "ungraded"
    turns: tuple[float | None, ...] = ()
    takes_part: bool = True
    skipped: Sequence[str] = ()
    is_scored: bool = True
    kept: KeptSets | None = None

    @property
    def places(self) -> Sequence[int]:
        """The positions of the tokens that the model wrote, in prompt and answer."""
        start = len(self.prompt)
        if self.own is None:
            return range(start, start + len(self.ids))
        return [start + t for t, is_own in enumerate(self.own) if is_own]

    @property
    def num_own(self) -> int:
        """The number of tokens that the model wrote."""
        if self.own is None:
            return len(self.ids)
        return sum(self.own)

    @property
    def is_truncated(self) -> bool:
        """True if a limit cut it off."""
        return self.finish in TRUNCATED

    @property
    def has_failed(self) -> bool:
        """True if its environment failed, or too few answers of its group were played."""
        return self.finish == "environment_failed" or not self.takes_part


@dataclass(frozen=True, slots=True)
class GivenRow:
    """A row of a data set: its unit, its pass, the positions that are to be trained, and its score."""

    unit: int
    epoch: int
    places: Sequence[int]
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over the trained tokens of each row of an update, float64 ``[B]``; whole numbers are int64.

    answers: the place of each row's answer in the batch (or of its row in the data set). tokens, places: the number of
    trained tokens and the sum of their positions. weight: of all tokens of a row; of a unit at its first row. value:
    what the row added to the loss. advantage: its mean, and ``uneven`` the largest distance from it. kl_sampler,
    kl_reference: sums of k3. computed ``bool [B]``: False of a row that was left out of the pass. What was not there is
    NaN.
    """

    answers: Tensor
    tokens: Tensor
    places: Tensor
    weight: Tensor
    value: Tensor
    logprob: Tensor
    advantage: Tensor
    uneven: Tensor
    old: Tensor
    reference: Tensor
    kl_sampler: Tensor
    kl_reference: Tensor
    computed: Tensor

    def __len__(self) -> int:
        return len(self.answers)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The numbers that an update computed at each token: ``[B, T]`` unless said otherwise.

    mask ``bool``: trained. answers ``int64 [B]``: as in ``RowSums``. weights: of the sum, ``[U]`` of units. values: of
    the objective, times the correction.
    logprobs, entropy, scores (``[B, T]`` or ``[B, T, C]``): the forward pass's results, with the derivatives of the
    loss by them in ``slopes``. fields: the batch's. whole: the fields of all rows of the batch, whose answers are
    ``whole_answers``.
    """

    mask: Tensor
    answers: Tensor
    weights: Tensor
    values: Tensor
    logprobs: Tensor
    fields: Fields
    slopes: Fields = field(default_factory=dict)
    entropy: Tensor | None = None
    scores: Tensor | None = None
    whole: Fields = field(default_factory=dict)
    whole_answers: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """The updates before a record, as far as it is compared with them.

    seen: of each prompt (or unit) the last pass, and the update that drew it. taken: answers that updates of this pass
    over the batch have had. moved: sum of the shares by which weights have moved. surprise: see ``surprise_of``.
    kl_weight: the penalty's that the next batch must have.
    """

    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    taken: frozenset[int] = frozenset()
    moved: float = 0.0
    surprise: float = 0.0
    surprise_squared: float = 0.0
    kl_weight: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An update: ``update`` counts those of a batch from 0. measured: its numbers, by name.

    ``rows`` is None where there was nothing to train on. advantages: of every answer as the formula has them, where an
    earlier update of the batch has computed them (``expected_advantages``).
    """

    step: int
    update: int
    facts: UpdateFacts
    measured: Mapping[str, float]
    rows: RowSums | None = None
    answers: Sequence[SampledAnswer] = ()
    given: Sequence[GivenRow] = ()
    tokens: TokenRecord | None = None
    before: Before = field(default_factory=Before)
    advantages: Sequence[list[float] | None] | None = None

    @property
    def batch(self) -> int:
        """The number of the batch, from 0."""
        return (self.step - 1) // self.facts.updates

    @property
    def is_first(self) -> bool:
        """True for the first update of a batch: of weights that no update has moved since it was made."""
        return self.update == 0

    @property
    def groups(self) -> list[list[int]]:
        """The places of the answers of each group, in order."""
        assert self.facts.sampling is not None
        size = self.facts.sampling.group_size
        return [list(range(start, min(start + size, len(self.answers)))) for start in range(0, len(self.answers), size)]

    def following(self) -> Before:
        """Return the same for the next record; ``seen`` is taken over and changed, so that a pass costs no copies."""
        before = self.before
        taken = before.taken
        if self.update % self.facts.num_minibatches == 0:
            taken = frozenset()
        if self.rows is not None and self.facts.sampling is not None:
            taken |= frozenset(self.rows.answers.tolist())
        seen = before.seen
        if self.is_first and self.answers:
            seen.update((a.prompt_index, (a.epoch, self.step)) for a in first_round(self))
        seen.update((row.unit, (row.epoch, self.step)) for row in self.given)
        return replace(
            before,
            seen=seen,
            taken=taken,
            moved=before.moved + self.measured.get("moved", 0.0),
            surprise=before.surprise + self.measured.get("surprise", 0.0),
            surprise_squared=before.surprise_squared + self.measured.get("surprise_squared", 0.0),
            kl_weight=self.measured.get("next_kl_weight", before.kl_weight),
        )


def first_round(record: StepRecord) -> Sequence[SampledAnswer]:
    """Return the answers to the prompts whose turn it was; further rounds, which replace groups, have other orders."""
    assert record.facts.sampling is not None
    return record.answers[: record.facts.sampling.num_prompts * record.facts.sampling.group_size]
