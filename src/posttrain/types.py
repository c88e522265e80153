"""The data types of training, from a row of data to a gradient.

Shape legend, everywhere: B rows, T tokens, G samples per prompt, V vocabulary, U units (rows or
pairs), K candidate tokens, C classes.

The one alignment rule, everywhere: ``x[b, t]`` describes the token *at* t. So
``logprobs[b, t] = log p(tokens[b, t] | tokens[b, :t])`` and ``mask[b, 0]`` is False. A mask is
True where a token is trained. The name of a batch field says who computed it: ``sampler_logprobs``,
``ref_logprobs``, ``old_logprobs``.
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

# How a completion ended: by its end token, for want of room; of several turns also by the limit of turns, because the
# environment says that it is over, or because a tool or the environment failed.
Finish = Literal["stop", "length", "out_of_turns", "ended", "tool_failed", "environment_failed"]
# Those by which a limit of the recipe cuts a completion off, before it or its environment came to an end: of tokens, of
# turns, of the seconds of a call.
TRUNCATED: tuple[Finish, ...] = ("length", "out_of_turns", "tool_failed")

# Batch fields of masks: 1 of tokens that keep their term ``[B, T]``, 1 of tokens that the means divide by ``[B, T]``,
# and 1 of rows that are only divided by ``[B]``.
UNMASKED, COUNTED, LEFT_OUT = "unmasked", "counted", "left_out"

if TYPE_CHECKING:
    import transformers
Model: TypeAlias = "transformers.PreTrainedModel"  # or a peft model around one
Tokenizer: TypeAlias = "transformers.PreTrainedTokenizerBase"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    ``reasoning``: the thinking before the content, where a row has it apart. ``calls``: of tools; the messages of the
    role ``tool`` that follow are their results. ``is_trained``: False where a row says so.
    ``is_rendered``: a prompt that the prompt template has written already; messages with the same text are equal.
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
        """Return the text of the assistant without its calls: the reasoning between tags, then the content."""
        if self.reasoning is None:
            return self.content
        return f"<think>\n{self.reasoning}\n</think>\n\n{self.content}"


@dataclass(frozen=True, slots=True)
class Response:
    """A given answer to an example's messages, with what is known about its worth.

    ``score``: higher is better; of a judged answer 1 is desirable and 0 is not. ``steps`` and ``step_labels`` (a class
    each, None without a label) are for process supervision; ``text`` is then the steps joined. With an ``answer``,
    ``text`` is the reasoning alone. ``ids``: the sampled tokens, used where they decode to the text.
    """

    text: str
    score: float
    steps: tuple[str, ...] = ()
    step_labels: tuple[int | None, ...] = ()
    answer: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One item of a task, for SFT, preferences, reinforcement learning and evaluation.

    Attributes:
        id: unique and stable within its task (``stories/train/17``).
        answer: the gold answer; ``solution``: the worked reasoning that leads to it, without the answer line.
        responses: given answers with their worth: a pair, judged answers, labelled solutions.
        grader: the component that says whether an answer is right.
        demonstration: a whole response to imitate, in place of answer and solution.
        turns: before the answer in a demonstration that uses tools.
        conversation: all messages of a row that ends with the assistant's; ``messages``, ``turns`` and
            ``demonstration`` are then its parts.
        variables: what the row passes to the chat template, such as its ``tools``.
        margin: of a pair whose row states it; otherwise the difference of the scores.
        is_conversation: the row has its prompt as messages, so that rewards in TRL's form get messages.
        columns: keys of the row that were read, as the row has them, for rewards in TRL's form.
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
    """The tokens that truncation (top-k, top-p, min-p) kept at each id of a completion, as compressed sparse rows.

    Id t was drawn from ``ids[offsets[t]:offsets[t + 1]]``, in ascending order; ``offsets`` has one number more than the
    completion has ids. An empty set is the whole vocabulary: the id was not drawn, as an environment's. ``num_cut``:
    sets that would be larger without the engine's bound.
    """

    ids: tuple[int, ...]
    offsets: tuple[int, ...]
    num_cut: int = 0

    def at(self, t: int) -> tuple[int, ...]:
        """Return the set of id ``t``."""
        return self.ids[self.offsets[t] : self.offsets[t + 1]]

    @property
    def counts(self) -> list[int]:
        """The size of each set."""
        return [end - start for start, end in pairwise(self.offsets)]

    @classmethod
    def of_counts(cls, ids: Sequence[int], counts: Iterable[int], num_cut: int = 0) -> KeptSets:
        """Return the sets of these sizes that follow one another in ``ids``."""
        return cls(tuple(ids), tuple(accumulate(counts, initial=0)), num_cut)


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled answer to one prompt.

    ``ids`` include the end token when ``finish`` is ``stop``. ``logprobs`` (fp32, one per id) are taken at the sampling
    temperature: of the whole distribution, before truncation by top-k or top-p, or with ``kept`` of what truncation
    left. ``version``: number of updates of the weights that drew them. ``own``: of several turns, which ids the model
    wrote; the environment's have log-probability 0. None: all. ``kept``: None if they were not asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: int = 0
    own: tuple[bool, ...] | None = None
    kept: KeptSets | None = None

    @property
    def is_truncated(self) -> bool:
        """True if a limit of the recipe cut it off."""
        return self.finish in TRUNCATED

    @property
    def num_own(self) -> int:
        """Return the number of ids that the model wrote."""
        if self.own is None:
            return len(self.ids)
        return sum(self.own)

    @property
    def written(self) -> tuple[bool, ...]:
        """Return True for each id that the model wrote: these are trained."""
        if self.own is None:
            return (True,) * len(self.ids)
        return self.own


# How a call of a tool ended: it answered; it raised; it is no call; there is no such tool; it took too long.
CallOutcome = Literal["ok", "failed", "malformed", "unknown", "timeout"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool as the model wrote it, and the result that it got."""

    tool: str
    raw_arguments: str
    result: str
    outcome: CallOutcome


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a completion: what the model wrote (as in ``Rollout.text``), and the calls in it.

    ``reward``: what the environment paid for it, None where it says nothing of turns.
    """

    text: str
    calls: tuple[Call, ...] = ()
    reward: float | None = None


@dataclass(slots=True)
class Rollout:
    """A completion with its text, its reward parts (unweighted) and their weighted sum.

    ``text`` is what graders see: the template's opening (``<think>`` for r1_zero) and the decoded completion without
    its end token. ``extracted``: the answer that was graded. ``outcome``: the grader's verdict (``right``, ``wrong``,
    ``no_answer``, ``ungraded``, ``timeout``, ``crash``). ``turns``: with an environment, all of them (``text`` is the
    last). ``failures``: of the environment; one that failed to the end is no sample of anything. ``feedback``: what
    the environment says of it to a teacher. ``skipped``: rewards in TRL's form that returned None for it, which have no
    part. ``is_scored``: False if all of the recipe's did; it is then not compared with its group, and its advantage is
    0. ``extra``: columns that rewards logged (``log_extra``). ``logged``: of the first answer of a batch, the values of
    metrics that rewards logged (``log_metric``).
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

    @property
    def has_failed(self) -> bool:
        """True if the environment failed to the end."""
        return self.completion.finish == "environment_failed"


