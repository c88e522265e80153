"""Every registered objective with rows that it can read, for the tests that nothing depends on the split.

A new word is found in the registry and tried with its default options; ``OPTIONS`` is for words whose
defaults leave a branch out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config

from posttrain import registry
from posttrain.algorithms.objectives.surrogate import with_regularizers
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward
from posttrain.models.heads import ScalarHead
from posttrain.training.batch_fields import fillers
from posttrain.types import Batch, Sample, collate

VOCABULARY, WIDTH, CANDIDATES = 61, 16, 3
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sequence_mean": {},
    "constant": {"length": 12},
    "unit_mean": {},
}
REGULARIZED = {"kl_coef": 0.05, "entropy_coef": 0.1}
REGULARIZERS = ("kl_coef", "kl_estimator", "entropy_coef")
WIDE_CLIP = {"clip_low": 0.9, "clip_high": 5.0}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "reinforce": [REGULARIZED],
    "grpo": [REGULARIZED, {"kl_coef": 0.05, "kl_estimator": "k2"}],
    "gspo": [{}, WIDE_CLIP | REGULARIZED],
    "gspo_token": [WIDE_CLIP | REGULARIZED],
    "cispo": [REGULARIZED],
    "sapo": [REGULARIZED],
    "gmpo": [REGULARIZED],
    "ppo": [REGULARIZED, {"value_clip": None}],
    "dpo": [{"label_smoothing": 0.1}, {"length_normalized": True}],
    "ipo": [{}, {"length_normalized": True}],
    "cpo": [{}, {"nll_length_normalized": False}],
    "kto": [{"desirable_weight": 1.3}],
    "bradley_terry": [{}, {"margin": True, "centering": 0.01}],
    "outcome": [{}, {"positions": "last"}],
    "process": [{"num_classes": 2}, {"num_classes": 3}],
    "distillation": [{}, {"divergence": "forward_kl", "tail": False}, {"divergence": "jsd", "jsd_weight": 0.3}],
    "on_policy_distillation": [{}, {"clip": 0.2}],
    "sdpo": [{}, {"ratio_cap": None}],
}


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One row with streams per token (of the answer's tokens only), per row, and per candidate."""

    ids: list[int]
    mask: list[bool]
    group: int
    prefix: int
    token_fields: dict[str, list[float]] = field(default_factory=dict)
    row_fields: dict[str, float] = field(default_factory=dict)
    candidates: dict[str, torch.Tensor] = field(default_factory=dict)  # [answer tokens, K]


@dataclass(frozen=True, slots=True)
class Case:
    """An objective with options; ``shared``: its head shares the policy's trunk."""

    objective: str
    options: dict[str, Any]
    shared: bool = False
    with_correction: bool = False

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.options.items()]
        return "-".join([self.objective, *options, *(["shared"] if self.shared else [])])

    @property
    def entry(self) -> registry.Entry:
        return registry.find("objective", self.objective)

    @property
    def own_options(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key not in REGULARIZERS}

    def bind(self) -> Any:
        """The objective, with its regularizers where it has a policy term."""
        objective = self.entry.bind(self.own_options)
        regularizers = {key: value for key, value in self.options.items() if key in REGULARIZERS}
        assert self.entry.traits.get("policy_term") or not regularizers
        return with_regularizers(objective, **regularizers) if self.entry.traits.get("policy_term") else objective

    @property
    def level(self) -> str:
        return str(self.entry.traits["level"])

    @property
    def head(self) -> str | None:
        return self.entry.traits.get("head")

    @property
    def rows_per_unit(self) -> int:
        return 2 if self.level == "pair" else 1

    def corrected(self) -> Case:
        """The same with a stream ``correction``."""
        return replace(self, with_correction=True)

    def fields(self) -> set[str]:
        """Return the fields that the objective reads with these options, and those of all rollouts."""
        traits, options = self.entry.traits, self.entry.options(self.own_options)
        needs = set(traits["needs"])
        needs |= {stream for option, stream in traits.get("optional_needs", {}).items() if options[option]}
        needs |= {"ref_logprobs"} if self.options.get("kl_coef") else set()
        fillers(needs, "the case")  # refuses what nothing fills
        return needs | ({"correction"} if self.with_correction else set()) | {"sampler_logprobs"}

    def forward(self, model: Any, critic: Any) -> tuple[Forward | ActorCritic, list[torch.nn.Module]]:
        """A forward pass of these models with the head that is read, and the modules that get gradients."""
        if self.head is None:
            return Forward(model), [model]
        option = self.entry.traits.get("head_outputs")
        classes = 1 if option is None else self.options[option]
        # float64 in its weights too: their gradients are sums over micro-batches
        head = ScalarHead(WIDTH, 1 if classes <= 2 else classes, init_std=0.5, seed=3).double()
        if self.head == "score":
            return Forward(model, head=head, reads="at", scores_only=True), [model, head]
        if self.shared:
            return Forward(model, head=head), [model, head]
        return ActorCritic(Forward(model), Forward(critic, head=head, scores_only=True)), [model, critic, head]

    def rows(self) -> list[CaseRow]:
        """Three prompts with three rows each, or four pairs on three prompts."""
        generator = torch.Generator().manual_seed(5)
        needs, by_steps = self.fields(), "step_labels" in self.fields()
        units = [0, 0, 1, 2] if self.level == "pair" else [0, 0, 0, 1, 1, 1, 2, 2, 2]
        prompts = [draw_ids(2 + 2 * g, generator) for g in range(3)]
        rows = []
        for group in units:
            margin = float(torch.rand((), generator=generator))
            for _ in range(self.rows_per_unit):
                n = int(torch.randint(1, 8, (1,), generator=generator))
                trained = [True] * n
                if by_steps:  # ends of steps only, the last token among them
                    trained = (torch.rand(n, generator=generator) < 0.5).tolist()
                    trained[-1] = True
                prompt = prompts[group]
                row = CaseRow(prompt + draw_ids(n, generator), [False] * len(prompt) + trained, group, len(prompt))
                drawn = draw_fields(n, self.options.get("num_classes", 2), generator)
                drawn["rows"] |= {"margins": margin}
                row.token_fields.update({k: v for k, v in drawn["tokens"].items() if k in needs})
                row.row_fields.update({k: v for k, v in drawn["rows"].items() if k in needs})
                row.candidates.update({k: v for k, v in drawn["candidates"].items() if k in needs})
                rows.append(row)
        filled = rows[0].token_fields | rows[0].row_fields | rows[0].candidates
        assert needs == set(filled), "every stream is filled here"
        return rows


