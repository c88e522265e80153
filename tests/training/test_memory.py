"""The memory that a recipe is said to take, part by part, against what is really alive in small models."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from closeness import approx
from posttrain.models.forward import kept as kept_bytes
from posttrain.models.forward.kept import Micro, logit_bytes
from posttrain.models.load import load_tokenizer
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.sampling.base import Reply, Sampling
from posttrain.sampling.native import engine as native_engine
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.schedule import Schedule
from posttrain.training.build import TrainerState, prepare
from posttrain.training.memory import Memory, estimate_memory, memory_of
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Loss, Outputs, Sample, collate
from sampling.respondents import Scripted

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 352,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 400,
    },
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4},
}
PROMPT, ANSWER = 64, 80
TOKENIZER = load_tokenizer("tiny")
VOCABULARY = len(TOKENIZER)
COMMON = {"task.size": "40", "task.max_steps": "1", "eval.every": "0", "prompt.max_prompt_tokens": str(PROMPT)}
SAMPLED = {"rollout.group_size": "8", "rollout.max_tokens": str(ANSWER)}
RECIPES: dict[str, tuple[str, dict[str, str]]] = {
    "sft": ("tiny/sft", {"data.batch_size": "8", "data.max_length": "128"}),
    "grpo": ("tiny/grpo", {"rollout.num_prompts": "1", "regularize.kl_coef": "0.1", **SAMPLED}),
    "dpo": ("preference/dpo", {"rollout.num_prompts": "4", "train.num_minibatches": "1", **SAMPLED}),
    "lora-bf16": (
        "tiny/grpo",
        {
            "rollout.num_prompts": "1",
            **SAMPLED,
            "model.adapter.rank": "8",
            "model.adapter.targets": "[q_proj, v_proj, o_proj, up_proj]",
            "model.dtype": "bfloat16",
        },
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of each shape with random weights, on disk."""
    root, made = tmp_path_factory.mktemp("models"), {}
    for name, shape in SHAPES.items():
        ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
        room = {"vocab_size": VOCABULARY, "n_positions" if name == "gpt2" else "max_position_embeddings": 512}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, **room, **ids))
        model.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
        made[name] = str(root / name)
    return made


def recipe_of(kind: str, folder: str, **more: str) -> Recipe:
    name, options = RECIPES[kind]
    named = {key.replace("__", "."): value for key, value in more.items()}
    return load_recipe(name, list(({"model.name": folder} | COMMON | options | named).items())).resolve()


