"""Our objectives next to TRL's own loss code, on the same random log-probabilities: equal, or where and why not.

    python benchmarks/parity.py                # every word that both have, 10 seeds
    python benchmarks/parity.py --word grpo    # one word; writes no result

TRL's methods are called as they are, with a stand-in for the trainer and for the model: what they compute from
log-probabilities is theirs, where these come from is ours. In float64 (TRL's ORPO casts to float32), rows of
unequal length, prompts of 3 tokens. Compared are the loss of the batch and its gradient with respect to every
log-probability (score, logit, entropy), the prompt's included; given is the largest absolute difference over all
seeds. A row marked "one pair per call" is the mean of TRL's losses of single pairs. The reasons for differences
are written here by hand; that there is one, or none, is measured, and the script fails where it is not as written.

Not compared, since TRL has no code for them or only inside of a training run: PPO, MaxRL, REINFORCE++, outcome and
process reward models, the advantages, the corrections of the sampler; the α-divergence of f_dpo, which TRL computes in
at most 32 bits. Writes results/parity.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from parity_trl import (
    MAIN,
    VOCAB,
    Baseline,
    Draw,
    PolicyTrainer,
    distillation_trainer,
    dpo_trainer,
    kto_trainer,
    make_draw,
    pair_trainer,
    reward_trainer,
    self_distillation_trainer,
)
from torch import Tensor

from posttrain.algorithms.masks import shift_by_rank
from posttrain.algorithms.objectives.surrogate import with_regularizers
from posttrain.registry import find
from posttrain.types import Batch, Outputs

RESULTS = Path(__file__).parent / "results" / "parity.json"


@dataclass(frozen=True)
class Case:
    """One of our words with options, and the call of TRL that it is held against.

    ``masks``: those of the recipe, as (name, options). ``differs``: why it does, if it does. ``gradient_only``: the
    loss's value means nothing. ``on_policy``: the behaviour policy is the current one. ``candidates``: how many of the
    student's likeliest tokens are compared.
    """

    word: str
    options: dict[str, Any]
    aggregate: tuple[str, dict[str, Any]]
    baseline: str
    settings: str
    theirs: Baseline
    one_by_one: bool = False
    prompt_tokens: int = 3
    gradient_only: bool = False
    on_policy: bool = False
    candidates: int = VOCAB
    tolerance: float = 1e-10
    differs: str = ""
    masks: tuple[tuple[str, dict[str, Any]], ...] = ()


def our_inputs(case: Case, draw: Draw, rows_per_unit: int) -> tuple[Outputs, Batch]:
    zeros = torch.zeros_like(draw.logprobs)
    mismatched = torch.where(draw.mask, draw.mismatched - draw.mismatched_ref, zeros).sum(dim=1)
    student, teacher = draw.logits.log_softmax(dim=-1), draw.teacher_logits.log_softmax(dim=-1)
    likeliest = student.topk(case.candidates).indices
    is_distilled = "distillation" in case.word or case.word == "sdpo"
    logprobs = torch.where(draw.mask, student[..., MAIN] if is_distilled else draw.logprobs, zeros)
    fields = {
        "advantages": draw.advantages[:, None].expand_as(zeros),
        "labels": draw.labels,
        "has_feedback": draw.labels,
        "margins": draw.margins,
        "ref_logprobs": draw.ref_logprobs,
        "old_logprobs": logprobs.detach() if case.on_policy else draw.old_logprobs,
        "kl_baseline": mismatched.mean().clamp(min=0).expand(len(zeros)),
        "teacher_logprobs": teacher[..., MAIN],
        "teacher_candidate_logprobs": teacher.gather(2, likeliest),
        "transport_shift": transport_shift(logprobs.detach(), draw),
    }
    none = torch.zeros(len(zeros), dtype=torch.long)
    batch = Batch(zeros.long(), draw.real.sum(dim=1), draw.mask, none, none, fields, rows_per_unit=rows_per_unit)
    return Outputs(logprobs, draw.entropy, draw.scores, student.gather(2, likeliest)), batch


def transport_shift(logprobs: Tensor, draw: Draw) -> Tensor:
    """The field of ``aot``, ``[B]``, as the trainer fills it before an update."""
    zeros = torch.zeros_like(logprobs)
    policy, reference = (torch.where(draw.mask, x, zeros).sum(dim=1) for x in (logprobs, draw.ref_logprobs))
    shift = shift_by_rank(policy[0::2] - policy[1::2], reference[0::2] - reference[1::2])
    return shift.repeat_interleave(2)


def unmasked(case: Case, outputs: Outputs, batch: Batch) -> Tensor:
    """Tokens ``[B, T]`` that keep the policy's term under the masks of a case; the sampler is the old policy."""
    assert outputs.entropy is not None
    fields = {
        "policy_logprobs": outputs.logprobs.detach(),
        "policy_entropy": outputs.entropy.detach(),
        "sampler_logprobs": batch.field("old_logprobs"),
        "advantages": batch.field("advantages"),
        "mask": batch.mask,
    }
    kept = torch.ones_like(batch.mask)
    for name, options in case.masks:
        mask = find("mask", name).bind(options)
        kept &= mask(**{field: fields[field] for field in inspect.signature(mask).parameters if field in fields})
    return kept