@dataclass(slots=True)
class Sample:
    """One row of training: token ids, the trained positions, and numbers that travel with them.

    ``prefix`` leading tokens are the same for all rows with the same ``group`` (the prompt), so
    that the forward pass may compute them once. ``fields`` hold one float per token or one
    float for the row. ``kept``: the sets of the last ids, which are those of a completion.
    """

    ids: Sequence[int]
    mask: Sequence[bool]
    group: int = 0
    prefix: int = 0
    fields: dict[str, Sequence[float] | float] = field(default_factory=dict)
    kept: KeptSets | None = None


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The sets of tokens from which the tokens of a batch were drawn, on the CPU.

    Token t of row b: ``ids[starts[b, t] : starts[b, t] + counts[b, t]]``. ids ``int32 [N]``; starts, counts
    ``int64 [B, T]``; a count of 0 is the whole vocabulary.
    """

    ids: Tensor
    starts: Tensor
    counts: Tensor

    def select(self, index: Tensor, width: int) -> KeptRows:
        """Return those of some rows, up to a width."""
        return KeptRows(self.ids, self.starts[index, :width], self.counts[index, :width])

    def moved(self, mask: Tensor, to: Tensor) -> KeptRows:
        """Return the sets of the tokens of ``mask`` at those of the mask ``to [B, T']``, which are the same tokens."""
        starts, counts = (x.new_zeros(to.shape).masked_scatter(to, x[mask]) for x in (self.starts, self.counts))
        return KeptRows(self.ids, starts, counts)

    def dense(self, mask: Tensor) -> Tensor:
        """``int32 [M, K]``: the sets of the M tokens of ``mask [B, T]`` in row-major order, filled up with -1."""
        import torch

        starts, counts = self.starts[mask], self.counts[mask]
        places = torch.arange(int(counts.max()) if counts.numel() else 0)
        inside = places[None, :] < counts[:, None]
        at = (starts[:, None] + places).masked_fill(~inside, 0)
        return self.ids[at].masked_fill(~inside, -1)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rules of sampling that change logits as a function of the tokens before.

    repetition_penalty: of tokens that prompt or answer have already, logits above 0 are divided by it and others
    multiplied with it (Keskar et al. 2019, section 4.1, with the sign as in transformers and vLLM); 1 is none.
    barred_ids: have probability 0 where the batch field ``barred`` is 1 (an answer that may not end yet).
    """

    repetition_penalty: float = 1.0
    barred_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Batch:
    """Rows of equal padded length T.

    tokens ``int64 [B, T]``; lengths ``int64 [B]``; mask ``bool [B, T]``; group, prefix ``int64 [B]``; fields:
    ``float32 [B, T]``, ``[B]`` or ``[B, T, K]``; weights (set by the aggregation over the whole optimizer batch):
    ``float32 [B, T]`` for token objectives, ``[U]`` for unit ones. ``rows_per_unit``: 1, or 2 where rows are pairs,
    chosen then rejected; the rows of a unit stay together and in order. ``answers`` ``int64 [B]``: the place of each
    row's answer among all that were sampled for the batch, or of the row in its data; None where nobody asks. ``kept``:
    log-probabilities are over these sets; None: over the whole vocabulary. ``rules``: of the sampler, under which
    log-probabilities are.
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

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def unit_mask(self) -> Tensor:
        """``bool [U, T]``: the trained positions of each unit, in any of its rows."""
        return self.mask.unflatten(0, (-1, self.rows_per_unit)).any(dim=1)

    @property
    def trained_mask(self) -> Tensor:
        """``bool [B, T]``: the mask without the rows that are only divided by (``left_out``)."""
        if LEFT_OUT not in self.fields:
            return self.mask
        return self.mask & (self.fields[LEFT_OUT] == 0)[:, None]

    def field(self, name: str) -> Tensor:
        """Return the batch field ``name``; an objective that reads it lists it in its ``needs``."""
        assert name in self.fields, f"batch field {name!r} was not filled; there are {sorted(self.fields)}"
        return self.fields[name]

    def select(self, rows: Sequence[int]) -> Batch:
        """Return the given rows, in order, trimmed to their longest length; units must be whole."""
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
        return replace(
            self,
            answers=answers,
            kept=kept,
            tokens=pick(self.tokens),
            lengths=lengths,
            mask=pick(self.mask),
            group=self.group[index],
            prefix=self.prefix[index],
            fields={name: pick(x) for name, x in self.fields.items()},
            weights=weights,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device; float64 becomes float32 where the device has none."""
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
    """``x`` where it can be float64: as it is; from an Apple GPU (mps), which has no float64, on the CPU."""
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
    """The forward pass's results for an objective.

    logprobs ``float32 [B, T]``, zero where the mask is False; entropy ``float32 [B, T]`` of the distribution of each
    token (no gradient unless the objective asks for it). scores ``float32 [B, T]`` (``[B, T, C]`` for C classes): of a
    value head, the value of the state *before* token t; of a reward head, the score read *at* token t.
    candidate_logprobs ``float32 [B, T, K]`` of the tokens in the field ``teacher_ids``.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    scores: Tensor | None = None
    candidate_logprobs: Tensor | None = None


@dataclass(slots=True)
class Loss:
    """The values of an objective, which never reduces: ``[B, T]`` for token objectives, ``[U]`` for rows and pairs.

    metrics: tensors of the same shape, averaged over all trained tokens or units of the optimizer batch in float64.
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
    )


def _collate_kept(samples: Sequence[Sample], padded: Callable[..., Tensor]) -> KeptRows | None:
    """Return the sets of the rows; None if they have none."""
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
