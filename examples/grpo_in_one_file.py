"""The whole of GRPO in one file, for reading. Imports torch and transformers, nothing of posttrain.

    python examples/grpo_in_one_file.py --model PATH [--steps 40]

A prompt is sampled G times, every answer gets a reward, and each token of an answer is made more
or less likely in proportion to how much better its answer was than the others of its group:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                       DeepSeekMath (2024), section 4.1.2
    rho   = pi(token) / pi_old(token)
    loss  = mean over the batch's tokens of -min(rho A, clip(rho, 1 - low, 1 + high) A)

The library computes the same losses from the same batch; a test holds the two together. What the
library adds: a faster sampler, shared prompts, records, evaluation, checkpoints that resume exactly.
"""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = ["Mia", "Tom", "Eva", "Ben"]
THINGS = ["shells", "apples", "books", "coins"]


# --- the task: a question and its exact answer ------------------------------------------------


def make_problem(rng: random.Random) -> tuple[str, int]:
    """A little story with one or two steps, and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start, found = rng.randint(2, 40), rng.randint(2, 40)
    text = f"{name} has {start} {thing}. {name} finds {found} more {thing}."
    total = start + found
    if rng.random() < 0.5:
        given = rng.randint(1, total)
        text += f" Then {name} gives away {given} {thing}."
        total -= given
    return f"User: {text} How many {thing} does {name} have now?\nAssistant: <think>", total


def reward_of(text: str, answer: int) -> float:
    """1 for the exact answer in the format, 0.1 for the format alone, else 0."""
    match = re.search(r"</think>\s*<answer>\s*(-?\d+)\s*</answer>\s*$", text)
    if match is None:
        return 0.0
    return 1.0 if int(match.group(1)) == answer else 0.1


# --- the method: three small functions ----------------------------------------------------------


def group_advantages(rewards: Tensor) -> Tensor:
    """rewards [N, G] -> advantages [N, G]; a group of equal rewards teaches nothing."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True)
    return torch.where(std > 0, centred / (std + 1e-4), torch.zeros_like(centred))


def token_logprobs(model: torch.nn.Module, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(tokens[b, t] | tokens[b, :t]) at [b, t], padded on the right; 0 at t = 0."""
    attends = torch.arange(tokens.shape[1])[None, :] < lengths[:, None]
    logits = model(input_ids=tokens, attention_mask=attends.long()).logits / temperature
    logp = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp, (1, 0))


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """All [B, T]; the mean over every trained token of the batch (DAPO's reduction)."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return -(surrogate * mask).sum() / mask.sum()


# --- the loop -------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    """tokens [B, T], lengths [B], mask [B, T] (True on sampled tokens), rewards [N, G]."""

    tokens: Tensor
    lengths: Tensor
    mask: Tensor
    rewards: Tensor


@torch.no_grad()
def sample(
    model: torch.nn.Module, tokenizer: object, problems: list[tuple[str, int]], group: int, new: int
) -> Rollouts:
    """G answers to each problem, graded; rows are moved so that padding is on the right."""
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in problems]
    width = max(len(p) for p in prompts)
    pad, end = tokenizer.pad_token_id or 0, tokenizer.eos_token_id
    left = torch.tensor([[pad] * (width - len(p)) + p for p in prompts for _ in range(group)])
    attends = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts for _ in range(group)])
    out = model.generate(
        input_ids=left,
        attention_mask=attends,
        max_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=end,
        pad_token_id=pad,
    )
    rows, spans, rewards = [], [], []
    for b, ids in enumerate(out.tolist()):
        prompt, (_, answer) = prompts[b // group], problems[b // group]
        answer_ids = ids[width:]
        if end in answer_ids:
            answer_ids = answer_ids[: answer_ids.index(end) + 1]  # the end token is part of the answer
        rows.append(prompt + answer_ids)
        spans.append((len(prompt), len(prompt) + len(answer_ids)))
        text = tokenizer.decode([i for i in answer_ids if i != end], skip_special_tokens=False)
        rewards.append(reward_of(text, answer))
    longest = max(len(r) for r in rows)
    positions = torch.arange(longest)[None, :]
    start, stop = (torch.tensor([s[i] for s in spans])[:, None] for i in (0, 1))
    return Rollouts(
        tokens=torch.tensor([r + [pad] * (longest - len(r)) for r in rows]),
        lengths=stop[:, 0],
        mask=(positions >= start) & (positions < stop),
        rewards=torch.tensor(rewards).view(len(problems), group),
    )


def train(
    model: torch.nn.Module, tokenizer: object, steps: int, prompts: int, group: int, new: int, lr: float, seed: int
) -> list[float]:
    """Returns the mean reward of every step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model.eval()  # no dropout: the policy that samples is the policy that is trained
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    curve = []
    for step in range(1, steps + 1):
        rollouts = sample(model, tokenizer, [make_problem(rng) for _ in range(prompts)], group, new)
        advantages = group_advantages(rollouts.rewards).view(-1, 1).expand_as(rollouts.mask)
        logprobs = token_logprobs(model, rollouts.tokens, rollouts.lengths)
        # One update per batch of samples, so the old policy is this one: the ratio is 1, its gradient is not 0.
        loss = grpo_loss(logprobs, logprobs.detach(), advantages, rollouts.mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(float(rollouts.rewards.mean()))
        length = float(rollouts.mask.sum()) / len(rollouts.mask)
        exact = float((rollouts.rewards == 1.0).float().mean())
        print(f"step {step:3d}  reward {curve[-1]:.3f}  exact {exact:.3f}  tokens {length:5.1f}", flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file")
    parser.add_argument("--model", required=True, help="a folder or hub name in the Hugging Face layout")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="answers a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    train(model, tokenizer, args.steps, args.prompts, args.group, args.max_tokens, args.lr, args.seed)


if __name__ == "__main__":
    main()
