"""The influence of each prompt of a GRPO step on held-out answers: exact, and by gradients.

The exact influence of a prompt is the held-out log-probability after the step, minus that after the same step without
the prompt: every future begins with the same weights, optimizer state and answers, which only an exact replay gives.
Next to it stands TracIn's score (Pruthi et al. 2020, arXiv 2002.08484, section 3.3, for one checkpoint): the learning
rate times the dot product of the gradients of the prompt's loss and of the held-out loss.

    posttrain train tiny/grpo --train.steps 40 --train.save_every 10 --train.keep_checkpoints 4 --run base
    python examples/influence_of_prompts.py runs/base --at 10
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import posttrain as pt
from posttrain.api.run import Run
from posttrain.api.what_if import WhatIf
from posttrain.store.rollouts import RecordedRollout

Rows = Sequence[RecordedRollout]
ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Influence:
    """One prompt: its text, the mean of its rewards, and both influences in nats per held-out token."""

    prompt: str
    reward: float
    exact: float
    tracin: float


def token_logprobs(model: PreTrainedModel, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token of the completions of ``rows``, and the number of its row."""
    values, owners = [], []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows[start : start + ROWS_AT_ONCE]
        width = max(len(row.token_ids) for row in chunk)
        tokens = torch.tensor([[*row.token_ids, *[0] * (width - len(row.token_ids))] for row in chunk])
        lengths = torch.tensor([len(row.token_ids) for row in chunk])
        counts = torch.tensor([row.num_tokens for row in chunk])
        places = torch.arange(width)
        mask = (places < lengths[:, None]) & (places >= (lengths - counts)[:, None])
        logits = model(input_ids=tokens, attention_mask=(places < lengths[:, None]).long()).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        values.append(logprobs[mask[:, 1:]])
        owners.append(start + torch.arange(len(chunk))[:, None].expand(mask.shape)[mask])
    return torch.cat(values), torch.cat(owners)


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a checkpoint in float64 (its norms round to fp32): the influence of one prompt is small."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def mean_logprob(model: PreTrainedModel, rows: Rows) -> float:
    """Return the mean log-probability of a token of the completions, in nats."""
    with torch.no_grad():
        return float(token_logprobs(model, rows)[0].mean())


def gradient_of(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """Return the gradient of a loss by all parameters as one vector."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def tracin_scores(model: PreTrainedModel, groups: Sequence[Rows], held_out: Rows, lr: float) -> list[float]:
    """Return ``lr · ∇loss(held-out) · ∇loss(prompt)`` at the weights that sampled, for each prompt of the step.

    The loss of a prompt is its part of the step's: GRPO's on the policy, ``−A log π`` over all tokens of the step.
    """
    of_held_out = gradient_of(model, -token_logprobs(model, held_out)[0].mean())
    num_tokens = sum(row.num_tokens for group in groups for row in group)
    scores = []
    for group in groups:
        logprobs, owners = token_logprobs(model, group)
        advantages = torch.tensor([row.advantage for row in group], dtype=logprobs.dtype)
        loss = -(advantages[owners] * logprobs).sum() / num_tokens
        scores.append(lr * float(gradient_of(model, loss) @ of_held_out))
    return scores


def pearson(xs: list[float], ys: list[float]) -> float:
    """Return the correlation of two lists; NaN where one of them does not vary."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (xs, ys))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal ones share the mean of theirs."""
    return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def fisher_interval(r: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a correlation of n pairs, by Fisher's z."""
    if n < 4 or not abs(r) < 1:
        return math.nan, math.nan
    half = 1.96 / math.sqrt(n - 3)
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def prompts_of(run: Run, step: int) -> list[Rows]:
    """Return the answers of a training step by prompt."""
    rows = run.rollouts(step)
    size = run.recipe["rollout"]["group_size"]
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def right_answers(run: Run, at: int, count: int) -> Rows:
    """Return the newest held-out answers that were right, of evaluations up to a step."""
    rows = run.rollouts(evaluation=run.evaluations[0]["task"])
    return [row for row in rows if row.outcome == "right" and row.step <= at][-count:]


def measure(done: WhatIf, held_out: Rows) -> tuple[list[Influence], dict[str, float]]:
    """Return the influence of each prompt of the first step of the futures, and figures about all of them."""
    plan = done.results.plan
    run = pt.load_run(plan.run)
    after = {
        label: mean_logprob(load(done.run_of(label).checkpoint("last")), held_out) for label in done.results.labels()
    }
    before = load(run.checkpoint(plan.at))
    lr = next(row["lr"] for row in run.metrics if row["step"] == plan.at + 1)
    groups = prompts_of(run, plan.at + 1)
    scores = tracin_scores(before, groups, held_out, lr)
    influences = []
    for number, (group, score) in enumerate(zip(groups, scores, strict=True)):
        exact = after["unchanged"] - after[f"drop prompt:{number}"]
        influences.append(Influence(group[0].prompt, fmean(row.reward for row in group), exact, score))
    exact = [one.exact for one in influences]
    reruns = [value for label, value in after.items() if not label.startswith("drop")]
    figures = {"n": len(exact), "held_out": len(held_out), "tokens": sum(row.num_tokens for row in held_out)}
    figures |= {"equal_to_the_bit": done.results.equality.holds, "spread_of_exact": stdev(exact)}
    figures |= {"spread_of_reruns": stdev(reruns), "step": after["unchanged"] - mean_logprob(before, held_out)}
    for name, (xs, ys) in {"pearson": (exact, scores), "spearman": (ranks(exact), ranks(scores))}.items():
        figures[name] = pearson(xs, ys)
        figures[f"{name}_low"], figures[f"{name}_high"] = fisher_interval(figures[name], len(exact))
    return influences, figures


def main() -> None:
    """Print the table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run that samples, with held-out evaluations and a checkpoint of the step")
    parser.add_argument("--at", type=int, required=True, help="the influence is that of the next step's prompts")
    parser.add_argument("--held-out", type=int, default=200, help="right held-out answers to measure (default: 200)")
    parser.add_argument("--runs-dir", default="runs", help="where the futures go (default: runs)")
    parser.add_argument("--out", help="a JSON file to write")
    arguments = parser.parse_args()
    run = pt.load_run(arguments.run)
    held_out = right_answers(run, arguments.at, arguments.held_out)
    drops = f"drop prompt:0-{len(prompts_of(run, arguments.at + 1)) - 1}"
    reruns = [f"train.seed={run.recipe['train']['seed'] + number}" for number in (1, 2, 3)]
    done = pt.what_if(run, at=arguments.at, steps=1, changes=[drops, *reruns], runs_dir=arguments.runs_dir)
    influences, figures = measure(done, held_out)
    print("prompt  mean reward  exact influence      TracIn   (nats per held-out token)")
    for number, one in enumerate(influences):
        print(f"{number:6d}  {one.reward:11.3f}  {one.exact:+15.3e}  {one.tracin:+10.3e}")
    for name, value in figures.items():
        print(f"{name}: {value:.6g}")
    if arguments.out:
        content = {"figures": figures, "prompts": [vars(one) for one in influences]}
        Path(arguments.out).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
