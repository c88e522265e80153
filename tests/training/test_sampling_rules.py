"""``min_tokens``, ``repetition_penalty`` and ``stop``: sampled, trained under, refused if they cannot be followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from balanced_runs import read_run
from closeness import OF_EMBEDDED, OF_TINY_RANDOM, allclose, approx, rounding
from posttrain.data.render.encoding import decode_ids
from posttrain.errors import RecipeError, UsageError
from posttrain.models.forward import predictions
from posttrain.models.forward.forward import Forward
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection
from posttrain.sampling.base import Engine, Reply, Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.store.metrics import MetricsLog, evaluation_points
from posttrain.training.build import prepare
from posttrain.training.step import accumulate
from posttrain.types import LogitRules, Sample, collate
from refusing import refuses
from small_runs import one_layer_recipe, recorded, run, same_bits, saved_tensors, steps_of, untimed
from tiny_random import build_tiny_random

PROMPTS, KEYS = [[5, 6, 7, 6], [8, 9]], [[11, 12], [13, 14]]
STOPS = frozenset(range(0, 300, 3))
RULES: dict[str, Any] = {"min_tokens": 4, "repetition_penalty": 1.3}


def ruled(logits: Tensor, prefix: list[int], num_own: int, rules: dict[str, Any], temperature: float) -> Tensor:
    """Log-probabilities after the rules, token by token in plain Python and float64."""
    values = logits.double().tolist()
    for token in set(prefix):
        penalty = rules.get("repetition_penalty", 1.0)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    if num_own < rules.get("min_tokens", 0):
        for token in STOPS:
            values[token] = -torch.inf
    return (torch.tensor(values, dtype=torch.float64) / temperature).log_softmax(-1)


@pytest.mark.parametrize("path", ["lean", "modules", "plain", "reread"])
@pytest.mark.parametrize("rules", [RULES, {"min_tokens": 3}, {"repetition_penalty": 0.7}])
def test_native_logprobs_after_the_rules_are_those_of_float64(path: Any, rules: dict[str, Any]) -> None:
    model = build_tiny_random("qwen3")
    engine = NativeEngine(model, slots=3)
    engine._choose = lambda reach, choose=engine._choose: (path, choose(reach)[1])  # type: ignore[method-assign]
    groups = engine.generate(PROMPTS, KEYS, Sampling(9, temperature=1.2, stop_ids=STOPS, **rules))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for answer in group:
            ids = [*prompt, *answer.ids]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            for t, found in enumerate(answer.logprobs):
                at = len(prompt) + t
                expected = ruled(logits[at - 1], ids[:at], t, rules, 1.2)[ids[at]]
                assert found == approx(float(expected), abs=OF_TINY_RANDOM)
            assert len(answer.ids) >= rules.get("min_tokens", 0)
            assert not STOPS & set(answer.ids[: rules.get("min_tokens", 1) - 1])


def test_greedy_answers_follow_the_penalty() -> None:
    model = build_tiny_random("qwen3")
    plain, penalized = (
        NativeEngine(model).generate([[5, 6]], [[1]], Sampling(12, temperature=0.0, repetition_penalty=p))[0][0].ids
        for p in (1.0, 1e6)
    )
    assert plain != penalized
    assert len(set(penalized)) == len(penalized), "no token comes twice"


class Teller:
    """Replies twice, with ids that the model has not said."""

    def __init__(self) -> None:
        self.turns = 0

    def hear(self, prompt: int, sample: int, turn: Any, finish: Any) -> None:
        self.turns += 1

    def reply(self, prompt: int, sample: int) -> Reply:
        return Reply((297, 298, 299)) if self.turns < 3 else Reply(finish="ended")


class Generated(Engine):
    """An engine that knows no turns: they are generated one by one."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine

    def generate(self, prompts: Any, keys: Any, sampling: Sampling) -> Any:
        return self.engine.generate(prompts, keys, sampling)


def test_converse_replies_are_seen_and_every_turn_has_its_minimum() -> None:
    model = build_tiny_random("qwen3")
    sampling = Sampling(60, stop_ids=STOPS, max_turn_tokens=12, **RULES)
    found = []
    for engine in (NativeEngine(model), Generated(NativeEngine(model))):
        ((answer,),) = engine.converse([[5, 6, 7]], [[11]], sampling, Teller())
        ids, num_own = [5, 6, 7, *answer.ids], 0
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for t, is_own in enumerate(answer.own):
            if is_own:
                expected = ruled(logits[t + 2], ids[: t + 3], num_own, RULES, 1.0)[ids[t + 3]]
                assert answer.logprobs[t] == approx(float(expected), abs=OF_TINY_RANDOM)
            num_own = num_own + 1 if is_own else 0
        assert not all(answer.own)
        found.append((answer.ids, answer.own))
    assert found[0] == found[1]


