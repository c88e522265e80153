"""SmolLM2-135M from its own file, where that is at hand: ``POSTTRAIN_MODELS`` names its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain as pt
from closeness import assert_close, logprob_rounding
from posttrain.cli import main
from posttrain.models.load import load_model
from posttrain.models.published import fetch
from posttrain.models.published.catalog import PUBLISHED
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import ModelSection
from posttrain.store.checkpoint_files import digest_of

NAME = "smollm2-135m"
FILE = Path(os.environ.get(fetch.LOCAL) or "none") / Path(PUBLISHED[NAME].member).name
LARGEST_LOGIT = 32.0
QUESTION = "What is 2 plus 3?"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILE.is_file(), reason=f"{fetch.LOCAL} has no {FILE.name}")]


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache, and no index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.delenv(fetch.LOCAL, raising=False)
        yield


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(FILE.parent), gguf_file=FILE.name, dtype=torch.float32).eval()


def test_published_model_is_taken_from_a_folder_and_has_the_logits_of_transformers_reader(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fetch.LOCAL, str(FILE.parent))
    assert digest_of(FILE) == PUBLISHED[NAME].member_sha256
    assert Path(resolve_model_name(NAME), "chat_template.jinja").is_file()
    loaded = load_model(ModelSection(name=NAME, dtype="fp32"), seed=0)
    ids = torch.tensor([loaded.tokenizer(f"<|im_start|>user\n{QUESTION}<|im_end|>\n").input_ids])
    with torch.no_grad():
        ours = loaded.model.eval()(ids).logits
        assert torch.equal(ours, theirs(ids).logits)
    assert ours.std() > 1


def test_generate_and_chat_answer_what_transformers_generates(
    theirs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (answer,) = pt.generate(str(FILE), [QUESTION], temperature=0, max_tokens=12, progress=False)
    tokenizer = load_model(ModelSection(name=str(FILE), dtype="fp32"), seed=0).tokenizer
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    expected = theirs.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=2)[0, ids.shape[1] :]
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.text.strip()
    lines = iter([QUESTION])

    def typed(_: str = "") -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", str(FILE), "--temperature", "0", "--max-tokens", "12"]) == 0
    assert answer.text.split("\n")[0].strip() in capsys.readouterr().out


def test_one_step_of_grpo_raises_the_likelihood_of_what_had_an_advantage(tmp_path: Path) -> None:
    """LoRA on the real weights: the sampler's log-probabilities are the trainer's, and one update goes uphill."""
    small: dict[str, Any] = {"group_size": 4, "num_prompts": 2, "rollout__max_tokens": 8, "lr": 5e-4}
    model = {"name": str(FILE), "adapter": {"kind": "lora", "rank": 16}}
    rows = [{"question": f"What is {n} plus 3?", "answer": str(n + 3)} for n in (2, 4)]
    trainer = pt.Trainer(model, data=rows, rewards=["correct"], prompt__template="chat", runs_dir=tmp_path, **small)
    groups = trainer.sample(trainer.prompts(1))
    for group in groups:
        for number, rollout in enumerate(group):
            rollout.advantage = 1.0 - 2.0 * (number % 2)
    batch = trainer.batch(groups)
    before = _logprobs(trainer, batch)
    drawn = batch.field("old_logprobs")[batch.mask]
    assert_close(before[batch.mask], drawn.to(before.dtype), atol=logprob_rounding(30, size=LARGEST_LOGIT), rtol=0)
    frozen = {name: one.clone() for name, one in trainer.model.named_parameters() if not one.requires_grad}
    trainer.forward_backward(batch)
    assert 0 < trainer.optim_step() < 1e3
    after = _logprobs(trainer, batch)
    gained = ((after - before) * batch.field("advantages"))[batch.mask].sum()
    assert gained > 0
    changed = [name for name, one in trainer.model.named_parameters() if name in frozen and not one.equal(frozen[name])]
    assert changed == []
    trainer.close()


def _logprobs(trainer: pt.Trainer, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return trainer.parts.learning().forward(batch).logprobs.cpu()