def our_loss(case: Case, draw: Draw) -> Tensor:
    """Objective × aggregation, as the training loop multiplies them."""
    entry = find("objective", case.word)
    outputs, batch = our_inputs(case, draw, rows_per_unit=2 if entry.traits["level"] == "pair" else 1)
    regularizers = {key: value for key, value in case.options.items() if key in REGULARIZERS}
    objective = entry.bind({key: value for key, value in case.options.items() if key not in regularizers})
    values = (
        with_regularizers(objective, **regularizers)(outputs, batch).values
        if regularizers
        else objective(outputs, batch).values
    )
    name, options = case.aggregate
    weights = find("aggregation", name).bind(options)(
        batch.mask if entry.traits["level"] == "token" else batch.unit_mask
    )
    if case.masks:
        values = values * unmasked(case, outputs, batch)
    return (torch.where(weights > 0, values, torch.zeros_like(values)) * weights).sum()


REGULARIZERS = ("kl_coef", "kl_estimator", "entropy_coef")  # arguments of ``with_regularizers``
UNITS: tuple[str, dict[str, Any]] = ("unit_mean", {})
SEQUENCES: tuple[str, dict[str, Any]] = ("sequence_mean", {})
TOKENS: tuple[str, dict[str, Any]] = ("token_mean", {})
BATCH_NLL = "its likelihood term is a mean over all tokens of the batch; ours is the mean of each answer's own"


def paired_cases() -> Iterator[Case]:
    """Pairs with a reference."""

    def dpo(word: str, options: dict[str, Any], losses: dict[str, float], smoothing: float = 0.0, **more: Any) -> Case:
        baseline = f"DPOTrainer {' + '.join(losses)}"
        trainer = more.pop("trainer", {})
        settings = f"beta {options['beta']}" + (f", label_smoothing {smoothing}" if smoothing else "")
        settings += "".join(f", {name} {value}" for name, value in trainer.items())
        settings += f", loss_weights {list(losses.values())}" if len(losses) > 1 else ""
        settings += ", one pair per call" if more.get("one_by_one") else ""
        theirs = dpo_trainer(losses, options["beta"], smoothing, **trainer)
        return Case(word, options, UNITS, baseline, settings, theirs, **more)

    ignored = "it ignores label_smoothing for sigmoid, so this is plain DPO; ours is cDPO, see the row below"
    summed = (
        "it takes means per token (on the word of IPO's authors); ours is eq. 17 as printed, sums; see the row below"
    )
    yield dpo("dpo", {"beta": 0.5}, {"sigmoid": 1.0})
    yield dpo("dpo", {"beta": 0.5, "label_smoothing": 0.1}, {"sigmoid": 1.0}, 0.1, differs=ignored)
    yield dpo("dpo", {"beta": 0.5, "label_smoothing": 0.1}, {"aot": 1.0}, 0.1, one_by_one=True)
    yield dpo("aot", {"beta": 0.5}, {"aot": 1.0})
    yield dpo("aot", {"beta": 0.5, "label_smoothing": 0.1}, {"aot": 1.0}, 0.1)
    yield dpo("dpo", {"beta": 2.0, "length_normalized": True}, {"sigmoid_norm": 1.0})
    yield dpo("robust_dpo", {"beta": 0.5, "flip_rate": 0.1}, {"robust": 1.0}, 0.1)
    yield dpo("ipo", {"beta": 0.5}, {"ipo": 1.0}, differs=summed)
    yield dpo("ipo", {"beta": 0.5, "length_normalized": True}, {"ipo": 1.0})
    yield dpo("hinge", {"beta": 0.5}, {"hinge": 1.0})
    yield dpo("exo", {"beta": 0.5, "label_smoothing": 1e-3}, {"exo_pair": 1.0}, 1e-3)
    yield dpo("nca", {"beta": 0.5}, {"nca_pair": 1.0})
    yield dpo("apo_zero", {"beta": 0.5}, {"apo_zero": 1.0})
    yield dpo("apo_down", {"beta": 0.5}, {"apo_down": 1.0})
    yield dpo("sppo", {"beta": 0.5}, {"sppo_hard": 1.0})
    yield dpo("bco", {"beta": 0.5}, {"bco_pair": 1.0})
    yield dpo("discopop", {"beta": 0.05}, {"discopop": 1.0})
    for ours, theirs in (("forward_kl", "forward_kl"), ("jensen_shannon", "js_divergence")):
        chosen = {"f_divergence_type": theirs}
        yield dpo("f_dpo", {"beta": 0.5, "divergence": ours}, {"sigmoid": 1.0}, trainer=chosen)
    yield dpo("ld_dpo", {"beta": 0.5, "alpha": 0.3}, {"sigmoid": 1.0}, trainer={"ld_alpha": 0.3})
    mixed = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    yield dpo("mpo", {"beta": 0.5}, mixed, one_by_one=True)
    with_nll, weighted = {"beta": 0.5, "nll_weight": 0.7}, {"sigmoid": 1.0, "sft": 0.7}
    yield dpo("rpo", with_nll, weighted, one_by_one=True)
    yield dpo("rpo", with_nll, weighted, differs=f"{BATCH_NLL}, as in the paper")
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    shown = "beta 0.5, weights 1.3 and 0.7"
    yield Case("kto", {"beta": 0.5, **weights}, UNITS, "KTOTrainer kto", shown, kto_trainer(0.5, 1.3, 0.7))


