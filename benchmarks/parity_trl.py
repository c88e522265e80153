"""Inputs of parity.py: random batches, and TRL's loss methods called with fakes.

Each function gives a callable from a draw to the loss that TRL computes from it. TRL's methods are called as they
are; only what surrounds them (trainer, model, accelerator) is replaced by the few attributes that they read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PAIRS, ANSWER_TOKENS, VOCAB = 4, 8, 6
MAIN, MISMATCHED = 1, 2  # the ids that rows are made of: the model tells by them which answers it scores


@dataclass(frozen=True)
class Draw:
    """Random inputs ``[B, T]``; rows alternate chosen, rejected. ``logits`` and ``teacher_logits`` ``[B, T, V]``."""

    mask: Tensor
    real: Tensor
    advantages: Tensor  # [B]
    labels: Tensor  # [B], both kinds
    margins: Tensor  # [B]
    ref_logprobs: Tensor
    old_logprobs: Tensor
    mismatched: Tensor
    mismatched_ref: Tensor
    logprobs: Tensor
    entropy: Tensor
    scores: Tensor
    logits: Tensor
    teacher_logits: Tensor

    def rows(self, index: Tensor) -> Draw:
        return Draw(**{name: value[index] for name, value in vars(self).items()})

    def pairs(self) -> Iterator[Draw]:
        for first in range(0, len(self.mask), 2):
            yield self.rows(torch.tensor([first, first + 1]))

    def chosen_then_rejected(self) -> Draw:
        """TRL's order of the rows of pairs."""
        return self.rows(torch.cat([torch.arange(0, len(self.mask), 2), torch.arange(1, len(self.mask), 2)]))

    def leaves(self) -> list[Tensor]:
        return [self.logprobs, self.entropy, self.scores, self.logits]


Baseline = Callable[[Draw], Tensor]


def make_draw(seed: int, prompt_tokens: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    rows, width = 2 * PAIRS, prompt_tokens + ANSWER_TOKENS
    lengths = prompt_tokens + torch.randint(1, ANSWER_TOKENS + 1, (rows,), generator=generator)
    lengths[0] = width
    at = torch.arange(width)
    real = at < lengths[:, None]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -normal(rows, width).abs() - 0.02
    mismatched = -normal(rows, width).abs() - 0.02
    drawn = {
        "advantages": normal(rows),
        "labels": (torch.randperm(rows, generator=generator) < PAIRS + 1).double(),
        "margins": normal(PAIRS).repeat_interleave(2),
        "ref_logprobs": logprobs + 0.5 * normal(rows, width),
        "old_logprobs": logprobs + 0.5 * normal(rows, width),
        "mismatched": mismatched,
        "mismatched_ref": mismatched + 0.5 * normal(rows, width),
        "teacher_logits": normal(rows, width, VOCAB),
    }
    entropy = normal(rows, width).abs().float().double()  # TRL takes their quantile in float32
    leaves = {"logprobs": logprobs, "entropy": entropy, "scores": normal(rows, width)}
    leaves["logits"] = normal(rows, width, VOCAB)
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    return Draw(mask=real & (at >= prompt_tokens), real=real, **drawn, **leaves)


class Model(torch.nn.Module):
    """Fake of a language model for TRL: log-probabilities of labels, or logits of two tokens that give them."""

    is_gradient_checkpointing = False

    def __init__(self, main: Tensor, mismatched: Tensor) -> None:
        super().__init__()
        self.eval()
        self.logprobs = {MAIN: main, MISMATCHED: mismatched}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        logprobs = self.logprobs[int(input_ids.flatten()[0])]
        if labels is None:
            following = torch.stack([torch.log(-torch.expm1(logprobs)), logprobs], dim=-1)  # of the tokens 0 and MAIN
            return SimpleNamespace(logits=torch.cat([following[:, 1:], following[:, :1]], dim=1))
        trained = labels[:, 1:] != -100
        zeros = torch.zeros_like(logprobs[:, 1:])
        picked = torch.where(trained, logprobs[:, 1:], zeros)
        return SimpleNamespace(log_probs=picked, entropy=zeros, mean_logits=zeros, is_top1=trained)


def fake_trainer(**settings: Any) -> SimpleNamespace:
    """A trainer, as far as TRL's loss methods look at it: one process, evaluation, nothing optional."""

    def same(x: Any, *_: Any, **__: Any) -> Any:
        return x

    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather=same,
        gather_for_metrics=same,
        pad_across_processes=same,
        reduce=same,
        unwrap_model=same,
        autocast=nullcontext,
    )
    common = {
        "model": SimpleNamespace(training=False),
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
    }
    common |= {"_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}}
    return SimpleNamespace(**(common | settings))


def ids(draw: Draw, token: int = MAIN) -> Tensor:
    return torch.full(draw.mask.shape, token)


def dpo_trainer(losses: dict[str, float], beta: float, label_smoothing: float = 0.0, **more: Any) -> Baseline:
    """``more``: settings of the trainer in place of the usual ones."""

    def theirs(draw: Draw) -> Tensor:
        from trl import DPOTrainer

        draw = draw.chosen_then_rejected()
        settings: dict[str, Any] = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5}
        trainer = fake_trainer(
            **settings | more,
            precompute_ref_logps=False,
            use_weighting=False,
            loss_types=list(losses),
            loss_weights=list(losses.values()),
            beta=beta,
            label_smoothing=label_smoothing,
            ref_model=Model(draw.ref_logprobs, draw.mismatched_ref),
            args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        )
        trainer.model = Model(draw.logprobs, draw.mismatched)
        inputs = {"input_ids": ids(draw), "attention_mask": draw.real.long(), "completion_mask": draw.mask.long()}
        return DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)

    return theirs


