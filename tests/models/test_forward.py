"""The packed forward pass against the modules' own, for every family; and the split of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import (
    CONFIGS,
    LOGPROBS,
    OWN_ATTENTION,
    SHAPE,
    gradients,
    ragged_batch,
    random_model,
    relative_difference,
    unshared,
)
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig

from closeness import allclose, approx, assert_close, logprob_rounding, rounding
from posttrain.algorithms.objectives.primitives import row_last
from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward, Precision
from posttrain.models.forward.packing import pack
from posttrain.models.forward.predictions import MAX_LOGIT_ELEMENTS, Entropy, gpu_memory_of, max_logit_elements
from posttrain.models.heads import ScalarHead, score_logits
from posttrain.types import Batch, Outputs, Sample, collate
from refusing import refuses


def reference_logprobs(
    model: torch.nn.Module, batch: Batch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row alone through the model, float64 softmax."""
    logprobs = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    entropy = torch.zeros_like(logprobs)
    for b in range(batch.num_rows):
        n = int(batch.lengths[b])
        logits = model(batch.tokens[b : b + 1, :n], use_cache=False).logits[0].double() / temperature
        table = logits.log_softmax(-1)
        for t in range(1, n):
            if batch.mask[b, t]:
                logprobs[b, t] = table[t - 1, batch.tokens[b, t]]
                entropy[b, t] = -(table[t - 1].exp() * table[t - 1]).sum()
    return logprobs, entropy


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_packed_equals_each_row_alone(family: str):
    model = random_model(family)
    batch = ragged_batch()
    expected, entropy = reference_logprobs(model, batch, temperature=0.7)
    forward = Forward(model, temperature=0.7)
    assert forward.path == "packed"
    outputs = forward(batch)
    assert_close(outputs.logprobs.double(), expected, atol=LOGPROBS, rtol=0)
    assert_close(outputs.entropy.double(), entropy, atol=LOGPROBS, rtol=0)
    assert expected.abs().max() > 3, "the model must not be near uniform"


@pytest.mark.parametrize("family", OWN_ATTENTION)
@torch.no_grad()
def test_attention_with_sinks_or_a_cap_stays_the_model_s_own(family: str):
    """SDPA has neither: it refuses the cap of scores, and leaves sinks out in silence."""
    model = random_model(family)
    batch = ragged_batch()
    expected, _ = reference_logprobs(model, batch)
    forward = Forward(model)
    assert forward.path == "padded"
    assert_close(forward(batch).logprobs.double(), expected, atol=LOGPROBS, rtol=0)
    assert expected.abs().max() > 3, "the model must not be near uniform"


def test_a_shared_prompt_is_computed_once():
    batch = ragged_batch()
    packing = pack(batch)
    prompts = 3 + 7 + 11
    answers = int(sum(n - 1 - p for n, p in zip(batch.lengths[:9], batch.prefix[:9], strict=True)))
    assert packing.num_tokens == prompts + answers + 7 + 1
    assert pack(unshared(batch)).num_tokens == int((batch.lengths - 1).sum())


def test_where_heads_read_worked_by_hand():
    """A shared prompt 5 6 7 with answers 1 and 2 3, and a row 9 8 of its own: one token to train in each kind."""
    batch = collate(
        [
            Sample([5, 6, 7, 1], [False, False, False, True], group=0, prefix=3),
            Sample([5, 6, 7, 2, 3], [False, False, False, True, True], group=0, prefix=3),
            Sample([9, 8], [False, True], group=1, prefix=1),
        ]
    )
    before, at = pack(batch), pack(batch, reads="at")
    assert before.tokens[: before.num_tokens].tolist() == [5, 6, 7, 2, 9]
    assert before.positions[: before.num_tokens].tolist() == [0, 1, 2, 3, 0]
    assert before.predictors[:4].tolist() == [2, 2, 3, 4]
    assert before.readers is None
    assert at.tokens[: at.num_tokens].tolist() == [5, 6, 7, 1, 2, 3, 9, 8]
    assert at.positions[: at.num_tokens].tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert at.predictors[:4].tolist() == [2, 2, 4, 6]
    assert at.readers is not None
    assert at.readers[:4].tolist() == [3, 4, 5, 7]
    alone = pack(unshared(batch), reads="at")
    assert alone.num_tokens == 4 + 5 + 2
    assert alone.readers is not None
    assert alone.tokens[alone.readers[: alone.num_targets]].tolist() == alone.targets[:4].tolist() == [1, 2, 3, 8]


