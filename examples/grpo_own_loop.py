"""GRPO as a loop of one's own, out of the parts of a training step.

The same seeds give the same weights as ``pt.train``, bit for bit:

    python examples/grpo_own_loop.py
"""

from __future__ import annotations

import torch

import posttrain as pt

ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(64)]
SETTINGS = {
    "lr": 1e-4,
    "seed": 0,
    "num_prompts": 4,
    "group_size": 4,
    "rollout__max_tokens": 24,
    "template": {"name": "r1_zero", "preamble": ""},
}


def brief(text: str) -> float:
    """Return more for a shorter answer."""
    return 1.0 - len(text) / 200


def centered(rewards: list[float]) -> list[float]:
    """Return each reward minus the mean of its group."""
    values = torch.tensor([rewards], dtype=torch.float64)
    return (values - values.mean(dim=1, keepdim=True))[0].tolist()


def train(num_steps: int, folder: str) -> None:
    """Train the embedded model for some steps, and save it."""
    trainer = pt.Trainer("tiny-sft", data=ROWS, rewards=["correct", (brief, 0.5)], **SETTINGS)
    for step in range(1, num_steps + 1):
        groups = trainer.sample(trainer.prompts(step))
        for group in groups:
            advantages = centered([rollout.reward for rollout in group])
            for rollout, advantage in zip(group, advantages, strict=True):
                rollout.advantage = advantage
        gradients = trainer.forward_backward(groups, "grpo")
        trainer.optim_step()
        reward = sum(rollout.reward for group in groups for rollout in group) / sum(map(len, groups))
        print(f"step {step}: reward {reward:.3f}, loss {gradients.loss:.4f}")
    trainer.save(folder)


if __name__ == "__main__":
    train(20, "own-loop")
    print(pt.generate("own-loop", ["What is 3 plus 4?"], template=SETTINGS["template"])[0])