def reference_free_cases() -> Iterator[Case]:
    """Pairs without a reference, and scores."""
    common = {"label_smoothing": 0.0, "alpha": 0.0}
    simpo = pair_trainer("CPOTrainer", loss_type="simpo", beta=2.0, simpo_gamma=0.6, cpo_alpha=0.0, **common)
    settings = "beta 2, simpo_gamma 0.6, cpo_alpha 0"
    yield Case("simpo", {"beta": 2.0, "gamma": 0.6}, UNITS, "CPOTrainer simpo", settings, simpo)
    cpo = pair_trainer("CPOTrainer", loss_type="sigmoid", beta=0.5, cpo_alpha=0.7, **common)
    of_cpo = ("cpo", {"beta": 0.5, "nll_weight": 0.7}, UNITS, "CPOTrainer sigmoid")
    printed = f"{BATCH_NLL}; the paper prints the sum (nll_length_normalized: false)"
    yield Case(*of_cpo, "beta 0.5, cpo_alpha 0.7, one pair per call", cpo, one_by_one=True)
    yield Case(*of_cpo, "beta 0.5, cpo_alpha 0.7", cpo, differs=printed)
    orpo = pair_trainer("ORPOTrainer", beta=0.3)
    of_orpo = ("orpo", {"odds_weight": 0.3}, UNITS, "ORPOTrainer")
    alone = "beta 0.3, one pair per call, prompts of one token"
    prompted = (
        "its likelihood term includes the prompt's tokens (as the authors' code does unless told otherwise); ours is "
        "that of the answer given the prompt, as in the paper"
    )
    both = "as above, and its likelihood term is a mean over all tokens of the batch, not of each answer"
    yield Case(*of_orpo, alone, orpo, one_by_one=True, prompt_tokens=1, tolerance=1e-5)
    yield Case(*of_orpo, "beta 0.3, one pair per call", orpo, one_by_one=True, tolerance=1e-5, differs=prompted)
    yield Case(*of_orpo, "beta 0.3", orpo, tolerance=1e-5, differs=both)
    yield Case("bradley_terry", {}, UNITS, "RewardTrainer", "defaults", reward_trainer(None))
    shown, of_reward = "center_rewards_coefficient 0.01", (UNITS, "RewardTrainer")
    yield Case("bradley_terry", {"centering": 0.01}, *of_reward, shown, reward_trainer(0.01))
    options = {"margin": True, "centering": 0.01}
    yield Case("bradley_terry", options, *of_reward, f"{shown}, margin", reward_trainer(0.01, margin=True))


