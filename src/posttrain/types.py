"""Training data types, from data rows to gradients.

Shape legend: B rows, T tokens, G samples per prompt, V vocabulary, U units (rows or pairs), K candidate tokens, C
classes.

Alignment rule: ``x[b, t]`` describes the token *at* t. So ``logprobs[b, t] = log p(tokens[b, t] | tokens[b, :t])`` and
``mask[b, 0]`` is False. Masks are True at trained tokens. Batch field names say who computed a value:
``sampler_logprobs``, ``ref_logprobs``, ``old_logprobs``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Finish reasons: end token, or no room left. Multi-turn completions also finish at the turn limit, when an environment
# is done, or after tool or environment failures.
Finish = Literal["stop", "length", "out_of_turns", "ended", "tool_failed", "environment_failed"]
# Finish reasons caused by recipe limits (tokens, turns, seconds per call) before completion or environment was done.
TRUNCATED: tuple[Finish, ...] = ("length", "out_of_turns", "tool_failed")

# Mask fields: 1 for tokens keeping their loss term ``[B, T]``, 1 for tokens counted by means ``[B, T]``, 1 for rows
# counted only in denominators ``[B]``.
UNMASKED, COUNTED, LEFT_OUT = "unmasked", "counted", "left_out"

if TYPE_CHECKING:
    import transformers
Model: TypeAlias = "transformers.PreTrainedModel"  # or a peft model around one
Tokenizer: TypeAlias = "transformers.PreTrainedTokenizerBase"


@dataclass(frozen=True, slots=True)
class Message:
    """Conversation message. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    ``reasoning``: thinking before the content, if stored separately. ``calls``: tool calls; subsequent ``tool``
    messages hold their results. ``is_trained``: False if the row says so. ``is_rendered``: already formatted by the
    prompt template; ignored when comparing messages.
    """

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    name: str | None = None
    is_trained: bool = True
    is_rendered: bool = field(default=False, compare=False)

    @property
    def text(self) -> str:
        """Format assistant text without calls: tagged reasoning, then content."""
        if self.reasoning is None:
            return self.content
        return f"<think>\n{self.reasoning}\n</think>\n\n{self.content}"


@dataclass(frozen=True, slots=True)
class Response:
    """Given response to an example, plus known quality.

    ``score``: higher is better; judged responses use 1 for desirable, 0 for undesirable. ``steps`` and
    ``step_labels`` (one class per step, None if unlabeled) support process supervision; ``text`` then joins the
    steps. If ``answer`` is set, ``text`` contains only reasoning. ``ids``: sampled tokens, used if they decode to
    this text.
    """

    text: str
    score: float
    steps: tuple[str, ...] = ()
    step_labels: tuple[int | None, ...] = ()
    answer: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """Task item for SFT, preferences, reinforcement learning and evaluation.

    Attributes:
        id: unique and stable within its task (``stories/train/17``).
        answer: gold answer; ``solution``: worked reasoning leading to it, without the answer line.
        responses: given responses plus quality: pairs, judged responses, labeled solutions.
        grader: component checking correctness.
        demonstration: complete response to imitate, replacing answer and solution.
        turns: tool-use turns preceding a demonstration's final response.
        conversation: the row's full messages, ending with an assistant message; ``messages``, ``turns`` and
            ``demonstration`` are then derived from it.
        variables: chat template variables, such as ``tools``.
        margin: preference margin if stated; otherwise scores are subtracted.
        is_conversation: the prompt was given as messages, so TRL-style rewards receive messages.
        columns: original row values for keys that were read, passed to TRL-style rewards.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    solution: str | None = None
    responses: tuple[Response, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    grader: str = "numeric"
    demonstration: str | None = None
    turns: tuple[Turn, ...] = ()
    conversation: tuple[Message, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    margin: float | None = None
    is_conversation: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class KeptSets:
    """Tokens kept by truncation (top-k, top-p, min-p) per completion id, as compressed sparse rows.

    Id t was drawn from ``ids[offsets[t]:offsets[t + 1]]``, sorted ascending; ``offsets`` has one more entry than the
    completion. Empty sets mean the whole vocabulary, for ids that were not drawn (environment output). ``num_cut``:
    sets truncated by an engine limit.
    """

    ids: tuple[int, ...]
    offsets: tuple[int, ...]
    num_cut: int = 0

    def at(self, t: int) -> tuple[int, ...]:
        """Look up the set for id ``t``."""
        return self.ids[self.offsets[t] : self.offsets[t + 1]]

    @property
    def counts(self) -> list[int]:
        """Set sizes."""
        return [end - start for start, end in pairwise(self.offsets)]

    @classmethod
    def of_counts(cls, ids: Sequence[int], counts: Iterable[int], num_cut: int = 0) -> KeptSets:
        """Build from concatenated ``ids`` plus set sizes."""
        return cls(tuple(ids), tuple(accumulate(counts, initial=0)), num_cut)


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Expert ids chosen by a sampler's routers, per position, router (in layer order) and choice.

    ``ids``: little-endian ``int16`` in this order, for ``num_positions`` × ``num_routers`` × ``top_k`` choices. -1
    means unknown. Positions cover prompt and completion, except the last token, which the sampler never reads.
    """

    num_positions: int
    num_routers: int
    top_k: int
    ids: bytes

    @classmethod
    def of(cls, chosen: Tensor) -> ExpertChoices:
        """Build from ids ``[positions, routers, top_k]`` on the CPU."""
        num_positions, num_routers, top_k = chosen.shape
        return cls(num_positions, num_routers, top_k, chosen.numpy().astype("<i2").tobytes())

    def tensor(self) -> Tensor:
        """Convert to ``int16 [positions, routers, top_k]``.

        Raises:
            ValueError: sizes and ids do not match.
        """
        import numpy as np
        import torch

        ids = np.frombuffer(self.ids, dtype="<i2").astype(np.int16)
        return torch.from_numpy(ids.reshape(self.num_positions, self.num_routers, self.top_k))


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled answer to a prompt.

    ``ids`` include the end token if ``finish`` is ``stop``. ``logprobs`` (fp32, one per id) use the sampling
    temperature. They refer to the whole distribution before top-k or top-p, or, given ``kept``, to the truncated
    distribution. ``version``: weight update count at sampling time. ``own``: marks model-generated ids in multi-turn
    completions (None: all); environment ids have log-probability 0. ``kept``, ``experts``: None unless requested.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: int = 0
    own: tuple[bool, ...] | None = None
    kept: KeptSets | None = None
    experts: ExpertChoices | None = None

    @property
    def is_truncated(self) -> bool:
        """True if a limit of the recipe cut it off."""
        return self.finish in TRUNCATED

    @property
    def num_own(self) -> int:
        """Count model-generated ids."""
        if self.own is None:
            return len(self.ids)
        return sum(self.own)

    @property
    def written(self) -> tuple[bool, ...]:
        """Flag model-generated ids, which are trained."""
        if self.own is None:
            return (True,) * len(self.ids)
        return self.own


# Tool call outcomes: answered, raised, malformed, unknown tool, timed out.
CallOutcome = Literal["ok", "failed", "malformed", "unknown", "timeout"]


@dataclass(frozen=True, slots=True)
class Call:
    """Tool call as generated, plus its result."""

    tool: str
    raw_arguments: str
    result: str
    outcome: CallOutcome


@dataclass(frozen=True, slots=True)
class Turn:
    """Single turn: model output (like ``Rollout.text``) and its tool calls.

    ``reward``: paid by the environment, None unless it rewards turns. ``replies``: the environment's messages that
    followed, other than results of calls.
    """

    text: str
    calls: tuple[Call, ...] = ()
    reward: float | None = None
    replies: tuple[str, ...] = ()


@dataclass(slots=True)
class Rollout:
    """Completion plus text, unweighted reward parts, and weighted reward sum.

    ``text`` is graded: template opening (``<think>`` for r1_zero) plus decoded completion, without end token.
    ``extracted``: graded answer. ``outcome``: grader verdict (``right``, ``wrong``, ``no_answer``, ``ungraded``,
    ``timeout``, ``crash``). ``turns``: all environment turns (``text`` is the last). ``failures``: environment errors;
    rollouts whose environment kept failing are not used as samples. ``feedback``: environment comments for a teacher.
    ``skipped``: TRL-style rewards returning None, which contribute no part. ``is_scored``: False if all rewards were
    skipped; such rollouts are excluded from group comparison, with advantage 0. ``extra``: logged reward columns
    (``log_extra``). ``logged``: reward metrics (``log_metric``), stored on a batch's first answer. ``replaced``: index
    of the example drawn first, whose prompt was too long; None in general.
    """

    example: Example
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    parts: dict[str, float]
    reward: float
    step: int
    epoch: int
    prompt_index: int
    rollout_index: int
    advantage: float | None = None
    extracted: str | None = None
    outcome: str = "ungraded"
    turns: tuple[Turn, ...] = ()
    failures: tuple[str, ...] = ()
    skipped: list[str] = field(default_factory=list)
    is_scored: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)
    feedback: str | None = None
    replaced: int | None = None

    @property
    def has_failed(self) -> bool:
        """True if the environment kept failing."""
        return self.completion.finish == "environment_failed"


@dataclass(slots=True)
class Sample:
    """Training row: token ids, trained positions, accompanying numbers.

    Rows sharing a ``group`` (prompt) have identical first ``prefix`` tokens, so the forward pass may compute these
    once. ``fields`` hold a float per token or per row. ``kept``: truncation sets for the trailing completion ids.
    ``experts``: the sampler's expert choices, for the leading ids.
    """

    ids: Sequence[int]
    mask: Sequence[bool]
    group: int = 0
    prefix: int = 0
    fields: dict[str, Sequence[float] | float] = field(default_factory=dict)
    kept: KeptSets | None = None
    experts: ExpertChoices | None = None


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Truncation sets for batch tokens, on the CPU.

    Row b, token t: ``ids[starts[b, t] : starts[b, t] + counts[b, t]]``. ids ``int32 [N]``; starts, counts
    ``int64 [B, T]``; count 0 means the whole vocabulary.
    """

    ids: Tensor
    starts: Tensor
    counts: Tensor

    def select(self, index: Tensor, width: int) -> KeptRows:
        """Return those of some rows, up to a width."""
        return KeptRows(self.ids, self.starts[index, :width], self.counts[index, :width])

    def moved(self, mask: Tensor, to: Tensor) -> KeptRows:
        """Move sets from ``mask`` positions to ``to [B, T']`` positions, which hold identical tokens."""
        starts, counts = (x.new_zeros(to.shape).masked_scatter(to, x[mask]) for x in (self.starts, self.counts))
        return KeptRows(self.ids, starts, counts)

    def dense(self, mask: Tensor) -> Tensor:
        """Build ``int32 [M, K]`` sets for M tokens in ``mask [B, T]``, row-major, padded by -1."""
        import torch

        starts, counts = self.starts[mask], self.counts[mask]
        places = torch.arange(int(counts.max()) if counts.numel() else 0)
        inside = places[None, :] < counts[:, None]
        at = (starts[:, None] + places).masked_fill(~inside, 0)
        return self.ids[at].masked_fill(~inside, -1)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Sampling rules that modify logits based on preceding tokens.

    repetition_penalty: for tokens already present, divides positive logits and multiplies negative ones (Keskar et al.
    2019, section 4.1, sign handling as in transformers and vLLM); 1 disables it. barred_ids: probability 0 where batch
    field ``barred`` is 1 (answers not yet allowed to end).
    """

    repetition_penalty: float = 1.0
    barred_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Batch:
    """Rows padded to a common length T.

    tokens ``int64 [B, T]``; lengths ``int64 [B]``; mask ``bool [B, T]``; group, prefix ``int64 [B]``; fields:
    ``float32 [B, T]``, ``[B]`` or ``[B, T, K]``; weights (set by aggregation over the whole optimizer batch):
    ``float32 [B, T]`` for token objectives, ``[U]`` for unit objectives. ``rows_per_unit``: 1, or 2 for pairs
    (chosen, then rejected); units stay together, in order. ``answers`` ``int64 [B]``: index among the batch's sampled
    answers, or within the data; None if unused. ``kept``: log-probabilities range over these sets; None: whole
    vocabulary. ``rules``: sampling rules applied to log-probabilities. ``experts`` ``int16 [B, T, routers, k]``:
    expert ids for router replay, -1 where the model chooses; None: the model chooses everywhere.
    """

    tokens: Tensor
    lengths: Tensor
    mask: Tensor
    group: Tensor
    prefix: Tensor
    fields: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: Tensor | None = None
    rows_per_unit: int = 1
    answers: Tensor | None = None
    kept: KeptRows | None = None
    rules: LogitRules | None = None
    experts: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def unit_mask(self) -> Tensor:
        """``bool [U, T]``: positions trained in any row, per unit."""
        return self.mask.unflatten(0, (-1, self.rows_per_unit)).any(dim=1)

    @property
    def trained_mask(self) -> Tensor:
        """``bool [B, T]``: the mask, minus rows counted only in denominators (``left_out``)."""
        if LEFT_OUT not in self.fields:
            return self.mask
        return self.mask & (self.fields[LEFT_OUT] == 0)[:, None]

    @property
    def prompt_groups(self) -> Tensor:
        """``int64 [B]``: groups whose rows can share a prompt; under router replay, its experts must match, too."""
        if self.experts is None:
            return self.group
        import torch

        numbers: dict[tuple[int, bytes], int] = {}
        found: list[int] = []
        for row, (group, prefix) in enumerate(zip(self.group.tolist(), self.prefix.tolist(), strict=True)):
            key = (group, self.experts[row, :prefix].numpy().tobytes())
            found.append(numbers.setdefault(key, len(numbers)))
        return torch.tensor(found)

    def field(self, name: str) -> Tensor:
        """Look up a batch field; objectives list required fields in ``needs``."""
        assert name in self.fields, f"batch field {name!r} was not filled; there are {sorted(self.fields)}"
        return self.fields[name]

    def select(self, rows: Sequence[int]) -> Batch:
        """Select rows in order, trimming padding; units must be whole."""
        import torch

        index = torch.as_tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        lengths = self.lengths[index]
        width = int(lengths.max())
        each = self.rows_per_unit
        units = index[::each] // each
        whole = units[:, None] * each + torch.arange(each, device=index.device)
        assert each == 1 or torch.equal(index, whole.flatten()), "the rows of a unit stay together"

        def pick(x: Tensor) -> Tensor:
            if x.ndim >= 2:
                return x[index, :width]
            return x[index]

        weights = self.weights
        if weights is not None and weights.ndim == 2:
            weights = pick(weights)
        elif weights is not None:
            weights = weights[units]
        answers = self.answers
        if answers is not None:
            answers = answers[index.to(answers.device)]
        kept = self.kept
        if kept is not None:
            kept = kept.select(index.cpu(), width)
        experts = self.experts
        if experts is not None:
            experts = experts[index.cpu(), :width]
        return replace(
            self,
            answers=answers,
            kept=kept,
            experts=experts,
            tokens=pick(self.tokens),
            lengths=lengths,
            mask=pick(self.mask),
            group=self.group[index],
            prefix=self.prefix[index],
            fields={name: pick(x) for name, x in self.fields.items()},
            weights=weights,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Move to another device; float64 becomes float32 if unsupported."""
        weights = self.weights
        if weights is not None:
            weights = _moved(weights, device)
        return replace(
            self,
            tokens=self.tokens.to(device),
            lengths=self.lengths.to(device),
            mask=self.mask.to(device),
            group=self.group.to(device),
            prefix=self.prefix.to(device),
            fields={name: _moved(x, device) for name, x in self.fields.items()},
            weights=weights,
        )


def with_float64(x: Tensor) -> Tensor:
    """Move ``x`` to a device supporting float64: from Apple GPUs (mps) to CPU, else unchanged."""
    if x.device.type != "mps":
        return x
    return x.cpu()


def _moved(x: Tensor, device: torch.device | str) -> Tensor:
    has_float64 = getattr(device, "type", str(device).partition(":")[0]) != "mps"
    if has_float64 or x.element_size() < 8 or not x.is_floating_point():
        return x.to(device)
    return x.float().to(device)


@dataclass(slots=True)
class Outputs:
    """Forward pass results passed to objectives.

    logprobs ``float32 [B, T]``, zero outside the mask; entropy ``float32 [B, T]`` per token (detached unless an
    objective requests gradients). scores ``float32 [B, T]`` (``[B, T, C]`` for C classes): value heads score the
    state *before* token t; reward heads score *at* token t. candidate_logprobs ``float32 [B, T, K]`` for tokens in
    field ``teacher_ids``. rerouted ``float32 [B, T]``: under router replay, the fraction of routers that choose
    other experts by themselves, at the position that predicts token t.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    scores: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    rerouted: Tensor | None = None


@dataclass(slots=True)
class Loss:
    """Unreduced objective values: ``[B, T]`` for token objectives, ``[U]`` for rows and pairs.

    metrics: tensors of equal shape, averaged in float64 over trained tokens or units in the optimizer batch.
    """

    values: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def collate(samples: Sequence[Sample], pad_id: int = 0, rows_per_unit: int = 1) -> Batch:
    """Return a batch of the rows, padded on the right to the longest. Masks come from lengths.

    Batch fields are float32; one per token is padded with 0.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    assert samples, "an empty batch is refused by the source"
    assert len(samples) % rows_per_unit == 0, "units are whole"
    assert all(s.fields.keys() == samples[0].fields.keys() for s in samples), "every sample has the same fields"
    lengths = [len(s.ids) for s in samples]

    def padded(rows: Sequence[Any], dtype: torch.dtype, filler: int = 0) -> Tensor:
        if isinstance(rows[0], float | int):
            return torch.tensor(rows, dtype=dtype)
        assert [len(row) for row in rows] == lengths, "one value per token"
        return pad_sequence([torch.tensor(list(row), dtype=dtype) for row in rows], True, filler)

    mask = padded([s.mask for s in samples], torch.bool)
    assert not mask[:, 0].any(), "mask[b, 0] is False: nothing predicts the first token"
    return Batch(
        tokens=padded([s.ids for s in samples], torch.long, pad_id),
        lengths=torch.tensor(lengths),
        mask=mask,
        group=torch.tensor([s.group for s in samples]),
        prefix=torch.tensor([s.prefix for s in samples]),
        fields={name: padded([s.fields[name] for s in samples], torch.float32) for name in samples[0].fields},
        rows_per_unit=rows_per_unit,
        kept=_collate_kept(samples, padded),
        experts=_collate_experts(samples, max(lengths)),
    )


def _collate_kept(samples: Sequence[Sample], padded: Callable[..., Tensor]) -> KeptRows | None:
    """Combine row sets; None without any."""
    import torch

    if samples[0].kept is None:
        return None
    ids: list[int] = []
    starts: list[list[int]] = []
    counts: list[list[int]] = []
    for sample in samples:
        assert sample.kept is not None, "all rows of a batch are sampled alike"
        before = [0] * (len(sample.ids) + 1 - len(sample.kept.offsets))
        starts.append(before + [len(ids) + offset for offset in sample.kept.offsets[:-1]])
        counts.append(before + sample.kept.counts)
        ids += sample.kept.ids
    return KeptRows(torch.tensor(ids, dtype=torch.int32), padded(starts, torch.long), padded(counts, torch.long))


def _collate_experts(samples: Sequence[Sample], width: int) -> Tensor | None:
    """Pad expert choices with -1 to ``int16 [B, width, routers, k]``; None without any."""
    import torch

    first = samples[0].experts
    if first is None:
        return None
    shape = (len(samples), width, first.num_routers, first.top_k)
    table = torch.full(shape, -1, dtype=torch.int16)
    for row, sample in enumerate(samples):
        assert sample.experts is not None, "all rows of a batch are sampled alike"
        assert sample.experts.num_positions <= len(sample.ids), "one choice per token"
        table[row, : sample.experts.num_positions] = sample.experts.tensor()
    return table