@pytest.mark.parametrize("path", ["lean", "plain"])
def test_stop_text_ends_an_answer_with_the_token_that_completes_it(path: Any) -> None:
    loaded = load_model(ModelSection(name="tiny-sft"), seed=0)
    engine = NativeEngine(loaded.model)
    engine.tokenizer = loaded.tokenizer
    engine._choose = lambda reach, choose=engine._choose: (path, choose(reach)[1])  # type: ignore[method-assign]
    prompt = loaded.tokenizer.encode("Tom has 3 apples. He buys 4 more. <think> ")
    keys = [list(range(6))]
    (whole,) = engine.generate([prompt], keys, Sampling(40, stop_ids=frozenset({0})))
    texts = ("er", "an")
    (cut,) = engine.generate([prompt], keys, Sampling(40, stop_ids=frozenset({0}), stop=texts))
    assert any(len(short.ids) < len(long.ids) for short, long in zip(cut, whole, strict=True))
    for short, long in zip(cut, whole, strict=True):
        assert short.ids == long.ids[: len(short.ids)]
        text, before = (decode_ids(loaded.tokenizer, list(ids)) for ids in (short.ids, short.ids[:-1]))
        assert not any(one in before for one in texts)
        if any(one in text for one in texts):
            assert short.finish == "stop"
        else:
            assert (short.ids, short.finish) == (long.ids, long.finish)


def made_up_rows(rules: LogitRules) -> list[Sample]:
    numbers = torch.Generator().manual_seed(3)
    rows = []
    for n in range(4):
        prompt, answer = [5, 6, 7 + n // 2], torch.randint(1, 290, (7 + n,), generator=numbers).tolist()
        answer = [token + 1 if token in STOPS else token for token in answer]
        barred = [0.0] * 3 + [float(t < 4) for t in range(len(answer))]
        weights = torch.randn(len(prompt) + len(answer), generator=numbers).tolist()
        fields = {"advantages": weights, "barred": barred}
        rows.append(Sample(prompt + answer, [False] * 3 + [True] * len(answer), n // 2, 3, fields))
    return rows


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("limit", [1 << 24, 900])
def test_forward_under_rules_logprobs_and_gradient_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, architecture: str, limit: int
) -> None:
    """Of the whole and in chunks of three tokens; the reference is built from the definition in float64."""
    monkeypatch.setattr(predictions, "MAX_LOGIT_ELEMENTS", limit)
    monkeypatch.setattr(predictions, "KEPT_ELEMENTS", limit)
    rules = LogitRules(1.3, tuple(sorted(STOPS)))
    batch = collate(made_up_rows(rules))
    batch.rules = rules
    model, exact = build_tiny_random(architecture), build_tiny_random(architecture).double()
    outputs = Forward(model, 1.2)(batch)
    (batch.field("advantages") * outputs.logprobs).sum().backward()
    total, found = torch.zeros((), dtype=torch.float64), []
    ends = torch.zeros(300, dtype=torch.bool)
    ends[list(STOPS)] = True
    for row in made_up_rows(rules):
        logits = exact(input_ids=torch.tensor([list(row.ids)]), use_cache=False).logits[0]
        for t in range(3, len(row.ids)):
            z = logits[t - 1]
            seen = torch.zeros(300, dtype=torch.bool)
            seen[list(row.ids[:t])] = True
            z = torch.where(seen, torch.where(z > 0, z / 1.3, z * 1.3), z)
            if row.fields["barred"][t]:
                z = z.masked_fill(ends, -torch.inf)
            found.append((z / 1.2).log_softmax(-1)[row.ids[t]])
            total = total + row.fields["advantages"][t] * found[-1]
    total.backward()
    mine = outputs.logprobs[batch.mask].detach().double()
    assert allclose(mine, torch.stack(found).detach(), atol=OF_TINY_RANDOM, rtol=0)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        size = max(1.0, float(q.grad.abs().max()))
        assert allclose(p.grad.double(), q.grad, atol=size * OF_TINY_RANDOM, rtol=0), name


TRAINED = [{"min_tokens": 5}, {"repetition_penalty": 1.2}, RULES | {"top_p": 0.8, "top_k": 20}]


@pytest.mark.parametrize("options", TRAINED)
def test_first_update_under_rules_has_ratio_one_and_everything_balances(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    recipe = one_layer_recipe("grpo", rollout=options, regularize={"kl_coef": 0.1}, train={"steps": 2, "lr": 1e-3})
    read = read_run(tmp_path, recipe)
    assert read.violated == {}
    assert {"sampler", "draws"} <= set(read.worst)
    first, second = steps_of(tmp_path)
    assert first["ratio_distance"] == approx(0.0, abs=OF_EMBEDDED / 8)
    assert first["kl_ref"] == approx(0.0, abs=1e-9)
    assert second["kl_ref"] > 1e-6
    assert first["completion_length"] >= options.get("min_tokens", 0)


def test_gradient_under_rules_does_not_depend_on_the_split_into_micro_batches() -> None:
    found = []
    for tokens in (8192, 40):
        recipe = one_layer_recipe("grpo", rollout=RULES, train={"micro_batch_tokens": tokens})
        parts = prepare(recipe)
        accumulate(parts.method, parts.source(1).batch, recipe.train)
        found.append({name: p.grad.clone() for name, p in parts.parameters if p.grad is not None})
    for name, gradient in found[0].items():
        bound = rounding(torch.float32, size=float(gradient.abs().max()), terms=1000, condition=50)
        assert allclose(gradient, found[1][name], atol=bound, rtol=0), name


def test_run_under_rules_stopped_between_minibatches_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    train = {"steps": 4, "num_minibatches": 2, "save_every": 1, "lr": 1e-3}
    recipe = one_layer_recipe("grpo", rollout=RULES | {"stop": ["e"]}, train=train)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=3)
    run(cut, recipe, resume=True)
    assert same_bits(saved_tensors(whole, 4), saved_tensors(cut, 4))
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)


def test_run_with_a_stop_text_balances_and_its_answers_end_there(tmp_path: Path) -> None:
    recipe = one_layer_recipe("grpo", rollout={"stop": ["e"], "max_tokens": 12}, train={"steps": 1})
    read = read_run(tmp_path, recipe)
    assert read.violated == {}
    from posttrain.store.rollouts import RolloutStore

    rows = RolloutStore(tmp_path / "rollouts.db", read_only=True).training()
    assert all("e" not in row.completion[:-12] for row in rows)
    assert any(row.finish == "stop" and "e" in row.completion for row in rows)


def test_objective_that_reads_only_the_tokens_learns_without_the_rules(tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "grpo", rollout=RULES, objective="cross_entropy", advantage=None, aggregate="token_mean", train={"steps": 1}
    )
    assert prepare(recipe).source(1).batch.rules is None
    assert read_run(tmp_path, recipe).violated == {}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout": {"min_tokens": 10}}, ["min_tokens", "10"]),
        ({"rollout": {"repetition_penalty": 0.0}}, ["repetition_penalty"]),
        ({"rollout": {"stop": [""]}}, ["stop"]),
        ({"rollout": {"stop": "x" * 1001}}, ["stop"]),
        ({"rollout": {"min_tokens": 2, "engine": {"name": "scripted", "texts": ["1"]}}}, ["rollout.min_tokens"]),
        ({"rollout": {"stop": ["a"], "engine": {"name": "scripted", "texts": ["1"]}}}, ["rollout.stop", "scripted"]),
        (
            {
                "rollout": {"repetition_penalty": 1.2, "label_above": 0.25},
                "objective": {"name": "sdpo", "ratio_cap": 2.0},
                "teacher": {"name": "self", "top_k": 4},
            },
            ["rollout.repetition_penalty", "sdpo"],
        ),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_by_name(changes: dict[str, Any], named: list[str]) -> None:
    with refuses(RecipeError, *named):
        prepare(one_layer_recipe("grpo", **changes))


@pytest.mark.parametrize(
    "options", [{"min_tokens": -1}, {"min_tokens": 9}, {"repetition_penalty": 0.0}, {"stop": ("",)}]
)
def test_generate_with_rules_out_of_range_is_refused_by_name(options: dict[str, Any]) -> None:
    with refuses(UsageError, *options):
        NativeEngine(build_tiny_random("qwen3")).generate([[5]], [[1]], Sampling(5, **options))


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.3}, {"min_tokens": 6}, {"repetition_penalty": 1.5}, {"stop": ["a"]}],
)
def test_option_of_sampling_acts_on_the_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    train = {"steps": 2, "lr": 1e-3}
    run(tmp_path / "plain", one_layer_recipe("grpo", train=train))
    run(tmp_path / "changed", one_layer_recipe("grpo", train=train, rollout=options))
    assert not same_bits(saved_tensors(tmp_path / "plain", 2), saved_tensors(tmp_path / "changed", 2))


