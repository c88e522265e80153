"""What a plan says: memory per GPU, seconds by part, what would make it fit, and the schedule on a virtual clock.

That the memory model itself is within 15 % of what small models really hold is measured in ``test_memory.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoConfig

from posttrain.cli import main
from posttrain.errors import UsageError
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.store.ledger import Ledger, count, standing
from posttrain.store.rollouts import RolloutStore
from posttrain.train.memory import counted, memory_of, weights_of
from posttrain.train.planning.decoding import Decoder
from posttrain.train.planning.gpus import GPUS, read_gpus
from posttrain.train.planning.lengths import alike, batch_of, lognormal, recorded
from posttrain.train.planning.plan import memory_per_gpu, most, plan_for, room
from posttrain.train.planning.virtual import simulate, simulate_partial
from posttrain.types import Completion, Example, Message, Rollout

SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 1.7 billion weights, of which only the configuration is there."""
    place = tmp_path_factory.mktemp("models") / "large"
    AutoConfig.for_model("qwen3", **SIZES).save_pretrained(place)
    return str(place)


def recipe_of(folder: str, **changes: Any) -> Recipe:
    keys = {
        "model.name": folder,
        "rollout.prompts": "64",
        "rollout.max_tokens": "512",
        "prompt.max_prompt_tokens": "256",
    }
    keys |= {"eval.every": "0"} | {key.replace("__", "."): str(value) for key, value in changes.items()}
    return load_recipe("tiny/grpo", list(keys.items())).resolve()


def test_kinds_of_gpus_are_read_and_others_refused() -> None:
    for text, expected in {"8xH100": (8, "H100"), "h200": (1, "H200"), "16 x a100-80GB": (16, "A100")}.items():
        num, gpu = read_gpus(text)
        assert (num, gpu.name) == expected
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    with pytest.raises(UsageError, match=r"no 'H10' in the table\. Did you mean 'H100'\?"):
        read_gpus("8xH10")
    for wrong in ("eight", "0xH100", "8x", "x H100 8", "8xH100\x1b[2J"):
        with pytest.raises(UsageError, match="--gpus"):
            read_gpus(wrong)