def test_pack_of_long_prompts_names_the_states_that_are_read():
    """A prompt of 300 tokens with answers of one and two, of which the stream has the first of the second."""
    prompt = list(range(300))
    rows = [Sample([*prompt, *answer], [False] * 300 + [True] * len(answer), 0, 300) for answer in ([7], [8, 9])]
    packing = pack(collate(rows))
    assert packing.predictors[:3].tolist() == [299, 299, 300]
    assert packing.read is not None
    assert sorted(packing.read.tolist()) == [*range(126), 299, 300], "and others that fill up"
    assert pack(collate([Sample(prompt, [False] + [True] * 299)])).read is None, "nearly all"
    assert pack(collate([Sample(prompt, [False] * 300)])).read is None, "none"


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_head_that_reads_the_last_tokens_gives_what_one_that_reads_all_gives_there(family: str, path: str):
    model, batch, head = random_model(family), ragged_batch(), ScalarHead(32, init_std=0.5)
    given = {}
    for reads in ("at", "last"):
        forward = Forward(model, head=head, reads=reads, scores_only=True)
        forward.path = path
        outputs = forward(batch)
        assert outputs.scores is not None
        assert outputs.scores.shape == outputs.logprobs.shape == batch.mask.shape
        row_last(outputs.scores, batch.mask).square().sum().backward()
        given[reads] = (outputs.scores.detach(), gradients(model))
        model.zero_grad()
        head.zero_grad()
    last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    assert last.sum() == batch.num_rows < batch.mask.sum()
    assert_close(given["at"][0][last], given["last"][0][last], atol=LOGPROBS, rtol=0)
    assert given["at"][0][last].abs().min() > 0
    assert not given["last"][0][~last].any()
    assert relative_difference(given["at"][1], given["last"][1]) == approx(0.0, abs=1e-5)