def distillation_cases() -> Iterator[Case]:
    for name, beta in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)):
        divergence = {"divergence": name} | ({"jsd_weight": beta} if name == "jsd" else {})
        theirs = distillation_trainer(beta)
        yield Case("distillation", divergence, TOKENS, "GKDTrainer", f"beta {beta}, whole vocabulary", theirs)
        for tail in (True, False):
            settings = f"distillation_topk 3, distillation_alpha {beta}" + (", distillation_add_tail" if tail else "")
            theirs = self_distillation_trainer("topk_logits", beta, 3, tail)
            options = divergence | {"tail": tail}
            yield Case("sdpo", options, SEQUENCES, "SDPOTrainer topk_logits", settings, theirs, candidates=3)
    sampled = self_distillation_trainer("sampled_token", 1.0)
    of_sdpo = ("SDPOTrainer sampled_token", "on policy, feedback for every row", sampled)
    yield Case("on_policy_distillation", {}, SEQUENCES, *of_sdpo, gradient_only=True, on_policy=True)


def policy_cases() -> Iterator[Case]:
    def grpo(word: str, options: dict[str, Any], aggregate: Any, settings: str, **more: Any) -> Case:
        """``settings`` as in TRL's configuration, ``loss_type`` first."""
        kind, differs = more.pop("kind", "GRPOTrainer"), more.pop("differs", "")
        gradient_only = more.pop("gradient_only", False)
        masks = more.pop("masks", ())
        theirs = PolicyTrainer(settings.split(",")[0], kind=kind, **more)
        baseline = kind if settings.startswith("default") else f"{kind} {theirs.loss_type}"
        shown = ", ".join(f"{name} {value}" for name, value in more.items()) or "defaults"
        kept: dict[str, Any] = {"gradient_only": gradient_only, "differs": differs, "masks": masks}
        return Case(word, options, aggregate, baseline, shown, theirs, **kept)

    fixed = ("constant", {"length": 32})
    loose = {"clip_high": 0.28}
    per_token = "its entropy bonus is a mean over tokens whatever weighs the loss; ours has the weights of the loss"
    capped = (
        "its epsilon_high is the cap itself (ScaleRL's ε_max), so that with its default of 0.2 no token weighs more "
        "than 0.2; ours is MiniMax-M1's, where the cap is 1 + ε; see the row above"
    )
    yield grpo("grpo", {}, SEQUENCES, "grpo")
    yield grpo("grpo", {"kl_coef": 0.3}, SEQUENCES, "grpo", beta=0.3)
    yield grpo("grpo", loose, TOKENS, "dapo", epsilon_high=0.28)
    yield grpo("grpo", loose, TOKENS, "bnpo", epsilon_high=0.28)
    yield grpo("grpo", {}, fixed, "dr_grpo", max_completion_length=32)
    yield grpo("grpo", {"entropy_coef": 0.2}, TOKENS, "dapo", entropy_coef=0.2)
    yield grpo("grpo", {"entropy_coef": 0.2}, SEQUENCES, "grpo", entropy_coef=0.2, differs=per_token)
    yield grpo("grpo", {"clip_max": 1.5}, SEQUENCES, "grpo", delta=1.5)
    yield grpo(
        "grpo",
        {"kl_coef": 0.3, "kl_estimator": "k3_weighted"},
        SEQUENCES,
        "grpo",
        beta=0.3,
        use_bias_correction_kl=True,
    )
    uncertain = (("top_entropy", {"share": 0.2}),)
    yield grpo("grpo", {}, TOKENS, "dapo", masks=uncertain, top_entropy_quantile=0.2)
    unlikely = (("off_policy_sequence", {"threshold": 0.05}),)
    yield grpo("grpo", {}, SEQUENCES, "grpo", masks=unlikely, off_policy_mask_threshold=0.05)
    narrow = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    yield grpo("gspo", {}, SEQUENCES, "grpo", **narrow)
    yield grpo("gspo", {"kl_coef": 0.3}, SEQUENCES, "grpo", beta=0.3, **narrow)
    yield grpo("gspo_token", {}, SEQUENCES, "grpo", **narrow)
    yield grpo("cispo", {"clip_high": 0.4}, TOKENS, "cispo", epsilon_high=1.4)
    yield grpo("cispo", {"clip_high": 0.2}, TOKENS, "cispo", differs=capped)
    yield grpo("sapo", {}, SEQUENCES, "sapo")
    yield grpo("gmpo", {}, SEQUENCES, "default", kind="GMPOTrainer", epsilon_low=0.4, epsilon_high=0.4)
    first = grpo("reinforce", {}, ("constant", {"length": 1}), "default", kind="RLOOTrainer", gradient_only=True)
    yield replace(first, settings="on policy")