def test_every_gpu_has_its_share(folder: str) -> None:
    recipe, config = counted(recipe_of(folder))
    _, gpu = read_gpus("H100")
    whole = memory_of(recipe, config, int(gpu.memory * 2**30))
    assert memory_per_gpu(recipe, config, 1, "none", gpu) == whole
    eighth, sharded = (memory_per_gpu(recipe, config, 8, name, gpu) for name in ("none", "fsdp2"))
    assert (eighth.weights, eighth.optimizer) == (whole.weights, whole.optimizer)
    assert eighth.rollouts * 8 == whole.rollouts
    for part in ("gradients", "optimizer"):
        assert getattr(sharded, part) == -(-getattr(whole, part) // 8)
    tensors = weights_of(config)
    layer = sum(w.numel // w.times for w in tensors if ".0." in w.name)
    outside = sum(w.numel for w in tensors if ".0." not in w.name)
    assert outside + 24 * layer == sum(w.numel for w in tensors)
    own = -(-whole.weights // 8) + 4 * (outside + 2 * layer)
    assert sharded.weights == own + whole.weights, "the trainer samples with a whole model"
    assert sharded.activations == eighth.activations


@pytest.mark.parametrize("beside", [False, True])
def test_what_does_not_sample_has_its_part_alone(folder: str, beside: bool) -> None:
    keys = {"model.name": folder, "eval.drift_prompts": "4", "eval.beside": str(beside).lower()}
    recipe, config = counted(load_recipe("dpo-preferences", list(keys.items())).resolve())
    _, gpu = read_gpus("H100")
    eighth, sharded = (memory_per_gpu(recipe, config, 8, name, gpu) for name in ("none", "fsdp2"))
    gathered = sharded.weights - -(-eighth.weights // 8)
    if beside:
        assert gathered < eighth.weights / 2
        assert sharded.reference == -(-eighth.reference // 8)
    else:
        assert gathered > eighth.weights
        assert sharded.reference == eighth.reference


def test_seconds_follow_the_work(folder: str) -> None:
    _, gpu = read_gpus("H100")

    def seconds(num: int = 1, **changes: Any) -> Any:
        return plan_for(recipe_of(folder, **changes), num, gpu).seconds

    one, eight = seconds(), seconds(8)
    assert eight.update * 8 == pytest.approx(one.update)
    assert one.sync == 0 < eight.sync
    assert eight.generate < one.generate
    assert seconds(train__gradient_checkpointing="true").update == pytest.approx(one.update * 4 / 3)
    assert seconds(model__adapter__rank=8).update == pytest.approx(one.update * 2 / 3)
    assert seconds(train__epochs=2).update == pytest.approx(2 * one.update)
    assert one.score == 0 < seconds(regularize__kl=0.1).score
    # by hand, in float32: 64 · 8 answers of 512 tokens and 64 prompts of 256, 6 operations for each weight of a product
    products = 24 * (2048 * (2048 + 2 * 1024 + 2048) + 3 * 2048 * 6144) + 2048 * 151_936
    attention = 2 * 24 * 2048 * 768
    assert one.update == pytest.approx(3 * (2 * products + attention) * (512 * 512 + 64 * 256) / (0.4 * 67e12))


@pytest.mark.parametrize(
    ("kind", "max_tokens", "tokens_per_micro", "helps"),
    [("H100", 2048, 65536, "train.gradient_checkpointing: true"), ("V100-32GB", 128, 1024, "train.offload: optimizer")],
)
def test_what_would_make_it_fit_does(
    kind: str, max_tokens: int, tokens_per_micro: int, helps: str, folder: str
) -> None:
    recipe = recipe_of(folder, rollout__max_tokens=max_tokens, train__tokens_per_micro=tokens_per_micro)
    num, gpu = read_gpus(kind)
    plan = plan_for(recipe, num, gpu)
    assert plan.fits == []
    assert plan.changes
    named = [keys for keys in plan.changes if " with " not in keys[0]]
    assert [helps] in named
    for keys in named:
        pairs = [(key, value) for key, _, value in (text.partition(": ") for text in keys)]
        base = {"model.name": folder, "rollout.prompts": "64", "rollout.max_tokens": str(max_tokens)}
        base |= {"train.tokens_per_micro": str(tokens_per_micro), "prompt.max_prompt_tokens": "256", "eval.every": "0"}
        changed = load_recipe("tiny/grpo", list((base | dict(pairs)).items())).resolve()
        assert most(memory_of(*counted(changed), int(gpu.memory * 2**30))) <= room(gpu)
    hopeless = plan_for(recipe, *read_gpus("T4"))
    assert hopeless.fits == []
    assert all(len(keys) >= 1 for keys in hopeless.changes)


def test_rows_of_many_lengths_share_the_slots() -> None:
    """By hand, two slots, a prompt of 10 tokens: rows of 2 and 4 tokens, then one of 3 beside the second."""
    decoder = Decoder(gpus=1, slots=2, group=3, prompt=10, weights=5.0, cache=0.5, row=0.25, least=1.0)
    first = 2 * (5 + 0.5 * (20 + 2))  # two steps of two rows, of 20 tokens at first and 24 behind
    second = 2 * (5 + 0.5 * (12 + 10 + 2))  # two more, of the rows of 12 tokens and of the prompt of the third
    third = 5 + 0.5 * (12 + 0.5)  # its last token, alone
    assert decoder.seconds([[(0, 2), (0, 4), (0, 3)]]) == pytest.approx(10 * 0.25 + first + second + third)
    assert decoder.seconds([[(2, 4)]]) == pytest.approx(12 * 0.25 + 2 * (5 + 0.5 * (12 + 1))), "read anew"
    least = Decoder(gpus=2, slots=2, group=1, prompt=0, weights=0.0, cache=0.0, row=0.0, least=1.0)
    assert least.seconds([[(0, 7)], [(0, 3)], [(0, 2)], [(0, 4)]]) == 7, "of two GPUs the slower one"
    assert least.seconds([]) == 0


def test_answers_that_are_alike_take_what_they_took(folder: str) -> None:
    _, gpu = read_gpus("H100")
    told, longest = (plan_for(recipe_of(folder), 1, gpu, lengths) for lengths in (alike(512), None))
    assert told.seconds == longest.seconds
    assert longest.partial == {}, "nothing is said of what cannot help"
    # by hand: 8 times 64 slots, in float32, where computing 64 rows takes longer than reading; each prompt once
    products = 24 * (2048 * (2048 + 2 * 1024 + 2048) + 3 * 2048 * 6144) + 2048 * 151_936
    token = (2 * products + 2 * 24 * 2048 * 768) / (0.4 * 67e12)
    cache = 2 * 24 * 8 * 128 * 4
    assert (4 * products + 64 * cache * 512) / (0.6 * 3350e9) < 64 * token
    assert longest.seconds.generate == pytest.approx(8 * 512 * 64 * token + 64 * 256 * token)


def test_lengths_are_drawn_as_they_were_described() -> None:
    chance = Random(0)
    drawn = lognormal(400, 1200)(chance, 50_000)
    assert sum(drawn) / len(drawn) == pytest.approx(400, rel=0.02)
    assert sum(tokens <= 1200 for tokens in drawn) / len(drawn) == pytest.approx(0.95, abs=0.003)
    assert lognormal(400, 401)(chance, 5) == pytest.approx([400] * 5, abs=3)
    for p95, most_p95 in ((400, 1547), (1548, 1547)):
        with pytest.raises(UsageError, match=f"--answer-p95: {p95}, with a mean of 400: .* from 401 to {most_p95};"):
            lognormal(400, p95)
    batch = batch_of(lognormal(400, 1200), 3, prompts=20, group=4, longest=500)
    assert batch == batch_of(lognormal(400, 1200), 3, prompts=20, group=4, longest=500)
    assert batch != batch_of(lognormal(400, 1200), 4, prompts=20, group=4, longest=500)
    assert [len(group) for group in batch] == [4] * 20
    assert max(max(group) for group in batch) == 500


def test_the_lengths_of_a_run_stay_together_by_prompt(tmp_path: Path) -> None:
    told = {(1, 0): [3, 4, 5], (1, 1): [30, 40], (2, 0): [7, 0]}
    with RolloutStore(tmp_path / "rollouts.db") as store:
        for (step, prompt), lengths in told.items():
            example = Example(str(prompt), (Message("user", "?"),))
            store.record([_rollout_of(example, num, step, prompt, i) for i, num in enumerate(lengths)])
    chance = Random(0)
    seen = {tuple(sorted(recorded(tmp_path)(chance, 2))) for _ in range(200)}
    assert seen == {(3, 4), (3, 5), (4, 5), (30, 40), (1, 7)}
    assert {len(recorded(tmp_path)(chance, 5)) for _ in range(9)} == {5}
    with pytest.raises(UsageError, match=r"--answers-of: .*nowhere holds no rollouts of training"):
        recorded(tmp_path / "nowhere")


def _rollout_of(example: Example, num: int, step: int, prompt: int, place: int) -> Rollout:
    said = Completion((5,) * num, (0.0,) * num, "stop")
    return Rollout(example, (1,), said, "", {}, 0.0, step, 0, prompt, place)


GENERATE_BOUND = ([10.0] * 8, [4.0] * 8)
UPDATE_BOUND = ([4.0] * 8, [10.0] * 8)
IN_TURN = ([2.0, 18.0] * 4, [10.0] * 8)


@pytest.mark.parametrize(
    ("staleness", "seconds", "expected"),
    [
        (0, GENERATE_BOUND, [14.0] * 8),
        (1, GENERATE_BOUND, [14.0] + [10.0] * 7),
        (1, UPDATE_BOUND, [14.0] + [10.0] * 7),
        # batch 1 is there at 20, batch 2 (asked for at 12) at 22, batch 3 (asked for at 30) at 48, ...
        (1, IN_TURN, [12.0, 18.0, 10.0, 18.0, 10.0, 18.0, 10.0, 18.0]),
    ],
)
def test_the_schedule_on_a_virtual_clock(
    staleness: int, seconds: tuple[list[float], list[float]], expected: list[float], tmp_path: Path
) -> None:
    recipe = load_recipe("tiny/grpo", [("rollout.staleness", str(staleness))]).resolve()
    generate, update = seconds
    ledger = Ledger(tmp_path / "ledger.jsonl")
    each = simulate(recipe, 8, generate=generate.__getitem__, update=update.__getitem__, ledger=ledger)
    assert each[: len(expected)] == expected
    assert count(ledger.read()) == {"consumed": 8 * 16}
    groups = standing(ledger.read())
    assert {(batch, event.version) for (batch, _, _), event in groups.items()} == {
        (batch, max(0, batch - staleness)) for batch in range(8)
    }


# One prompt with answers of 2 and 6 tokens, 1 s a token step, an update of 1 s, S = 2 and n = 2. Version 0 writes
# batch 0 (until 6) and two tokens of batches 1 and 2 (until 10); version 1, there since 7, batch 1 (until 14), then 2
# tokens of batches 2 and 3 at a time (until 16); version 2 the last 2 of batch 2 (until 18), then of 3 and 4, and on.
PARTIAL = [7.0, 8.0, 4.0, 4.0, 4.0, 4.0]


def test_answers_that_go_on_across_updates_on_a_virtual_clock(tmp_path: Path) -> None:
    keys = {"staleness": 2, "partial": "true", "partial_tokens": 2, "prompts": 1, "group": 2}
    recipe = load_recipe("tiny/grpo", [(f"rollout.{key}", str(value)) for key, value in keys.items()]).resolve()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    asked: list[list[tuple[int, int]]] = []

    def generate(spans: Any) -> float:
        asked.append([span for of_prompt in spans for span in of_prompt])
        return float(max(end - begun for begun, end in asked[-1]))

    told: dict[str, Any] = {"lengths": lambda batch: [[2, 6]], "update": lambda batch: 1.0}
    assert simulate_partial(recipe, 6, generate=generate, ledger=ledger, **told) == PARTIAL
    assert asked[:5] == [[(0, 2), (0, 6)], [(0, 2)] * 2, [(0, 2)] * 2, [(2, 6)], [(2, 4), (0, 2), (0, 2)]]
    assert count(ledger.read()) == {"consumed": 6}
    whole = simulate(recipe, 6, generate=lambda batch: 6.0, update=lambda batch: 1.0)
    assert whole == [7.0] + [6.0] * 5, "long answers keep the next batch waiting"


def test_long_answers_show_what_going_on_gains(folder: str) -> None:
    _, gpu = read_gpus("H100")
    keys = {"max_tokens": 4096, "staleness": 3, "prompts": 16}
    recipe = recipe_of(folder, model__dtype="bfloat16", **{f"rollout__{key}": value for key, value in keys.items()})
    even, tailed = (plan_for(recipe, 1, gpu, lengths) for lengths in (alike(800), lognormal(800, 2400)))
    assert tailed.seconds.generate > 2 * even.seconds.generate, "the longest answer is waited for"
    assert tailed.seconds.update == pytest.approx(even.seconds.update, rel=0.1)
    assert tailed.partial[3] < 0.8 * tailed.ahead[3]
    assert list(tailed.ahead) == [0, 1, 3]
    assert list(tailed.partial) == [1, 3]
    eight = plan_for(recipe, 8, gpu, lognormal(800, 2400))
    assert eight.ahead[3] < 0.9 * tailed.ahead[3]
    assert eight.partial[3] == pytest.approx(tailed.partial[3], rel=0.15), "one GPU samples, however many train"


# verl, docs/advance/fully_async.md (Qwen2.5-Math-7B, DAPO, H20): seconds of a step, of generation, of old
# log-probabilities and of the update. Beside each what the virtual clock is off by.
COLOCATED = {
    32: (790.10, 357.41, 107.71, 313.81),
    64: (365.28, 150.72, 70.26, 133.41),
    128: (356.30, 177.85, 53.92, 113.81),
}
OFF = {32: -0.014, 64: -0.030, 128: -0.030}
# 64 + 64 GPUs by staleness_threshold (a share of a batch): step, update. Generation that nothing hides takes 128.47 s
# (threshold 0); what is hidden of it was not published, so the same is taken for all.
BY_STALENESS = {0.0: (231.34, 98.77), 0.1: (171.30, 109.12), 0.3: (146.11, 103.22), 0.5: (150.63, 113.16)}
GENERATION = 128.47
# A threshold of 0.1 lets a tenth of a batch be sampled ahead; whole batches (S = 1) are too optimistic for it by far.
OFF_BY_STALENESS = {0.0: -0.018, 0.1: -0.250, 0.3: -0.121, 0.5: -0.147}


def simulated_step(staleness: int, generate: float, update: float) -> float:
    recipe = load_recipe("tiny/grpo", [("rollout.staleness", str(staleness))]).resolve()
    return simulate(recipe, 12, generate=lambda batch: generate, update=lambda batch: update)[-1]


@pytest.mark.parametrize("num_gpus", COLOCATED)
def test_published_steps_in_turns(num_gpus: int) -> None:
    step, generate, score, update = COLOCATED[num_gpus]
    assert simulated_step(0, generate, score + update) / step - 1 == pytest.approx(OFF[num_gpus], abs=0.0006)


@pytest.mark.parametrize("threshold", BY_STALENESS)
def test_published_steps_by_staleness(threshold: float) -> None:
    step, update = BY_STALENESS[threshold]
    simulated = simulated_step(1 if threshold else 0, GENERATION, update)
    assert simulated / step - 1 == pytest.approx(OFF_BY_STALENESS[threshold], abs=0.0006)


def test_a_run_is_planned_for_by_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("tiny/grpo", [("rollout.max_tokens", "64")]).resolve()
    for name in ("runs/mine", "runs/tiny/grpo"):
        Path(name).mkdir(parents=True)
        RunDirectory(name).write_recipe(recipe)

    def planned(*words: str) -> str:
        assert main(["plan", *words, "--gpus", "H100"]) == 0
        return capsys.readouterr().out

    asked = planned("tiny/grpo", "--rollout.max_tokens", "64")
    assert planned("mine") == planned("runs/mine") == planned("runs/mine/recipe.yaml") == asked
    assert planned("mine", "--runs-dir", "runs") == asked
    assert planned("mine", "--rollout.max_tokens", "48") != asked
    assert planned("tiny/grpo") != asked, "a shipped recipe is meant by its name"
    Path("runs/sweep").mkdir()
    assert main(["plan", "runs/sweep", "--gpus", "H100"]) == 2
    assert "runs/sweep: this is a folder; give a recipe's YAML file, or a name" in capsys.readouterr().err
    assert main(["train", "runs/mine", "--dry-run"]) == 2
    assert "runs/mine: this is the folder of a run; give its recipe, runs/mine/recipe.yaml" in capsys.readouterr().err


def test_the_command_says_it_and_how_it_ends(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny/grpo", "--gpus", "2xH100"]) == 0
    shown = capsys.readouterr().out
    for part in ("weights", "gradients", "optimizer state", "activations", "logits", "key/value cache", "fits"):
        assert part in shown
    for part in ("generate", "update", "sync", "rollout.staleness 1"):
        assert part in shown
    assert "\nmain memory: 3.4 MiB while a process loads the model; as many at a time as the" in shown  # 4 · 886,144
    assert main(["plan", "preference/dpo", "--gpus", "H100"]) == 0
    assert "\nmain memory: 6.8 MiB while a process loads the model\n" in capsys.readouterr().out, "and its reference"
    options = ["--model.name", folder, "--prompt.max_prompt_tokens", "256", "--rollout.max_tokens", "512"]
    assert main(["plan", "tiny/grpo", "--gpus", "T4", *options]) == 1
    assert "does not fit" in capsys.readouterr().out
    tailed = ["--answer-tokens", "20", "--answer-p95", "40"]
    assert main(["plan", "tiny/grpo", "--gpus", "H100", *tailed]) == 0
    assert re.search(
        r"\d with rollout\.staleness 1 and rollout\.partial, where one GPU more samples\n", capsys.readouterr().out
    )
    for words, message in (
        (tailed[2:], "--answer-p95: give their mean, too, with --answer-tokens"),
        ([*tailed[:2], "--answers-of", "it"], "leave --answer-tokens and --answer-p95 out"),
        (["--answers-of", "it"], "--answers-of: it holds no rollouts"),
    ):
        assert main(["plan", "tiny/grpo", "--gpus", "H100", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", "dpo-preferences", "--gpus", "H100", "--answers-of", "it"]) == 2
    assert "--answers-of: answers are sampled by recipes with 'rollout'" in capsys.readouterr().err
    assert main(["plan", "tiny/grpo", "--gpus", "4xH10"]) == 2
    assert "Did you mean 'H100'" in capsys.readouterr().err
    assert main(["plan", "tiny/grpo", "--gpus", "H100", "--model.name", "nobody/there"]) == 2
    assert main(["plan", "tiny/grpo", "--gpus", "H100", "--rollout.promts", "4"]) == 2
    assert "Did you mean" in capsys.readouterr().err
