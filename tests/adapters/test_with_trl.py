"""One class in TRL's contract is played by TRL's trainer and here: the same tools, calls, tokens, masks and rewards."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder import Ladder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from closeness import approx
from page_python import python_of
from page_recipes import recipe_of_page
from posttrain.conformance.run import check_module
from posttrain.data.render import encode_prompt, stop_ids
from posttrain.data.render.rows import TokenRow, rows_of
from posttrain.data.render.template import build_template
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Component
from posttrain.sampling.episodes import build_stage
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import RolloutRequest, Sampler, build_grader, collect
from posttrain.training.step import learning_rate
from posttrain.types import Call, Example, Message
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.adapters
trl = pytest.importorskip("trl", reason="TRL is not installed")
GOALS = (3, 4)
TURNS = (
    '<tool_call>\n{"name": "climb", "arguments": {"rungs": 5}}\n</tool_call>',
    '<tool_call>\n{"name": "climb", "arguments": {"rungs": -2, "note": "too far"}}\n</tool_call>',
    "I am there.",
)


@pytest.fixture
def tokenizer() -> Any:
    """That of ``tiny`` with the chat template of a Qwen3 that does not think."""
    import trl

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template, tokenizer.eos_token = template.read_text(), "<|im_end|>"
    return tokenizer


def turns(tokenizer: Any) -> list[list[int]]:
    return [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TURNS]


def played_by_trl(tokenizer: Any, folder: Path) -> tuple[list[dict[str, Any]], list[list[int]], list[list[int]], Any]:
    """(the tools as it shows them, the ids of each completion, which of them the model wrote, the rewards)"""
    from datasets import Dataset
    from transformers.utils import get_json_schema
    from trl import GRPOConfig, GRPOTrainer

    class Scripted(GRPOTrainer):
        """What the model says is given; everything else is TRL's."""

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            ends = [ids.count(tokenizer.eos_token_id) for ids in prompt_ids]  # a turn and its reply have one each
            self.first = getattr(self, "first", min(ends))
            return [list(script[(n - self.first) // 2]) for n in ends], None

        def _generate(self, prompts):
            output = super()._generate(prompts)
            self.told = copy.deepcopy(output)
            return output

        def _calculate_rewards(self, *args, **kwargs):
            self.rewards = super()._calculate_rewards(*args, **kwargs)
            return self.rewards

    script = turns(tokenizer)
    rows = [{"prompt": [{"role": "user", "content": "Climb. "}], "goal": goal} for goal in GOALS]
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=400,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        shuffle_dataset=False,
    )
    trainer = Scripted(
        model=str(TINY),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=Ladder,
    )
    trainer.train()
    _, completion_ids, tool_mask, *_ = trainer.told
    return [get_json_schema(tool) for tool in trainer.tools], completion_ids, tool_mask, trainer.rewards[:, 0].tolist()


def played_here(tokenizer: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    declare_code(["ladder:Ladder"])
    recipe = validate_recipe(
        {
            "task": "stories",
            "prompt": {"template": "chat"},
            "environment": "ladder:Ladder",
            "rewards": ["environment"],
            "rollout": {"max_turns": 4},
            "objective": "grpo",
        }
    ).resolve()
    script = turns(tokenizer)
    examples = [Example(f"climb/{n}", (Message("user", "Climb. "),), meta={"goal": n}) for n in GOALS]
    stage = build_stage(recipe, build_template(recipe.prompt.template), tokenizer)
    assert stage is not None
    prompts = [encode_prompt(tokenizer, stage.template, one.messages) for one in examples]
    first = prompts[0].count(tokenizer.eos_token_id)
    engine = FakeEngine(lambda prompt, key: script[(prompt.count(tokenizer.eos_token_id) - first) // 2])
    sampler = Sampler(engine, tokenizer, build_grader(recipe.rewards, stage.template), 2000, stage=stage)
    request = RolloutRequest(examples, prompts, sampler.sampling(400, 1.0), (3, "rollout 0", 1), 2)
    schemas = [tool.schema for tool in stage.toolset.tools.values()]
    return schemas, [one for group in collect(sampler, request)[0] for one in group]


def without_returns(schema: Any) -> Any:
    """TRL's templates are told what a tool returns, too."""
    schema = json.loads(json.dumps(schema))
    schema["function"].pop("return", None)
    return schema


def test_a_class_is_played_as_trl_plays_it(tokenizer: Any, tmp_path: Path) -> None:
    Ladder.played.clear()
    their_tools, their_ids, their_masks, their_rewards = played_by_trl(tokenizer, tmp_path)
    theirs = [(one.goal, one.said, one.rung) for one in Ladder.played]
    Ladder.played.clear()
    tools, ours = played_here(tokenizer)
    mine = [(one.goal, one.said, one.rung) for one in Ladder.played if hasattr(one, "goal")]
    message = [(5, ""), (-2, "too far")]
    assert sorted(theirs) == sorted(mine) == [(3, message, 3)] * 2 + [(4, message, 3)] * 2
    assert [one.reward for one in ours] == their_rewards == [1.0, 1.0, 0.0, 0.0]
    assert [list(one.completion.ids) for one in ours] == their_ids
    assert [list(map(int, one.completion.own)) for one in ours] == their_masks
    assert {0, 1} == set(their_masks[0]), "what was told is in it"
    assert [one.completion.finish for one in ours] == ["stop"] * 4
    [[own], [other]] = tools, [without_returns(tool) for tool in their_tools]
    assert own["function"]["name"] == other["function"]["name"] == "climb"
    assert own["function"]["description"] == other["function"]["description"] == "Climb up or down."
    for name, given_arguments in other["function"]["parameters"]["properties"].items():
        shown = own["function"]["parameters"]["properties"][name]
        assert (shown["type"], shown["description"]) == (given_arguments["type"], given_arguments["description"])
    assert own["function"]["parameters"]["required"] == other["function"]["parameters"]["required"] == ["rungs"]


# --- every chat template that TRL ships ---

CHAT_TEMPLATES = sorted(path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion": "<eos>",
    "gemma": "<eos>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llava": "</s>",
    "muse": "<|eot|>",
    "phi3": "<|endoftext|>",
    "smolvlm": "<end_of_utterance>",
}
MARKERS = re.compile(
    r"<\|[^<>|\s]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^<>｜\s]+｜>|</?(?:think|tool_call|start_of_turn|end_of_turn|sop|s)>"
    r"|<end_of_utterance>|\[/?(?:INST|gMASK)\]|<bos>|<eos>"
)
CALLED = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}
Rows = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


CONVERSATIONS: dict[str, Rows] = {
    "one pair": [user(" What is\n2 + 2? "), says(" It is 4. \n")],
    "a system message": [{"role": "system", "content": "Be brief. "}, user("Hi"), says("Hello.")],
    "three turns": [user("a?"), says("One."), user("b?"), says("Two."), user("c?"), says("Three.")],
    "reasoning in the last": [user("Hi"), says("Hello."), user("2 + 2?"), says("4.", reasoning_content="Add.")],
    "reasoning in an earlier": [user("2 + 2?"), says("4.", reasoning_content="Add."), user("3 + 3?"), says("6.")],
    "reasoning in contents": [
        user("2 + 2?"),
        says("<think>\nAdd.\n</think>\n\n4."),
        user("3 + 3?"),
        says("<think>\nAgain.\n</think>\n\n6."),
    ],
    "a call with its result": [
        user("Cold?"),
        says("", tool_calls=[CALLED]),
        {"role": "tool", "name": "weather", "content": "21 C"},
        says("No."),
    ],
    "a call at the end": [user("Cold?"), says("", tool_calls=[CALLED])],
}
REFUSALS = (
    "cannot render the roles",  # the template says what it does not take
    "must show each",  # it takes lists of parts, as a processor with images gives them
    "differently than after its prompt",  # the prompt opens a block of thinking that the turn does not have
)


@cache
def tokenizer_with(name: str) -> Any:
    """A byte-level tokenizer that has the special tokens of a template."""
    source = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = next((end for start, end in EOS.items() if name.startswith(start)), "<|im_end|>")
    markers = sorted({*MARKERS.findall(source), end, "<s>"})
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in markers])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=end, chat_template=source)


def own_rendering(tokenizer: Any, rows: Rows, tools: Any, *, prompt: bool = False) -> str:
    """The template's text by transformers, with the arguments of calls as the template takes them."""
    try:
        return tokenizer.apply_chat_template(rows, tools=tools, tokenize=False, add_generation_prompt=prompt)
    except Exception:  # noqa: BLE001 (whatever a template raises)
        rows = copy.deepcopy(rows)
        for call in (call for row in rows for call in row.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return tokenizer.apply_chat_template(rows, tools=tools, tokenize=False, add_generation_prompt=prompt)


def as_shown(tokenizer: Any, rows: Rows, tools: Any) -> Rows:
    """The rows as the template shows all of them: what it has no form for is in the contents."""
    probe = [user("q"), says("a", reasoning_content="zqthought", thinking="zqthought")]
    has_thinking = "zqthought" in own_rendering(tokenizer, probe, None)
    has_calls = has_results = False
    calling = [user("q"), says("", tool_calls=[CALLED]), {"role": "tool", "name": "weather", "content": "zqresult"}]
    with suppress(Exception):
        has_calls = "Paris" in own_rendering(tokenizer, calling[:2], None)
    with suppress(Exception):
        has_results = "zqresult" in own_rendering(tokenizer, [user("q"), says("a"), calling[2], says("b")], None)
    shown = []
    for row in copy.deepcopy(rows):
        thinking = row.pop("reasoning_content", None)
        if row["content"].startswith("<think>"):
            thinking, row["content"] = row["content"].removeprefix("<think>\n").split("\n</think>\n\n")
        if thinking and has_thinking:
            row |= {"reasoning_content": thinking, "thinking": thinking}
        elif thinking:
            row["content"] = f"<think>\n{thinking}\n</think>\n\n{row['content']}"
        if "tool_calls" in row and not has_calls:
            row = says("<tool>weather: Paris</tool>")
        if row["role"] == "tool" and not has_calls and not has_results:
            row = user(f"<result>{row['content']}</result>")
        row = row | ({"tool_call_id": "call00000"} if row["role"] == "tool" else {})
        shown.append(row)
    return shown


def rows_made(tokenizer: Any, rows: Rows, tools: Any) -> list[TokenRow] | UsageError:
    read = [
        Message(
            row["role"],
            row["content"],
            reasoning=row.get("reasoning_content"),
            calls=tuple(Call("weather", '{"city": "Paris"}', "", "ok") for _ in row.get("tool_calls", ())),
            name=row.get("name"),
        )
        for row in rows
    ]
    variables = {} if tools is None else {"tools": tools}
    example = Example("e", tuple(read[:-1]), conversation=tuple(read), variables=variables)
    template = build_template(Component(name="chat"))
    try:
        units = list(rows_of(tokenizer, template, example, "demonstration", "assistant"))
    except UsageError as error:
        return error
    assert not any(isinstance(unit, str) for unit in units), units
    return [row for unit in units for row in unit]  # type: ignore[misc]


def trained(tokenizer: Any, made: list[TokenRow]) -> list[tuple[str, str]]:
    """(the text before, the text) of each run of trained tokens."""
    found = []
    for row in made:
        is_trained = [n >= row.prompt_length and n not in row.heard for n in range(len(row.ids))]
        starts = [n for n, one in enumerate(is_trained) if one and not is_trained[n - 1]]
        for start in starts:
            end = next((n for n in range(start, len(row.ids)) if not is_trained[n]), len(row.ids))
            found.append((tokenizer.decode(row.ids[:start]), tokenizer.decode(row.ids[start:end])))
    return found


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_conversations_are_the_text_of_trls_chat_templates(name: str) -> None:
    """Text and trained parts. Qwen3's empty block of thinking, which no prompt shows, is not trained."""
    tokenizer, empty = tokenizer_with(name), "<think>\n\n</think>\n\n"
    for kind, rows in CONVERSATIONS.items():
        tools = [TOOL] if "call" in kind and re.search(r"\btools\b", tokenizer.chat_template) else None
        made = rows_made(tokenizer, rows, tools)
        if isinstance(made, UsageError):
            assert any(reason in str(made) for reason in REFUSALS), (kind, str(made))
            continue
        shown, found = as_shown(tokenizer, rows, tools), trained(tokenizer, made)
        places = [place for place, row in enumerate(shown) if row["role"] == "assistant"]
        assert len(found) == len(places), kind
        ends = tokenizer.convert_ids_to_tokens(sorted(stop_ids(tokenizer, build_template(Component(name="chat")))))
        for place, (before, span) in zip(places, found, strict=True):
            prompt = own_rendering(tokenizer, shown[:place], tools, prompt=True)
            assert before == prompt, kind
            whole = own_rendering(tokenizer, shown[: place + 1], tools)
            if not whole.startswith(prompt):  # the prompt opens thinking that the history does not have
                assert prompt.rstrip().endswith("<think>"), kind
                assert span.removeprefix("\n</think>\n\n").removesuffix(ends[-1]).strip() in whole or "</think>" in span
                continue
            own = whole.removeprefix(prompt).rstrip()
            own = own.removeprefix(empty) if name == "qwen3" else own
            # before another message the end of a conversation is left out; where a template writes no end, one is added
            assert own.startswith(span) or span in {own + end for end in ends}, kind
            is_last = place == places[-1]
            assert not is_last or span in {own, *(own + end for end in ends)}, kind


def test_trls_losses_and_scores_are_as_recorded():
    report = check_module("trl")
    root = Path(__file__).resolve().parents[2]
    recorded = json.loads((root / "benchmarks" / "results" / "conformance.json").read_text(encoding="utf-8"))["trl"]
    found = {(one.function, one.case, one.check): one.status for one in report.findings}
    assert found == {(one["function"], one["case"], one["check"]): one["status"] for one in recorded["findings"]}


def test_a_trainer_of_trl_trains_with_the_loss_of_the_page(tmp_path: Path):
    """Two steps of TRL's own trainer on the embedded model; its loss is ours, and a gradient reaches the model."""
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "in-your-own-loop.md"
    (of_trl,) = [text for text in python_of(page) if "from trl import" in text]
    program = f"""
{of_trl}
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from posttrain.models.sources import TINY

config = GRPOConfig(
    output_dir={str(tmp_path)!r}, max_steps=2, per_device_train_batch_size=4, num_generations=4,
    gradient_accumulation_steps=2, steps_per_generation=2, max_completion_length=8, use_cpu=True, report_to=[],
    logging_steps=1, save_strategy="no", bf16=False, learning_rate=1e-3,
)
model = AutoModelForCausalLM.from_pretrained(TINY)
before = [weight.detach().clone() for weight in model.parameters()]
trainer = CispoTrainer(
    model=model, args=config, processing_class=AutoTokenizer.from_pretrained(TINY),
    reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
    train_dataset=Dataset.from_dict({{"prompt": ["Eva has 3 shells."] * 16}}),
)
trainer.train()
moved = sum(float((a - b).abs().sum()) for a, b in zip(before, model.parameters(), strict=True))
print("MOVED", moved > 0.0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MOVED True" in done.stdout


# Fields of GRPOConfig that change no number of a run on one GPU: machinery, logs, names of places.
MACHINERY = """
    accelerator_config auto_find_batch_size average_tokens_across_devices batch_eval_metrics cache_implementation
    chat_template_kwargs data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed
    disable_tqdm do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint eval_accumulation_steps
    eval_delay eval_do_concat_batches eval_on_start eval_steps eval_use_gather_object fp16_full_eval bf16_full_eval fsdp
    fsdp_config full_determinism generation_kwargs gradient_checkpointing_kwargs activation_checkpointing_kwargs
    greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names length_column_name
    liger_kernel_config load_best_model_at_end local_rank log_completions log_completions_hub_repo log_level
    log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lr_scheduler_kwargs max_tool_calling_iterations metric_for_best_model
    model_init_kwargs multi_objective_aggregation num_completions_to_print num_generations_eval optim_args output_dir
    pad_to_multiple_of parallelism_config per_device_eval_batch_size prediction_loss_only project push_to_hub
    remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
    save_on_each_node save_only_model save_strategy save_total_limit shuffle_dataset skip_memory_metrics
    torch_compile_backend torch_compile_mode torch_empty_cache_steps train_sampling_strategy trackio_bucket_id
    trackio_space_id trackio_static_space_id transformers_continuous_batching_config trust_remote_code use_cache
    use_cpu use_liger_kernel use_transformers_continuous_batching use_transformers_paged torch_compile
"""
# Fields that change numbers, with the value by which they do nothing; what is below another field acts with it alone.
INACTIVE: dict[str, Any] = {
    "delta": None, "disable_dropout": False, "entropy_coef": 0.0, "use_adaptive_entropy": False, "fp16": False,
    "importance_sampling_level": "token", "label_smoothing_factor": 0.0, "mask_truncated_completions": False,
    "min_p": None, "neftune_noise_alpha": None, "off_policy_mask_threshold": None, "optim_target_modules": None,
    "repetition_penalty": 1.0, "reward_weights": None, "router_aux_loss_coef": None, "sync_ref_model": False,
    "top_entropy_quantile": 1.0, "top_k": 0, "use_vllm": False, "eval_strategy": "no", "max_steps": -1, "tf32": None,
    "cast_lm_head_to_fp32": False,
}  # fmt: skip
BELOW = {
    "vllm_": ("use_vllm", False), "sapo_": ("loss_type", "dapo"), "vespo_": ("loss_type", "dapo"),
    "entropy_coef_": ("use_adaptive_entropy", False), "entropy_target": ("use_adaptive_entropy", False),
    "ref_model_": ("sync_ref_model", False), "use_bias_correction_kl": ("beta", 0.0),
}  # fmt: skip


def test_recipe_of_the_page_equals_trls_default_run_key_by_key(tmp_path: Path) -> None:
    """Every field of ``GRPOConfig`` that changes a number is compared, or does nothing by its default."""
    assert trl.__version__ == "1.16.0"
    config = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    ours = recipe_of_page("docs/coming-from/trl.md", "trl-defaults.yaml").dump()
    train, rollout, optimizer = ours["train"], ours["rollout"], ours["optimizer"]
    has_no_kl = not ours["regularize"]["kl_coef"]
    precision = "fp32"
    if config.bf16:
        precision = "bf16"
    prompts = config.generation_batch_size // config.num_generations // config.steps_per_generation
    compared = {
        "learning_rate": train["lr"],
        "lr_scheduler_type": train["schedule"],
        "warmup_steps": train["warmup_steps"],
        "num_train_epochs": train["num_epochs"],
        "max_grad_norm": train["max_grad_norm"],
        "num_iterations": train["ppo_epochs"],
        "steps_per_generation": train["num_minibatches"],
        "per_device_train_batch_size": train["micro_batch_rows"],
        "gradient_accumulation_steps": prompts * rollout["group_size"] // train["micro_batch_rows"],
        "generation_batch_size": rollout["num_prompts"] * rollout["group_size"],
        "gradient_checkpointing": train["gradient_checkpointing"],
        "activation_checkpointing": train["gradient_checkpointing"],
        "seed": train["seed"],
        "save_steps": train["save_every"],
        "weight_decay": optimizer["weight_decay"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "adam_epsilon": optimizer["eps"],
        "num_generations": rollout["group_size"],
        "max_completion_length": rollout["max_tokens"],
        "temperature": rollout["temperature"],
        "top_p": rollout["top_p"],
        "beta": ours["regularize"]["kl_coef"],
        "epsilon": ours["objective"]["clip_low"],
    }
    assert {name: getattr(config, name) for name in compared} == compared
    assert has_no_kl
    assert config.epsilon_high in (None, ours["objective"]["clip_high"])
    assert str(config.optim.value).startswith(ours["optimizer"]["name"])
    assert (config.loss_type, ours["aggregate"]["name"]) == ("dapo", "token_mean")
    assert (config.scale_rewards, ours["advantage"]) == ("group", {"name": "normalized", "epsilon": 1e-4})
    assert (precision, ours["model"]["dtype"]) == (train["precision"], "fp32")
    assert train["min_lr_ratio"] == 0.0, "transformers' linear schedule ends at 0"
    assert rollout["old_logprobs"] == "trainer", "without vLLM the trainer's own, detached"
    assert ours["eval"]["every"] == 0
    assert {name: getattr(config, name) for name in INACTIVE} == INACTIVE
    for above, value in BELOW.values():
        assert getattr(config, above) == value
    settled = {*compared, *INACTIVE, *MACHINERY.split(), "optim", "loss_type", "scale_rewards", "bf16", "epsilon_high"}
    every = {field.name for field in dataclasses.fields(config)}
    assert {name for name in every - settled if not name.startswith(tuple(BELOW))} == set()
    assert not settled - every


def test_linear_schedule_of_the_page_equals_that_of_transformers() -> None:
    """Six steps with no warm-up: the rate of step s is (1 − (s − 1) / 6) of the highest, in both."""
    from transformers import get_linear_schedule_with_warmup

    recipe = recipe_of_page("docs/coming-from/trl.md", "trl-defaults.yaml")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=recipe.train.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, recipe.train.warmup_steps, 6)
    theirs = []
    for _ in range(6):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    section = recipe.train.model_copy(update={"steps": 6, "num_epochs": None})
    assert [learning_rate(section, step) for step in range(1, 7)] == approx(theirs, rel=1e-12)
