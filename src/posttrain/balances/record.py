"""Record of an update: settings, sampled or given answers, and computed values.

Shapes: N answers per batch, B rows per update, T tokens, U units (rows or pairs). Records from running updates have
``tokens``; those read from files have sums over each row's trained tokens.
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
    """A registered component with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MaskFacts(Formula):
    """A mask. ``divisor``: tokens in the denominator, ``all`` or ``kept`` ones."""

    divisor: str = "all"


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Optimizer and learning rate schedule from the recipe. ``steps``: total steps."""

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
        """Last update before ``step`` in which the reference moved; 0 if none."""
        return (step - 1) // self.every * self.every


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """Mixture-of-experts routers under an auxiliary loss. top_k: experts per token."""

    num_routers: int
    top_k: int


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Sums over tokens and routers in an update: times chosen and probability per expert, ``[E]``."""

    counts: Tensor
    probabilities: Tensor
    num_tokens: float


@dataclass(frozen=True, slots=True)
class PenaltyFacts:
    """KL penalty in the reward, as in the recipe's ``kl_in_reward``."""

    estimator: str
    weight: float
    target: float | None = None
    horizon: int = 10_000


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """Rules for sampling and selecting answers.

    rewards: weight per part; None if unknown. max_tokens, context: limits for answers, and for prompt plus answer.
    num_examples: size of a task whose prompts are visited in passes (None for mixtures). takes_all: every answer is
    trained. divides_all: masked truncated answers count in denominators. redraws: uniform groups are replaced by new
    prompts. is_cut: sampling was truncated, but log-probabilities cover the full distribution; replays: they cover
    answers' kept sets, at most most_kept tokens each. has_stop_texts: answers may end with any token. ignores_rules:
    the trainer scores without sampling rules. turn_weight: weight of turn rewards. at_scored_temperature: the trainer
    scores at sampling temperature. draws: False for scripted engines. keeps_unscored: unrewarded answers become rows
    with advantage 0; otherwise they are dropped. rubric: part of the ``rubric`` reward, if there is exactly one; rows
    have its criteria under rubric_key.
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
    rubric: str | None = None
    rubric_key: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """Facts about a recipe and its built components, as used by balances.

    sampler_limit, trainer_limit: largest mean KL in nats per token, between sampler and trainer, and between two
    trainer passes with identical weights (``limits.py``). updates: per batch. has_dropout: during training.
    trains_whole: all of the model's weights are trained.
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
    routers: RouterFacts | None = None
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
    """A sampled and graded answer. ``own`` marks generated ids; None: all.

    ``logprobs``: from the sampler, one per id; None if not recorded. ``turns``: turn rewards. ``skipped``: rewards
    that returned None. ``is_scored``: False if all did. ``kept``: sets underlying the log-probabilities; None: whole
    vocabulary. ``criteria``: weights of the row's rubric, known in a running update. ``replaced``: see ``Rollout``.
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
    criteria: Sequence[float] = ()
    replaced: int | None = None

    @property
    def visited(self) -> int:
        """Index of the prompt visited in this pass: the replaced one, if it was too long."""
        if self.replaced is None:
            return self.prompt_index
        return self.replaced

    @property
    def places(self) -> Sequence[int]:
        """Positions of generated tokens within prompt plus answer."""
        start = len(self.prompt)
        if self.own is None:
            return range(start, start + len(self.ids))
        return [start + t for t, is_own in enumerate(self.own) if is_own]

    @property
    def num_own(self) -> int:
        """Number of generated tokens."""
        if self.own is None:
            return len(self.ids)
        return sum(self.own)

    @property
    def is_truncated(self) -> bool:
        """True if a limit cut it off."""
        return self.finish in TRUNCATED

    @property
    def has_failed(self) -> bool:
        """True if the environment failed, or too few answers in its group were completed."""
        return self.finish == "environment_failed" or not self.takes_part


@dataclass(frozen=True, slots=True)
class GivenRow:
    """A data set row: unit, pass, trained positions and score."""

    unit: int
    epoch: int
    places: Sequence[int]
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over each row's trained tokens in an update, float64 ``[B]``; integers are int64.

    answers: index of each row's answer in the batch (or row in the data set). tokens, places: count of trained tokens
    and sum of their positions. weight: total over a row; for units, at the first row. value: contribution to the
    loss. advantage: mean, and ``uneven`` the largest deviation from it. kl_sampler, kl_reference: sums of k3.
    computed ``bool [B]``: False for skipped rows. Missing values are NaN.
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
    """Per-token numbers of an update: ``[B, T]`` unless noted.

    mask ``bool``: trained. answers ``int64 [B]``: as in ``RowSums``. weights: of the sum, ``[U]`` for units. values:
    of the objective, times correction. logprobs, entropy, scores (``[B, T]`` or ``[B, T, C]``): model outputs, with
    the loss's derivatives in ``slopes``. fields: batch fields. whole: fields for all rows in the batch, belonging to
    ``whole_answers``. lengths ``int64 [B]``: tokens per row.
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
    lengths: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """Previous updates, as far as records are compared with them.

    seen: per prompt (or unit), its last pass and the update that drew it. taken: answers already used in this pass
    over the batch. moved: cumulative relative weight change. surprise: see ``surprise_of``. kl_weight: expected
    penalty weight for the next batch.
    """

    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    taken: frozenset[int] = frozenset()
    moved: float = 0.0
    surprise: float = 0.0
    surprise_squared: float = 0.0
    kl_weight: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An update. ``update`` counts from 0 within a batch. measured: metrics by name.

    ``rows`` is None if nothing was trained. advantages: recomputed for every answer, if an earlier update in this
    batch already did so (``expected_advantages``). routing: for running updates under a router loss.
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
    routing: RoutingRecord | None = None

    @property
    def batch(self) -> int:
        """Batch number, from 0."""
        return (self.step - 1) // self.facts.updates

    @property
    def is_first(self) -> bool:
        """True for a batch's first update, before any update moved the sampling weights."""
        return self.update == 0

    @property
    def groups(self) -> list[list[int]]:
        """Answer indices per group, in order."""
        assert self.facts.sampling is not None
        size = self.facts.sampling.group_size
        return [list(range(start, min(start + size, len(self.answers)))) for start in range(0, len(self.answers), size)]

    def following(self) -> Before:
        """Build the context for the next record. ``seen`` is reused and modified in place to avoid copies."""
        before = self.before
        taken = before.taken
        if self.update % self.facts.num_minibatches == 0:
            taken = frozenset()
        if self.rows is not None and self.facts.sampling is not None:
            taken |= frozenset(self.rows.answers.tolist())
        seen = before.seen
        if self.is_first and self.answers:
            seen.update((a.visited, (a.epoch, self.step)) for a in first_round(self))
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
    """Answers to regularly scheduled prompts. Extra rounds that replace groups use a different order."""
    assert record.facts.sampling is not None
    return record.answers[: record.facts.sampling.num_prompts * record.facts.sampling.group_size]