def longest_batch(kind: str) -> Batch:
    """The micro-batch of the recipes above in which every row is as long as it may be."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()

    if kind == "sft":
        return collate([Sample(draw(128), [False, *[True] * 127], group=row) for row in range(8)])
    samples = []
    groups, rows = (4, 2) if kind == "dpo" else (1, 8)
    for group in range(groups):
        prompt = draw(PROMPT)
        mask = [False] * PROMPT + [True] * ANSWER
        samples += [Sample(prompt + draw(ANSWER), mask, group=group, prefix=PROMPT) for _ in range(rows)]
    return collate(samples)


def nll(outputs: Outputs, batch: Batch) -> Loss:
    return Loss(-outputs.logprobs, {})


def learn(parts: TrainerState, recipe: Recipe, batch: Batch) -> None:
    accumulate(Method(parts.method.forward, nll, lambda mask: mask / mask.sum()), batch, recipe.train)


def value_error(outputs: Outputs, batch: Batch) -> Loss:
    assert outputs.scores is not None
    return Loss(outputs.scores**2 - outputs.logprobs, {})


def num_bytes(tensors: Iterator[Any] | Sequence[Any]) -> int:
    """Return the bytes of tensors; one that occurs twice counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def keeping(parameters: Sequence[torch.Tensor]) -> Iterator[dict[str, int]]:
    """Bytes that autograd keeps, by storage and without parameters: of logits, and of all else."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    alive: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            alive.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    kept: dict[str, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
    is_logits = {key: t.shape[-1:] == (VOCABULARY,) for key, t in alive.items()}
    for name, wanted in (("logits", True), ("activations", False)):
        kept[name] = sum(t.untyped_storage().nbytes() for key, t in alive.items() if is_logits[key] is wanted)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside the block held at a time; ``before`` was there."""

    def __init__(self, before: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {t.untyped_storage()._cdata: None for t in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def gone(_: Any) -> None:
            self.known.pop(key, None)
            self.now -= size

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def peak_of(parts: TrainerState, recipe: Recipe, batch: Batch) -> int:
    """Return the most that a micro-batch held at a time in addition to weights and gradients, in bytes."""
    learn(parts, recipe, batch)  # from now on there are gradients that are added to
    grads = [p.grad for _, p in parts.parameters if p.grad is not None]
    with Peak([*parts.model.parameters(), *grads]) as peak:
        learn(parts, recipe, batch)
    return peak.most


CASES = [("sft", "qwen3"), ("grpo", "qwen3"), ("lora-bf16", "llama"), ("dpo", "gpt2")]


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_parts_are_what_is_alive(kind: str, model: str, folders: dict[str, str]) -> None:
    recipe = recipe_of(kind, folders[model])
    message = estimate_memory(recipe)
    assert isinstance(message, Memory)
    parts = prepare(recipe)
    assert num_bytes(list(parts.model.parameters())) == message.weights
    frozen = parts.reference._frozen if parts.reference is not None else None
    assert message.reference == (num_bytes(list(frozen.model.parameters())) if frozen is not None else 0)
    assert (message.reference > 0) == (kind in ("grpo", "dpo"))
    batch = longest_batch(kind)
    with keeping(list(parts.model.parameters())) as kept:
        learn(parts, recipe, batch)
    trained = [p for _, p in parts.parameters]
    assert num_bytes([p.grad for p in trained if p.grad is not None]) == message.gradients
    parts.optimizer.step()
    state = [x for values in parts.optimizer.state.values() for x in values.values()]
    assert num_bytes(state) == message.optimizer
    assert message.activations == approx(kept["activations"], rel=0.15)
    assert kept["logits"] < message.logits
    parts.optimizer.zero_grad(set_to_none=True)
    assert message.activations + message.logits == approx(peak_of(parts, recipe, batch), rel=0.15)
    assert message.update == approx(
        message.weights
        + message.reference
        + message.optimizer
        + message.gradients
        + message.activations
        + message.logits
    )


def test_recomputed_activations_are_those_of_one_layer(folders: dict[str, str]) -> None:
    recipe = recipe_of("grpo", folders["llama"], train__gradient_checkpointing="true")
    message, usual = estimate_memory(recipe), estimate_memory(recipe_of("grpo", folders["llama"]))
    assert isinstance(message, Memory)
    assert isinstance(usual, Memory)
    assert message.activations < 0.5 * usual.activations
    measured = peak_of(prepare(recipe), recipe, longest_batch("grpo"))
    assert message.activations + message.logits == approx(measured, rel=0.15)


def test_a_critic_and_a_reward_head_are_heads(folders: dict[str, str]) -> None:
    recipe = recipe_of("grpo", folders["qwen3"])
    sampled = (
        {"model.name": folders["qwen3"]}
        | COMMON
        | SAMPLED
        | {"rollout.num_prompts": "1", "train.num_minibatches": "1"}
        | {"task.min_steps": "1"}
    )
    ppo = load_recipe("rl/ppo", list(sampled.items())).resolve()
    message, without = estimate_memory(ppo), estimate_memory(recipe)
    assert isinstance(message, Memory)
    assert isinstance(without, Memory)
    parts = prepare(ppo)
    learned = [p for module in parts.heads.values() for p in module.parameters() if p.requires_grad]
    assert message.heads == 16 * sum(p.numel() for p in learned)
    batch = longest_batch("grpo")
    with keeping([*parts.model.parameters(), *learned]) as kept:
        accumulate(Method(parts.method.forward, value_error, lambda mask: mask / mask.sum()), batch, ppo.train)
    assert message.activations == 2 * without.activations
    assert message.activations == approx(kept["activations"], rel=0.15)
    rm = load_recipe("tiny/rm", [("model.name", folders["qwen3"])]).resolve()
    scorer = estimate_memory(rm)
    assert isinstance(scorer, Memory)
    assert (scorer.heads, scorer.logits, scorer.kv_cache, scorer.rollouts) == (16 * 128, 0, 0, 0)


@pytest.fixture
def cache_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the cache at the decode steps of sampling."""
    shown: list[int] = []

    class Watched(Schedule):
        def _drop_finished(self) -> None:
            cache = self.cache
            shared = [] if cache.shared is None else [*cache.shared.keys, *cache.shared.values]
            shown.append(sum(t.untyped_storage().nbytes() for t in (*cache.keys, *cache.values, *shared)))
            super()._drop_finished()

    monkeypatch.setattr(native_engine, "Schedule", Watched)
    return shown


@pytest.mark.parametrize("group", [4, 1])
def test_the_cache_of_sampling(group: int, folders: dict[str, str], cache_bytes: list[int]) -> None:
    prompts = 4 // group
    recipe = recipe_of(
        "grpo",
        folders["llama"],
        rollout__num_prompts=str(prompts),
        rollout__group_size=str(group),
        rollout__max_tokens="300",
        advantage__name="raw" if group == 1 else "normalized",
    )
    message = estimate_memory(recipe)
    assert isinstance(message, Memory)
    engine = NativeEngine(AutoModelForCausalLM.from_pretrained(folders["llama"]).eval())
    keys = [[100 * p + i for i in range(group)] for p in range(prompts)]
    engine.generate([[5 + p] * PROMPT for p in range(prompts)], keys, Sampling(max_tokens=300, temperature=1.0))
    assert message.kv_cache == approx(max(cache_bytes), rel=0.15)
    assert message.sampling == message.weights + message.optimizer + message.reference + message.kv_cache


def test_the_cache_of_turns_has_room_for_all_of_them(folders: dict[str, str], cache_bytes: list[int]) -> None:
    recipe = recipe_of(
        "grpo",
        folders["qwen3"],
        environment="calculator",
        rollout__num_prompts="1",
        rollout__group_size="4",
        rollout__max_tokens="400",
        rollout__max_turns="12",
        rollout__max_turn_tokens="64",
    )
    message = estimate_memory(recipe)
    assert isinstance(message, Memory)

    def answer(prompt: int, sample: int, turn: int, ids: Sequence[int]) -> Reply:
        return Reply(finish="out_of_turns") if turn == 11 else Reply((7, 8))

    engine = NativeEngine(AutoModelForCausalLM.from_pretrained(folders["qwen3"]).eval())
    stop = frozenset(range(0, VOCABULARY, 30))  # a turn ends by chance, after 30 tokens in the mean
    sampling = Sampling(max_tokens=400, temperature=1.0, stop_ids=stop)
    [group] = engine.converse([[5] * PROMPT], [[1, 2, 3, 4]], sampling, Scripted(answer))
    assert max(len(completion.ids) for completion in group) > 300
    assert max(cache_bytes) <= message.kv_cache <= 2.3 * max(cache_bytes)


def test_the_cache_of_a_server_is_not_counted(folders: dict[str, str]) -> None:
    own, served = (
        estimate_memory(recipe_of("grpo", folders["qwen3"], **engine)) for engine in ({}, {"rollout__engine": "vllm"})
    )
    assert isinstance(own, Memory)
    assert served == replace(own, kv_cache=0)


def test_logits_of_a_large_vocabulary_worked_by_hand():
    """110 of 2,048 trained tokens at a time at V = 151,936; a CPU keeps the probabilities of 883 for a trained head."""
    config, micro = SimpleNamespace(vocab_size=151_936, hidden_size=896), Micro(1, 1, 0, 2049, 2048)
    frozen = 110 * 16 * 151_936
    assert logit_bytes(config, micro, 4, None, head_trained=False) == frozen
    assert logit_bytes(config, micro, 4, None, head_trained=True) == frozen + 4 * (896 + 883) * 151_936
    on_gpu = 1766 * 16 * 151_936
    assert logit_bytes(config, micro, 4, 80 << 30, head_trained=True) == on_gpu + 4 * (896 + 2048) * 151_936
    few = Micro(1, 1, 0, 65, 64)  # up to 128: two pieces
    assert logit_bytes(config, few, 4, None, head_trained=True) == frozen + 4 * (896 + 128) * 151_936


QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "num_key_value_heads": 8}
QWEN3_SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288},
    "14b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17_408},
}


@pytest.mark.parametrize(
    ("row", "rollout"),
    [
        ("sft-0.6b-8k", None),
        ("rl-0.6b-16k", (1, 2, 512, 15_872)),
        ("rl-0.6b-lora-16k", (1, 2, 512, 15_872)),
        ("rl-8b-lora", (2, 8, 512, 1024)),
        ("rl-14b-lora", (1, 8, 512, 3584)),
    ],
)
def test_plan_of_an_update_is_within_15_percent_of_what_an_h100_took(
    row: str, rollout: tuple[int, int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of ``benchmarks/gpu.py``, as recipes; products in bf16, torch 2.11."""
    monkeypatch.setattr(kept_bytes, "_repeats_keys", lambda: True)
    size, is_lora = row.split("-")[1], "lora" in row
    prompts, group, prompt, answer = rollout or (2, 1, 64, 8192)
    recipe: dict[str, Any] = {
        "model": {"name": "tiny"} | ({"dtype": "bf16", "adapter": {"rank": 32}} if is_lora else {}),
        "task": {"name": "stories", "size": 64},
        "prompt": {"max_prompt_tokens": prompt},
        "train": {"precision": "bf16", "gradient_checkpointing": size != "0.6b"},
    }
    if rollout is None:
        recipe |= {"objective": "cross_entropy", "data": {"batch_size": prompts, "max_length": answer}}
    else:
        sampled = {"num_prompts": prompts, "group_size": group, "max_tokens": answer, "old_logprobs": "trainer"}
        recipe |= {"objective": "grpo", "rewards": ["correct"], "rollout": sampled}
    config = AutoConfig.for_model("qwen3", **QWEN3, **QWEN3_SHAPES[size], tie_word_embeddings=size == "0.6b")
    measured = json.loads((RESULTS / "gpu-nvidia-h100-80gb-hbm3.json").read_text())["rows"][row]["peak_gib"]
    planned = memory_of(validate_recipe(recipe).resolve(), config, int(79.18 * 2**30)).update / 2**30
    assert planned == approx(measured, rel=0.15)
