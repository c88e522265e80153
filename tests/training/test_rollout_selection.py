"""Selection from a rollout batch: pairs, judged rows, nothing; its minibatches, and its checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_sources import groups_of, mostly_uniform, rows_of, sampled, sums
from transformers import AutoModelForCausalLM

from closeness import approx
from posttrain.data.render import encode_prompt
from posttrain.registry import register
from posttrain.training.sources.rollouts import NO_GOLD, NOTHING_SELECTED
from posttrain.types import Batch, Loss, Outputs, Rollout
from small_runs import Events, one_layer_recipe, run, same_bits, saved_tensors, shallow, steps_of, watched

ALL_OF_THE_DATA = ("margins", "labels", "rewards")


@register("objective", level="pair", needs=ALL_OF_THE_DATA)
def reads_all_of_a_pair(outputs: Outputs, batch: Batch) -> Loss:
    """An objective over pairs for the tests of sources, which asks for every stream of the data."""
    raise AssertionError("it is never called")


PAIRS = "test_rollout_selection:reads_all_of_a_pair"


def ids_of(rollout: Rollout) -> tuple[int, ...]:
    return rollout.prompt_ids + rollout.completion.ids


def correct_and_wrong_by_hand(group: list[Rollout], threshold: float, most: int) -> list[tuple[Rollout, Rollout]]:
    """The i-th answer above the threshold with the i-th that is not, in the order of sampling."""
    pairs = []
    used: set[int] = set()
    for chosen in group:
        if chosen.reward <= threshold or len(pairs) == most:
            continue
        for place, rejected in enumerate(group):
            if rejected.reward <= threshold and place not in used:
                used.add(place)
                pairs.append((chosen, rejected))
                break
    return pairs


# --- units ---


def test_rows_of_pairs_alternate_and_share_their_prompt(tokenizer, template) -> None:
    select = {"name": "right_and_wrong", "threshold": 4.5, "num_pairs": 2}
    rollout = {"num_prompts": 5, "group_size": 6, "select": select, "label_above": 7.0}
    source = sampled(tokenizer, template, sums(20), objective={"name": PAIRS}, rollout=rollout)
    draw = source(1)
    batch = draw.batch
    groups = groups_of(draw.rollouts, 6)
    expected = [(n, pair) for n, group in enumerate(groups) for pair in correct_and_wrong_by_hand(list(group), 4.5, 2)]
    assert 5 < len(expected) <= 10
    assert max(Counter(n for n, _ in expected).values()) == 2
    assert batch.rows_per_unit == 2
    assert rows_of(batch) == [ids_of(r) for _, pair in expected for r in pair]
    assert batch.group.tolist() == [n for n, _ in expected for _ in range(2)]
    assert set(batch.fields) == {*ALL_OF_THE_DATA, "sampler_logprobs"}
    for u, (_, (chosen, rejected)) in enumerate(expected):
        assert chosen.prompt_ids == rejected.prompt_ids
        for b, rollout_ in ((2 * u, chosen), (2 * u + 1, rejected)):
            prompt = len(rollout_.prompt_ids)
            assert int(batch.prefix[b]) == prompt
            assert batch.mask[b].tolist() == [prompt <= t < prompt + 2 for t in range(batch.mask.shape[1])]
            assert batch.fields["rewards"][b] == rollout_.reward
            assert batch.fields["margins"][b] == chosen.reward - rejected.reward > 0  # the same number on both rows
            assert batch.fields["labels"][b] == float(rollout_.reward in (8.0, 9.0))  # at the bound it is not above it
    assert set(batch.fields["labels"].tolist()) == {0.0, 1.0}
    assert 7.0 in batch.fields["rewards"].tolist()
    assert draw.metrics["selected"] == 2 * len(expected) / 30
    assert "advantage_mean" not in draw.metrics
    assert all(r.advantage is None for r in draw.rollouts)


def test_answers_to_imitate_carry_nothing_but_themselves(tokenizer, template) -> None:
    """Expert iteration: cross-entropy on what was rewarded."""
    rollout = {"num_prompts": 4, "group_size": 4, "select": {"name": "above", "threshold": 6.5}}
    source = sampled(tokenizer, template, sums(20), objective={"name": "cross_entropy"}, rollout=rollout)
    draw = source(1)
    kept = [ids_of(r) for r in draw.rollouts if r.reward > 6.5]
    assert 0 < len(kept) < 16
    assert rows_of(draw.batch) == kept
    assert set(draw.batch.fields) == {"sampler_logprobs"}
    assert draw.metrics["selected"] == len(kept) / 16


# --- nothing selected ---


def test_nothing_selected_is_no_batch(tokenizer, template) -> None:
    rollout = {"num_prompts": 3, "group_size": 2, "select": {"name": "above", "threshold": 9.0}}
    changes: dict[str, Any] = {"objective": {"name": "cross_entropy"}, "rollout": rollout}
    source = sampled(tokenizer, template, sums(20), **changes, train={"ppo_epochs": 2})
    draw = source(1)
    assert draw.batch is None
    assert draw.fresh
    assert len(draw.rollouts) == 6
    assert draw.metrics["selected"] == 0.0
    assert draw.metrics["reward"] == approx(sum(r.reward for r in draw.rollouts) / 6)
    assert source.rollout_buffer(1) is None
    assert source.take_warnings() == [NOTHING_SELECTED]
    again = source(2)
    assert (again.batch, again.fresh, again.rollouts) == (None, False, [])
    assert source(3).batch is None
    assert source.take_warnings() == [], "it is said once"
    resumed = sampled(tokenizer, template, sums(20), **changes, train={"ppo_epochs": 2})
    resumed.restore(source.rollout_buffer(1), source.state())
    assert resumed(2).batch is None
    assert resumed.engine.calls == []  # type: ignore[attr-defined]


def test_a_reward_for_right_answers_without_gold_is_reported(tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(40)))
    request = {"name": "jsonl", "path": str(tmp_path / "asked.jsonl"), "answer_key": ""}
    output = {}
    for name, rewards in (("paid", ["correct"]), ("not", [{"name": "correct", "weight": 0.0}, "xml_format"])):
        recipe = one_layer_recipe("grpo", task=request, rewards=rewards, train={"steps": 2})
        events = Events()
        watched(tmp_path / name, recipe, events)
        output[name] = [notice["message"] for notice in events.of("notice")].count(NO_GOLD)
    assert output == {"paid": 1, "not": 0}


def test_a_step_without_a_batch_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    """Scripted answers: of two, a prompt gives a pair only where they differ."""
    recipe = one_layer_recipe(
        "grpo",
        objective={"name": "dpo"},
        rollout={"num_prompts": 2, "group_size": 2, "engine": {"name": "scripted", "texts": ["7 apples", "so many"]}},
        train={"steps": 7, "num_minibatches": 2, "save_every": 1, "keep_checkpoints": 99, "warmup_steps": 4},
    )
    run(tmp_path, recipe)
    rows = steps_of(tmp_path)
    assert len(rows) == 7
    states: list[dict[str, torch.Tensor]] = [dict(AutoModelForCausalLM.from_pretrained(shallow(1)).state_dict())]
    idle = 0
    for step, row in enumerate(rows, start=1):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        weights = load_file(folder / "model.safetensors")
        same = all(torch.equal(states[-1][name], tensor) for name, tensor in weights.items())
        assert row["lr"] == approx(1e-3 * min(step, 4) / 4)
        if row["trained_tokens"] == 0:
            idle += 1
            assert (row["loss"], row["grad_norm"]) == (0.0, 0.0)
            assert same
            if step > 1:
                before = saved_optimizer(tmp_path, step - 1)
                now = saved_optimizer(tmp_path, step)
                assert before.keys() == now.keys()
                assert all(torch.equal(now[name], before[name]) for name in now)
        else:
            assert not same
            assert row["grad_norm"] > 0
        states.append(weights)
    assert 2 <= idle <= 5
    # an interrupted run that stood at such a step goes on as if nothing had happened
    first_idle = next(step for step, row in enumerate(rows, start=1) if row["trained_tokens"] == 0)
    sparing = recipe.model_copy(update={"train": recipe.train.model_copy(update={"save_every": 0})})
    run(tmp_path / "cut", sparing, stop_after=first_idle)
    run(tmp_path / "cut", sparing, resume=True)
    assert same_bits(saved_tensors(tmp_path, 7), saved_tensors(tmp_path / "cut", 7))


def saved_optimizer(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return {n: x for n, x in saved_tensors(folder, step).items() if n.startswith("optimizer")}


# --- minibatches and dynamic sampling ---


@pytest.mark.parametrize(("minibatches", "varied"), [(3, 5), (3, 2), (6, 4)])
def test_minibatches_are_parts_of_the_prompts_that_gave_units(
    tokenizer, template, minibatches: int, varied: int
) -> None:
    """Six prompts, of which only some answer in different ways: the others give no pair and are in no part."""
    task = sums(6)
    chosen = {tuple(encode_prompt(tokenizer, template, e.messages)) for e in task.examples[:varied]}
    source = sampled(
        tokenizer,
        template,
        task,
        engine=mostly_uniform(tokenizer, chosen.__contains__),
        objective={"name": "dpo"},
        rollout={
            "num_prompts": 6,
            "group_size": 8,
            "select": {"name": "right_and_wrong", "threshold": 5.0, "num_pairs": 2},
        },
        train={"ppo_epochs": 2, "num_minibatches": minibatches},
    )
    draws = [source(step) for step in range(1, 2 * minibatches + 1)]
    whole = source._batch
    assert whole is not None
    pairs = pairs_of(whole)
    assert len(set(whole.group.tolist())) == varied
    assert sum(pairs.values()) > varied  # some prompts give two pairs
    cuts = []
    for epoch in range(2):
        parts = [draw.batch for draw in draws[epoch * minibatches : (epoch + 1) * minibatches]]
        there = [part for part in parts if part is not None]
        assert len(there) == min(minibatches, varied)
        assert sum((pairs_of(part) for part in there), Counter()) == pairs
        groups = [set(part.group.tolist()) for part in there]
        assert sum(len(g) for g in groups) == varied  # a prompt's pairs stay together
        assert max(len(g) for g in groups) - min(len(g) for g in groups) <= 1
        cuts.append([sorted(g) for g in groups])
    assert cuts[0] != cuts[1] or varied == 2  # two prompts may well come in the same order twice


def pairs_of(batch: Batch) -> Counter[tuple[tuple[int, ...], ...]]:
    rows = rows_of(batch)
    return Counter((rows[u], rows[u + 1]) for u in range(0, len(rows), 2))