def all_cases() -> list[Case]:
    return [*paired_cases(), *reference_free_cases(), *distillation_cases(), *policy_cases()]


def largest(values: list[Tensor]) -> float:
    return max(float(x.detach().abs().max()) for x in values)


def compare(case: Case, seeds: int) -> dict[str, Any]:
    """The row of the table: differences over all seeds, and whether they are as written."""
    values: list[Tensor] = []
    gradients: list[Tensor] = []
    sizes: list[Tensor] = []
    for seed in range(seeds):
        draw = make_draw(seed, case.prompt_tokens)
        calls = list(draw.pairs()) if case.one_by_one else [draw]
        ours, theirs = our_loss(case, draw), torch.stack([case.theirs(call) for call in calls]).mean()
        ours_by, theirs_by = (
            torch.autograd.grad(loss, draw.leaves(), allow_unused=True, materialize_grads=True)
            for loss in (ours, theirs)
        )
        values.append(ours - theirs)
        gradients += [a - b for a, b in zip(ours_by, theirs_by, strict=True)]
        sizes += ours_by
    by_value, by_gradient, size = largest(values), largest(gradients), largest(sizes)
    equal = by_gradient <= case.tolerance and (case.gradient_only or by_value <= case.tolerance)
    return {
        "word": case.word,
        "options": case.options,
        "aggregate": {"name": case.aggregate[0], **case.aggregate[1]},
        "masks": [{"name": name, **options} for name, options in case.masks],
        "peer": case.baseline,
        "settings": case.settings,
        "values": None if case.gradient_only else by_value,
        "gradients": by_gradient,
        "largest_gradient": size,
        "tolerance": case.tolerance,
        "verdict": "equal" if equal else f"differs: {case.differs or 'nobody knows why yet'}",
        "as_written": equal == (not case.differs) and size > 1e-3,
    }


def print_row(row: dict[str, Any]) -> None:
    options = ", ".join(f"{name} {value}" for name, value in row["options"].items())
    aggregate = " ".join(str(value) for value in row["aggregate"].values())
    ours = row["word"] + (f" ({options})" if options else "") + ("" if aggregate == "unit_mean" else f", {aggregate}")
    ours += "".join(f", mask {mask['name']}" for mask in row["masks"])
    values = "-" if row["values"] is None else f"{row['values']:.1e}"
    print(f"{ours:<70}{values:>9}{row['gradients']:>11.1e}  {row['verdict'][:7]}")
    print(f"    {row['peer']}: {row['settings']}")
    if not row["as_written"]:
        print("    NOT AS WRITTEN")
    if row["verdict"] != "equal":
        print(textwrap.fill(row["verdict"], 110, initial_indent="    ", subsequent_indent="    "))


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold our objectives against TRL's loss code.")
    parser.add_argument("--word", help="only this one")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed; pip install -e '.[bench]'")
    torch.set_default_dtype(torch.float64)  # TRL makes its constants in the default precision
    cases = all_cases()
    words = sorted({case.word for case in cases})
    if arguments.word not in (None, *words):
        parser.error(f"--word {arguments.word}: TRL is compared with {', '.join(words)}")
    rows = []
    print(f"{'ours, and below it TRL ' + version('trl'):<70}{'values':>9}{'gradients':>11}")
    for case in cases:
        if arguments.word in (None, case.word):
            rows.append(compare(case, arguments.seeds))
            print_row(rows[-1])
    wrong = [row for row in rows if not row["as_written"]]
    if arguments.word is None:
        versions = {name: version(name) for name in ("trl", "transformers", "torch")}
        content = {"machine": platform.platform(), "versions": versions, "seeds": arguments.seeds, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    equal = sum(row["verdict"] == "equal" for row in rows)
    print(f"\n{equal} of {len(rows)} equal, the others differ " + ("NOT ALL as written" if wrong else "as written"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
