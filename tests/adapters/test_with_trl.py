"""One class in TRL's contract is played by TRL's trainer and here: the same tools, calls, tokens, masks and rewards."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ladder import Ladder
from transformers import AutoTokenizer

from posttrain.data.render import encode_prompt
from posttrain.data.render.template import build_template
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.sampling.episodes import build_stage
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import RolloutRequest, Sampler, build_grader, collect
from posttrain.types import Example, Message
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.adapters
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
