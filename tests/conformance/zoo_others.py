"""Wrong advantages, scores and rows: after a public report, or made up where a trap is known without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from zoo import Bug, right_advantages, right_rows, right_score

Ids = Sequence[Sequence[int]]


def first_rollout_alone(rewards: Tensor, group: Tensor) -> Tensor:
    result = torch.zeros_like(rewards)
    for number in group.unique():
        own = group == number
        result[own] = rewards[own] - rewards[own][0]
    return result


def normalized_twice(rewards: Tensor, group: Tensor) -> Tensor:
    once = right_advantages(rewards, group) * torch.linspace(0.5, 1.5, len(rewards), dtype=rewards.dtype)
    return (once - once.mean()) / (once.std() + 1e-6)


def nan_in_every_group(rewards: Tensor, group: Tensor) -> Tensor:
    return right_advantages(rewards, group) + 0.0 * rewards.sum()


def neighbours_for_a_group(rewards: Tensor, group: Tensor) -> Tensor:
    size = int((group == group[0]).sum())
    if len(rewards) % size:
        return right_advantages(rewards, group)
    rows = rewards.view(-1, size)
    varies = rows.amax(1, keepdim=True) > rows.amin(1, keepdim=True)
    scaled = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-4)
    return torch.where(varies, scaled, 0.0).flatten()


def without_epsilon(rewards: Tensor, group: Tensor) -> Tensor:
    result = torch.zeros_like(rewards)
    for number in group.unique():
        own = group == number
        result[own] = (rewards[own] - rewards[own].mean()) / rewards[own].std()
    return result


def baseline_of_the_batch(rewards: Tensor, group: Tensor) -> Tensor:
    return rewards - rewards.mean()


def numbers_as_places(rewards: Tensor, group: Tensor) -> Tensor:
    count = len(group.unique())
    sums = torch.zeros(count, dtype=rewards.dtype).index_add(0, group % count, rewards)
    sizes = torch.zeros(count, dtype=rewards.dtype).index_add(0, group % count, torch.ones_like(rewards))
    return rewards - (sums / sizes)[group % count]


def std_of_the_first_group(rewards: Tensor, group: Tensor) -> Tensor:
    scale = rewards[group == group[0]].std()
    result = torch.zeros_like(rewards)
    for number in group.unique():
        own = group == number
        result[own] = (rewards[own] - rewards[own].mean()) / (scale + 1e-4)
    return result


def biased_std(rewards: Tensor, group: Tensor) -> Tensor:
    result = torch.zeros_like(rewards)
    for number in group.unique():
        own = group == number
        result[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std(correction=0) + 1e-8)
    return result


def entropy_of_unscaled_logits(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return right_score(logits, tokens, temperature)[0], right_score(logits, tokens, 1.0)[1]


def without_temperature(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return right_score(logits, tokens, 1.0)[0]


def always_at_seven_tenths(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return right_score(logits, tokens, 0.7)[0]


def without_the_shift(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)


def times_the_temperature(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return right_score(logits * temperature**2, tokens, temperature)[0]


def entropy_under_no_grad(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs, entropy = right_score(logits, tokens, temperature)
    return logprobs, entropy.detach()


def exponential_of_raw_logits(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    scaled = logits[:, :-1] / temperature
    table = scaled - scaled.exp().sum(-1, keepdim=True).log()
    return table.gather(2, tokens[:, 1:, None]).squeeze(2)


def entropy_of_zero_times_infinity(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    table = (logits[:, :-1] / temperature).softmax(-1)
    onehot = torch.nn.functional.one_hot(tokens[:, 1:], logits.shape[-1])
    return (table.log() * onehot).sum(-1)


def observations_trained(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    tokens, mask = right_rows(prompts, answers, pad, end)
    return tokens, ~mask


def mask_one_early(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    tokens, mask = right_rows(prompts, answers, pad, end)
    return tokens, mask.roll(-1, dims=1)


def mask_of_what_is_no_pad(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    tokens, mask = right_rows(prompts, answers, pad, end)
    return tokens, mask & (tokens != pad)


def end_added_to_all(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    ended = [list(answer) if answer[-1] == end else [*answer, end] for answer in answers]
    return right_rows(prompts, ended, pad, end)


def cut_at_the_first_end(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    cut = [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]
    return right_rows(prompts, cut, pad, end)


def longest_first(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    order = sorted(range(len(prompts)), key=lambda row: -len(answers[row]))
    return right_rows([prompts[row] for row in order], [answers[row] for row in order], pad, end)


def prompt_trained(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    tokens, _ = right_rows(prompts, answers, pad, end)
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
    return tokens, torch.arange(tokens.shape[1])[None] < lengths[:, None]


def prompts_cut_on_the_left(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    return right_rows([prompt[-2:] for prompt in prompts], answers, pad, end)


def padded_with_zeros(prompts: Ids, answers: Ids, pad: int, end: int) -> tuple[Tensor, Tensor]:
    return right_rows(prompts, answers, 0, end)


CONVENTION = "convention"
OTHERS = [
    Bug("mean of first rollouts only", "advantages", first_rollout_alone, "formula", "PipelineRL#54"),
    Bug("normalized twice", "advantages", normalized_twice, "formula", "gem#113"),
    Bug("one NaN reward spreads to all", "advantages", nan_in_every_group, "nan_reward", "ms-swift#8123"),
    Bug("adjacent rows as groups", "advantages", neighbours_for_a_group, "interleaved"),
    Bug("zero standard deviation", "advantages", without_epsilon, "equal_rewards"),
    Bug("single answer with ddof 1", "advantages", without_epsilon, "single_answer"),
    Bug("batch baseline", "advantages", baseline_of_the_batch, "formula"),
    Bug("group numbers as indices", "advantages", numbers_as_places, "group_numbers"),
    Bug("first group's scale for all", "advantages", std_of_the_first_group, "formula"),
    Bug("std with ddof 0", "advantages", biased_std, "formula", status=CONVENTION),
    Bug("entropy of unscaled logits", "score", entropy_of_unscaled_logits, "entropy", "OpenRLHF#1319"),
    Bug("no temperature", "score", without_temperature, "arguments", "OpenRLHF#853"),
    Bug("temperature always 0.7", "score", always_at_seven_tenths, "value", "tinker-cloud#26"),
    Bug("entropy without gradient", "score", entropy_under_no_grad, "entropy_gradient", status=CONVENTION),
    Bug("unshifted logits", "score", without_the_shift, "alignment"),
    Bug("times the temperature", "score", times_the_temperature, "temperature"),
    Bug("exp of raw logits", "score", exponential_of_raw_logits, "extremes"),
    Bug("0 times log 0", "score", entropy_of_zero_times_infinity, "impossible_tokens"),
    Bug("observations trained instead of actions", "rows", observations_trained, "trained_tokens", "RAGEN#71"),
    Bug("row mask one position early", "rows", mask_one_early, "trained_tokens", "verl#1758"),
    Bug("mask of non-pad tokens", "rows", mask_of_what_is_no_pad, "pad_is_end"),
    Bug("pad token inside an answer", "rows", mask_of_what_is_no_pad, "pad_inside"),
    Bug("end token added to a truncated answer", "rows", end_added_to_all, "cut_off"),
    Bug("truncated at the first end token", "rows", cut_at_the_first_end, "end_inside"),
    Bug("rows sorted by length", "rows", longest_first, "row_order"),
    Bug("prompt trained", "rows", prompt_trained, "first_token"),
    Bug("prompt truncated on the left", "rows", prompts_cut_on_the_left, "prompt"),
    Bug("zero padding", "rows", padded_with_zeros, "padding"),
]