def kto_trainer(beta: float, desirable: float, undesirable: float) -> Baseline:
    def theirs(draw: Draw) -> Tensor:
        from trl import KTOTrainer

        trainer = fake_trainer(
            calculate_KL=True,
            precompute_ref_logps=False,
            loss_type="kto",
            beta=beta,
            desirable_weight=desirable,
            undesirable_weight=undesirable,
            ref_model=Model(draw.ref_logprobs, draw.mismatched_ref),
            args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        )
        trainer.model = Model(draw.logprobs, draw.mismatched)
        trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
        masks = {"attention_mask": draw.real.long(), "completion_mask": draw.mask.long()}
        inputs = {"input_ids": ids(draw), "label": draw.labels.bool(), **masks}
        inputs |= {"KL_input_ids": ids(draw, MISMATCHED)} | {f"KL_{name}": mask for name, mask in masks.items()}
        return KTOTrainer._compute_loss(trainer, trainer.model, inputs, False)

    return theirs


def pair_trainer(name: str, **settings: Any) -> Baseline:
    """CPOTrainer or ORPOTrainer: they take logits, and the prompt with label −100."""

    def theirs(draw: Draw) -> Tensor:
        from trl.experimental import cpo, orpo

        trainer_class: Any = {"CPOTrainer": cpo.CPOTrainer, "ORPOTrainer": orpo.ORPOTrainer}[name]
        ordered = draw.chosen_then_rejected()
        trainer = fake_trainer(is_encoder_decoder=False, pad_token_id=0, padding_value=0, **settings)
        for method in ("concatenated_inputs", "get_batch_logps"):
            setattr(trainer, method, getattr(trainer_class, method))
        for method in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
            if hasattr(trainer_class, method):
                setattr(trainer, method, getattr(trainer_class, method).__get__(trainer))
        half, batch = len(draw.mask) // 2, {}
        for side, rows in (("chosen", slice(None, half)), ("rejected", slice(half, None))):
            batch[f"{side}_input_ids"] = ids(draw)[rows]
            batch[f"{side}_attention_mask"] = ordered.real[rows].long()
            batch[f"{side}_labels"] = ids(draw)[rows].masked_fill(~ordered.mask[rows], -100)
        return trainer_class.get_batch_loss_metrics(trainer, Model(ordered.logprobs, ordered.mismatched), batch)[0]

    return theirs