def gradient(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    forward = Forward(model)
    weights = torch.linspace(0.5, 2.0, batch.num_rows, dtype=torch.float64)[:, None]
    model.zero_grad()
    (forward(batch).logprobs.double() * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_do_not_depend_on_sharing_prompts(family: str):
    model = random_model(family, torch.float64)
    batch = ragged_batch()
    shared = gradient(model, batch)
    batch.prefix = torch.zeros_like(batch.prefix)
    alone = gradient(model, batch)
    # Qwen3's norms and rotary embedding compute in fp32 whatever the weights are.
    tolerance = {"gpt2": 1e-12, "qwen3": 1e-6}[family]
    assert_close(shared, alone, atol=tolerance * float(alone.abs().max()), rtol=0)


@torch.no_grad()
def test_generation_still_works_with_the_packed_attention_installed():
    model = random_model("qwen3")
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    attends = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = model(tokens, attention_mask=attends).logits
    Forward(model)
    assert allclose(model(tokens, attention_mask=attends).logits, before, atol=1e-6)


def test_the_head_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model = random_model("gpt2", torch.float64)
    batch = ragged_batch()
    whole = gradient(model, batch)
    assert 97 * int(batch.mask.sum()) < MAX_LOGIT_ELEMENTS
    monkeypatch.setattr("posttrain.models.forward.predictions.MAX_LOGIT_ELEMENTS", 97 * 5)
    chunked = []
    for kept in (0, 97 * 12, 97 * 10_000):  # recomputed in backward: all, some, none
        monkeypatch.setattr("posttrain.models.forward.predictions.KEPT_ELEMENTS", kept)
        chunked.append(gradient(model, batch))
    assert_close(chunked[0], whole, atol=1e-12 * float(whole.abs().max()), rtol=0)
    assert all(torch.equal(x, chunked[0]) for x in chunked)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "entropy"),
    [
        (torch.float64, 1e-9, "differentiable"),
        (torch.float32, 1e-5, "detached"),
        (torch.bfloat16, rounding(torch.bfloat16, size=2.0 / 0.7), "none"),  # a logit at this temperature
    ],
)
def test_of_a_head_that_is_not_trained_gradients_are_formed_in_the_forward_pass(
    dtype: torch.dtype, tolerance: float, entropy: Entropy, monkeypatch: pytest.MonkeyPatch
):
    """Against autograd through whole logits, a sum in which every token has weights of its own."""
    model, batch = random_model("gpt2", dtype), ragged_batch()
    model.get_output_embeddings().requires_grad_(False)  # tied: neither are the embeddings
    weights = torch.randn((2, *batch.mask.shape), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    request: list[bool] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda *_: request.append(torch.is_grad_enabled()))

    def learn(limit: int) -> tuple[Outputs, torch.Tensor]:
        monkeypatch.setattr("posttrain.models.forward.predictions.MAX_LOGIT_ELEMENTS", limit)
        forward = Forward(model, temperature=0.7)
        request.clear()
        model.zero_grad()
        outputs = forward(batch, entropy)
        loss = (outputs.logprobs * weights[0]).sum()
        if entropy == "differentiable":
            assert outputs.entropy is not None
            loss = loss + (outputs.entropy * weights[1]).sum()
        loss.backward()
        return outputs, gradients(model)

    whole, expected = learn(MAX_LOGIT_ELEMENTS)
    assert len(request) == 1
    formed, found = learn(97 * 12)
    assert len(request) == -(-128 // 12), "no logits were computed twice"
    assert relative_difference(found, expected) == approx(0.0, abs=tolerance)
    assert allclose(formed.logprobs, whole.logprobs, rtol=0, atol=tolerance)
    assert (formed.entropy is None) == (entropy == "none")
    if formed.entropy is not None and whole.entropy is not None:
        assert formed.entropy.requires_grad == (entropy == "differentiable")
        assert allclose(formed.entropy, whole.entropy, rtol=0, atol=tolerance)


def test_a_gpu_computes_more_logits_at_a_time():
    """16 bytes each, a sixteenth of its memory: 2^28 of 80 GiB, and never fewer than a CPU."""
    sizes = {None: 1 << 24, 80 << 30: 1 << 28, 24 << 30: 24 << 22, 2 << 30: 1 << 24}
    assert {memory: max_logit_elements(memory) for memory in sizes} == sizes
    assert gpu_memory_of(torch.device("cpu")) is None


def test_logprobs_are_fp32_for_bf16_weights():
    logits = torch.tensor([[300.0, 299.0, 0.0]], dtype=torch.bfloat16)
    logprobs, _, _ = score_logits(logits, torch.tensor([0]), 1.0, "none")
    assert logprobs.dtype == torch.float32
    gap = 300.0 - float(logits[0, 1])  # what bf16 made of 299
    assert logprobs.item() == approx(-torch.tensor(-gap).exp().log1p().item(), abs=rounding(torch.float32, terms=2))


@torch.no_grad()
def test_rows_longer_than_the_attention_window_take_the_padded_path():
    """Packing knows no sliding window; within it both are the same."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=6)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    batch = ragged_batch()
    short = batch.select([9, 10])  # rows of 8 and 2 tokens
    assert int(batch.lengths.max()) > 8
    expected = {id(b): reference_logprobs(model, b)[0] for b in (batch, short)}
    model.config.sliding_window = None  # what the window changes, so that the test can fail
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    unlimited = reference_logprobs(model, batch)[0]
    assert float((unlimited - expected[id(batch)]).abs().max()) > 0.1
    model.config.sliding_window = 6
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 6
    forward = Forward(model)
    assert forward.path == "packed"
    for b in (batch, short):
        assert_close(forward(b).logprobs.double(), expected[id(b)], atol=LOGPROBS, rtol=0)


def with_teacher(batch: Batch, k: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(7)
    batch.fields["teacher_ids"] = torch.randint(0, 97, (*batch.tokens.shape, k), generator=generator)
    return batch


def reference_tables(model: torch.nn.Module, batch: Batch, temperature: float) -> torch.Tensor:
    """``[B, T, V]``: the log-distribution that each trained token was drawn from, each row alone; 0 elsewhere."""
    tables = torch.zeros((*batch.tokens.shape, 97), dtype=torch.float64)
    for b, n in enumerate(batch.lengths.tolist()):
        table = (model(batch.tokens[b : b + 1, :n], use_cache=False).logits[0].double() / temperature).log_softmax(-1)
        for t in range(1, n):
            if batch.mask[b, t]:
                tables[b, t] = table[t - 1]
    return tables


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("family", "path"), [("gpt2", "packed"), ("granite", "padded")])
@torch.no_grad()
def test_candidates_are_of_the_same_distribution(
    family: str, path: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
):
    model = random_model(family)
    batch = with_teacher(ragged_batch())
    tables = reference_tables(model, batch, 0.7)
    expected = tables.gather(-1, batch.fields["teacher_ids"])
    forward = Forward(model, temperature=0.7)
    assert forward.path == path
    if chunked:
        monkeypatch.setattr("posttrain.models.forward.predictions.MAX_LOGIT_ELEMENTS", 97 * 6)
    for route in {path, "padded"}:
        forward.path = route
        outputs = forward(batch, with_candidates=True)
        assert outputs.candidate_logprobs.shape == (*batch.tokens.shape, 5)
        assert outputs.candidate_logprobs.dtype == torch.float32
        assert_close(outputs.candidate_logprobs.double(), expected, atol=LOGPROBS, rtol=0)
        assert not outputs.candidate_logprobs[~batch.mask].any()
        plain = forward(batch)
        assert torch.equal(plain.logprobs, outputs.logprobs)
        assert torch.equal(plain.entropy, outputs.entropy)
        assert plain.candidate_logprobs is None
        ids, logprobs = forward.top_candidates(batch, 4)
        best = tables.topk(4, dim=-1)
        assert torch.equal(ids[batch.mask], best.indices[batch.mask])
        assert_close(logprobs.double(), best.values.double(), atol=LOGPROBS, rtol=0)
        assert not ids[~batch.mask].any()
        assert not logprobs[~batch.mask].any()


@pytest.mark.parametrize("family", ["gpt2", "granite"])
def test_gradients_through_candidates(family: str, monkeypatch: pytest.MonkeyPatch):
    """Packed and padded, prompts shared and not, whole and in chunks, against each row alone."""
    model = random_model(family, torch.float64)
    batch = with_teacher(ragged_batch())
    weights = torch.randn(batch.fields["teacher_ids"].shape, generator=torch.Generator().manual_seed(1)).double()
    alone = unshared(batch)
    alone.fields = batch.fields
    (reference_tables(model, batch, 0.7).gather(-1, batch.fields["teacher_ids"]) * weights).sum().backward()
    expected = gradients(model)
    forward = Forward(model, temperature=0.7)
    tolerance = 1e-12 if family == "gpt2" else 1e-5  # the others' norms and rotary embedding compute in fp32
    for limit in (MAX_LOGIT_ELEMENTS, 97 * 6):
        monkeypatch.setattr("posttrain.models.forward.predictions.MAX_LOGIT_ELEMENTS", limit)
        for rows in (batch, alone):
            for path in {forward.path, "padded"}:
                model.zero_grad()
                route = Forward(model, temperature=0.7)
                route.path = path
                (route(rows, "none", with_candidates=True).candidate_logprobs * weights).sum().backward()
                assert relative_difference(gradients(model), expected) == approx(0.0, abs=tolerance)


def test_large_tables_never_exist_whole(monkeypatch: pytest.MonkeyPatch):
    model = random_model("qwen3")
    batch = with_teacher(ragged_batch())
    forward = Forward(model)
    monkeypatch.setattr("posttrain.models.forward.predictions.MAX_LOGIT_ELEMENTS", 97 * 6)
    sizes = []

    def record(name: str) -> None:
        of = getattr(torch.Tensor, name)

        def noting(logits: torch.Tensor, dim: int) -> torch.Tensor:
            sizes.append(len(logits))
            return of(logits, dim=dim)

        monkeypatch.setattr(torch.Tensor, name, noting)

    record("softmax")
    record("log_softmax")
    monkeypatch.setattr("posttrain.models.forward.predictions.KEPT_ELEMENTS", 0)
    forward(batch, with_candidates=True).candidate_logprobs.sum().backward()
    forward.top_candidates(batch, 3)
    assert max(sizes) == 6
    assert sum(sizes) >= 3 * int(batch.mask.sum())  # forward, recomputed in backward, and the teacher's


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_in_bf16_log_probabilities_and_gradients_are_those_of_fp32_but_for_rounding(family: str, path: str) -> None:
    model, batch = random_model(family), ragged_batch()
    logprobs, slopes = [], []
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        forward = Forward(model, precision=precision)
        assert forward.path == "packed"
        forward.path = path
        model.zero_grad()
        outputs = forward(batch)
        with forward.backward_context():
            outputs.logprobs.sum().backward()
        logprobs.append(outputs.logprobs[batch.mask].detach())
        slopes.append(gradients(model))
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    difference = (logprobs[1] - logprobs[0]).abs()
    assert logprobs[1].dtype == torch.float32
    assert 1e-4 < float(difference.mean()) < 0.03
    assert float(difference.max()) < 0.15
    assert 0.99 < float(F.cosine_similarity(*slopes, dim=0)) < 0.9999999


def test_forward_of_a_model_that_chooses_its_masks_by_the_attentions_name_is_the_model(tiny_random):
    """Falcon attended to all tokens, later ones too, where its attention had a name that it does not know."""
    model = tiny_random("falcon", num_kv_heads=4)
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert Forward(model).path == "padded"
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_forward_of_rows_beyond_a_chunk_of_the_attention_is_padded(tiny_random):
    """Llama 4 attends within chunks, which packing does not know: 0.3 nats off the model."""
    model = tiny_random("llama4_text", intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=12)
    rows = [Sample(list(range(5, 5 + n)), [False] * 2 + [True] * (n - 2), group=n) for n in (30, 8)]
    forward = Forward(model)
    assert [forward.packs(collate([row])) for row in rows] == [False, True]
    tokens = torch.arange(5, 35)[None]
    with torch.no_grad():
        own = model(input_ids=tokens).logits[0].log_softmax(-1)[1:-1].gather(1, tokens[0, 2:, None])[:, 0]
        got = forward(collate(rows)).logprobs[0, 2:30]
    assert_close(got, own, atol=LOGPROBS, rtol=0)


@pytest.mark.parametrize(("architecture", "shape"), [("nanochat", {}), ("doge", {"keep_window_size": 64})])
def test_forward_of_a_model_whose_caps_and_masks_show_after_training_is_padded(architecture, shape):
    """A cap of the logits and a mask that is zero at first: 32 and 0.02 nats off when the weights have grown."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SHAPE, head_dim=8, **shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    batch, forward = ragged_batch(), Forward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0).add_(torch.randn_like(parameter) * 0.1)
        expected, _ = reference_logprobs(model, batch)
        # norms of 8 numbers of each head, with weights of about 4
        bound = logprob_rounding(2, size=float(expected.abs().max()), largest_score=math.sqrt(8) * 4.0**2)
        assert_close(forward(batch).logprobs.double(), expected, atol=bound, rtol=0)
    assert expected.abs().max() > 3, "the model must not be near uniform"


def test_forward_of_a_model_that_reads_later_tokens_is_refused(tiny_random):
    """BERT's own language model without ``is_decoder`` attends to everything, what it is to predict included."""
    with refuses(UsageError, "is_decoder: true"):
        Forward(tiny_random("bert"))
    with refuses(UsageError, "config.json"):
        Forward(tiny_random("roberta", is_decoder=True))
    assert Forward(tiny_random("bert", is_decoder=True)).path == "padded"


def test_forward_of_an_id_beyond_the_embeddings_is_refused(tiny_random):
    """A tokenizer with more tokens than the model ended in a traceback; one whose last are never met is used."""
    forward = Forward(tiny_random("llama"))
    with refuses(UsageError, "embeddings have 300"):
        forward(collate([Sample([1, 2, 300], [False, True, True])]))
    assert forward(collate([Sample([1, 2, 299], [False, True, True])])).logprobs.shape == (1, 3)