def test_evaluation_of_a_run_takes_its_own_rules(tmp_path: Path) -> None:
    """Greedy answers of the same weights: some end at the text, and none is shorter than the minimum."""
    results = {}
    for name, options in {"plain": {}, "stop": {"stop": list("aeiou ")}, "long": {"min_tokens": 10}}.items():
        evaluation = {"every": 1, "num_examples": 6, "max_tokens": 12} | options
        recipe = one_layer_recipe("grpo", train={"steps": 1, "lr": 1e-12}, eval=evaluation)
        run(tmp_path / name, recipe)
        first = evaluation_points(MetricsLog(tmp_path / name / "metrics.jsonl").read())[0]
        results[name] = first.results["completion_length"]
    assert results["stop"] < results["plain"]
    assert results["long"] >= 10.0


@pytest.mark.parametrize(
    ("evaluation", "named"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": 1.0, "stop": [""]}, "stop"),
        ({"min_tokens": 2, "engine": {"name": "scripted", "texts": ["1"]}}, "eval.min_tokens"),
    ],
)
def test_evaluation_under_rules_that_cannot_be_is_refused(evaluation: dict[str, Any], named: str) -> None:
    with refuses(RecipeError, named):
        prepare(one_layer_recipe("grpo", eval={"every": 1, "num_examples": 2} | evaluation))