@dataclass(frozen=True)
class PolicyTrainer:
    """GRPOTrainer's settings as far as its loss reads them; the defaults are TRL's but for no optional term."""

    loss_type: str
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    entropy_coef: float = 0.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    importance_sampling_level: str = "token"
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    max_completion_length: int = 32
    kind: str = "GRPOTrainer"

    def __call__(self, draw: Draw) -> Tensor:
        import trl
        from trl.experimental.gmpo import GMPOTrainer

        classes: Any = {"GRPOTrainer": trl.GRPOTrainer, "RLOOTrainer": trl.RLOOTrainer, "GMPOTrainer": GMPOTrainer}
        first = int(draw.mask[0].long().argmax())
        answer, old = draw.mask[:, first:].long(), draw.old_logprobs[:, first:]
        scored = torch.where(draw.mask, draw.logprobs, torch.zeros_like(draw.logprobs))[:, first:]
        options = SimpleNamespace(delta=self.delta, use_bias_correction_kl=self.use_bias_correction_kl)
        options.sapo_temperature_pos, options.sapo_temperature_neg = 1.0, 1.05
        entropy_mask = partial(trl.GRPOTrainer.get_high_entropy_mask, fake_trainer())
        trainer = fake_trainer(
            **vars(self),
            args=options,
            get_high_entropy_mask=entropy_mask,
            get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
            use_vllm=False,
            use_adaptive_entropy=False,
            _entropy_bonus_enabled=self.entropy_coef != 0.0,
            _get_per_token_logps_and_entropies=lambda *_, **__: (scored, draw.entropy[:, first:], None),
        )
        inputs = {
            "prompt_ids": ids(draw)[:, :first],
            "prompt_mask": draw.real[:, :first].long(),
            "completion_ids": ids(draw)[:, first:],
            "completion_mask": answer,
            "advantages": draw.advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": draw.ref_logprobs[:, first:],
            "num_items_in_batch": answer.sum(),
            "old_logps": scored.detach().sum(dim=1),
        }
        return classes[self.kind]._compute_loss(trainer, trainer.model, inputs)


def reward_trainer(center: float | None, margin: bool = False) -> Baseline:
    def theirs(draw: Draw) -> Tensor:
        from trl import RewardTrainer

        draw = draw.chosen_then_rejected()
        last = draw.scores.gather(1, draw.real.sum(dim=1, keepdim=True) - 1)
        trainer = fake_trainer(args=SimpleNamespace(center_rewards_coefficient=center))
        inputs = {"input_ids": ids(draw), "attention_mask": draw.real.long()}
        if margin:
            inputs["margin"] = draw.margins[: len(draw.margins) // 2]
        return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=last), inputs)

    return theirs


def distillation_trainer(beta: float) -> Baseline:
    def theirs(draw: Draw) -> Tensor:
        from trl.experimental.gkd import GKDTrainer

        labels = ids(draw).masked_fill(~draw.mask, -100)
        return GKDTrainer.generalized_jsd_loss(draw.logits, draw.teacher_logits, labels=labels, beta=beta)

    return theirs


def self_distillation_trainer(mode: str, alpha: float, candidates: int | None = None, tail: bool = False) -> Baseline:
    """SDPOTrainer; rows with label 1 are those that have feedback."""

    def theirs(draw: Draw) -> Tensor:
        from trl.experimental.sdpo import SDPOTrainer

        options = SimpleNamespace(distillation_mode=mode, distillation_alpha=alpha, distillation_is_clip=None)
        if mode == "topk_logits":
            options.distillation_topk, options.distillation_add_tail, options.distillation_is_clip = (
                candidates,
                tail,
                2.0,
            )
        trained = draw.mask.long() * (draw.labels[:, None].long() if mode == "topk_logits" else 1)
        logits = SimpleNamespace(student_logits=draw.logits, teacher_logits=draw.teacher_logits)
        logits.completion_ids, logits.completion_mask, logits.loss_mask = ids(draw), draw.mask.long(), trained
        trainer = fake_trainer(args=options, _log_self_distillation_metric=lambda *_: None)
        inputs = {"old_per_token_logps": draw.old_logprobs}
        return SDPOTrainer._compute_self_distillation_loss(trainer, trainer.model, inputs, logits)

    return theirs