def draw_ids(n: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()


def draw_fields(n: int, num_classes: int, generator: torch.Generator) -> dict[str, dict[str, Any]]:
    """Numbers for every stream of a row with ``n`` answer tokens, of a size that keeps ratios moderate."""
    noise = torch.randn(8, n, generator=generator)
    logprobs = noise[:4] * 0.5 - 4.0
    candidate_logprobs = torch.randn(n, VOCABULARY, generator=generator).log_softmax(-1).topk(CANDIDATES)
    draw = torch.rand(3, generator=generator).tolist()
    return {
        "tokens": {
            "advantages": noise[4].tolist(),
            "returns": noise[5].tolist(),
            "old_values": (noise[6] * 0.3).tolist(),
            "old_logprobs": logprobs[0].tolist(),
            "ref_logprobs": logprobs[1].tolist(),
            "sampler_logprobs": logprobs[2].tolist(),
            "teacher_logprobs": logprobs[3].tolist(),
            "step_labels": torch.randint(0, num_classes, (n,), generator=generator).float().tolist(),
            "clip_cov_tokens": (noise[7] > 0.5).float().tolist(),
            "kl_cov_tokens": (noise[6] > 0.5).float().tolist(),
            "correction": (noise[7].exp().clamp(max=2.0) * (noise[7] > -1)).tolist(),
        },
        "rows": {
            "rewards": draw[0],
            "labels": float(draw[1] < 0.5),
            "has_feedback": float(draw[2] < 0.7),
            "kl_baseline": 0.3,
            "transport_shift": draw[0] - draw[1],
        },
        "candidates": {
            "teacher_ids": candidate_logprobs.indices,
            "teacher_candidate_logprobs": candidate_logprobs.values.double(),
        },
    }


def collated(rows: list[CaseRow], rows_per_unit: int) -> Batch:
    """The rows as one batch with float64 streams."""
    samples = []
    for row in rows:
        before = [0.0] * row.prefix
        fields: dict[str, Any] = {name: before + values for name, values in row.token_fields.items()}
        samples.append(Sample(row.ids, row.mask, row.group, row.prefix, fields | row.row_fields))
    batch = collate(samples, rows_per_unit=rows_per_unit)
    batch.fields = {name: x.double() for name, x in batch.fields.items()}
    for name, values in rows[0].candidates.items():
        stacked = torch.zeros((*batch.tokens.shape, CANDIDATES), dtype=values.dtype)
        for b, row in enumerate(rows):
            stacked[b, row.prefix : len(row.ids)] = row.candidates[name]
        batch.fields[name] = stacked
    return batch


def blank_row(like: CaseRow) -> CaseRow:
    """A long row with the streams of ``like`` and without a trained token."""
    n = 30
    return CaseRow(
        [1] * n,
        [False] * n,
        77,
        0,
        {name: [3.0] * n for name in like.token_fields},
        dict(like.row_fields),
        {name: x[:1].expand(n, -1) for name, x in like.candidates.items()},
    )


def shuffled(rows: list[CaseRow], rows_per_unit: int) -> list[CaseRow]:
    """The units in another order."""
    units = [rows[i : i + rows_per_unit] for i in range(0, len(rows), rows_per_unit)]
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(1)).tolist()
    assert order != sorted(order)
    return [row for i in order for row in units[i]]


def widened(batch: Batch, columns: int) -> Batch:
    """More padding, filled with what must not count."""

    def pad(x: torch.Tensor, value: float = 0) -> torch.Tensor:
        return F.pad(x, (0, 0) * (x.ndim - 2) + (0, columns), value=value)

    fields = {name: x if x.ndim == 1 else pad(x, 7) for name, x in batch.fields.items()}
    return replace(batch, tokens=pad(batch.tokens, 3), mask=pad(batch.mask), fields=fields)


def build_model(seed: int) -> Any:
    """GPT-2 in float64: its modules compute in the weights' own precision; RMSNorm families drop to fp32 inside."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def shipped_objectives() -> dict[str, registry.Entry]:
    """The words of the package; other tests register words of their own."""
    found = registry.entries("objective")
    return {name: entry for name, entry in found.items() if entry.function.__module__.startswith("posttrain.")}


def _cases() -> list[Case]:
    cases = []
    for name, entry in shipped_objectives().items():
        for options in OPTIONS.get(name, [{}]):
            cases.append(Case(name, options))
            if entry.traits.get("head") == "value":
                cases.append(Case(name, options, shared=True))
    return cases


CASES = _cases()
