"""From a batch to per-token log-probabilities: packed, prompts shared, head in chunks.

Log-probabilities and entropies are fp32 whatever the weights are, at the sampling temperature,
and only at trained positions; ``[tokens, V]`` never exists whole when it would be large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.models.linear import fast_linear
from posttrain.models.packing import Packing, install_packed_attention, pack, packed_attention
from posttrain.types import Batch, Outputs

# Logits of at most this many elements (64 MiB in fp32) exist at a time.
MAX_LOGIT_ELEMENTS = 1 << 24


def causal_lm(model: Any) -> Any:
    """The transformers causal LM inside ``model`` (itself, or the base of a peft model)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Forward:
    """The trainer's forward pass over one model.

    ``path``: ``packed`` where the model's modules agree with it on a probe batch, else ``padded``
    (the model's own padded forward, whole logits). The choice is by measurement, not by name.
    """

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        install_packed_attention(causal_lm(model))
        self.path: Literal["packed", "padded"] = "packed" if self._packed_agrees() else "padded"
        self.last_packing: Packing | None = None
        self.last_slots = self.last_tokens = 0  # positions that the last pass computed over, and those with a token

    def __call__(self, batch: Batch, entropy: Literal["none", "detached", "differentiable"] = "detached") -> Outputs:
        """Log-probabilities (and entropies) of the trained tokens: ``float32 [B, T]``, 0 elsewhere.

        Backward must run before the next call, inside ``backward_context`` when activations are
        recomputed. The batch may be on the CPU (best: it is planned there); outputs are on the model's
        device.
        """
        device = causal_lm(self.model).get_output_embeddings().weight.device
        if self.path == "packed" and not self._exceeds_window(batch):
            packing = pack(batch).to(device)
            self.last_packing = packing
            self.last_slots, self.last_tokens = packing.num_slots, packing.num_tokens
            with packed_attention(packing), fast_linear():
                body = causal_lm(self.model).get_decoder()
                hidden = body(
                    input_ids=packing.tokens[None], position_ids=packing.positions[None], use_cache=False
                ).last_hidden_state[0]
            rows = hidden[packing.predictors]
            logprobs, entropies = self._score(rows, packing.targets, entropy)
            logprobs = logprobs[: packing.num_targets]
            entropies = None if entropies is None else entropies[: packing.num_targets]
            mask = packing.where
        else:
            self.last_packing = None
            self.last_slots, self.last_tokens = batch.tokens.numel(), int(batch.lengths.sum())
            batch = batch.to(device)
            logprobs, entropies = self._padded(batch, entropy)
            mask = batch.mask
        return Outputs(
            logprobs=_spread(logprobs, mask),
            entropy=None if entropies is None else _spread(entropies, mask),
        )

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Where backward runs: gradient checkpointing recomputes attention and needs the packing."""
        if self.last_packing is None:
            yield
        else:
            with packed_attention(self.last_packing), fast_linear():
                yield

    def _exceeds_window(self, batch: Batch) -> bool:
        """Whether a row is longer than the model's sliding attention window, which packing does not know."""
        window = getattr(causal_lm(self.model).config.get_text_config(), "sliding_window", None)
        return window is not None and batch.tokens.shape[1] - 1 > window

    def _score(self, rows: Tensor, targets: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
        head = causal_lm(self.model).get_output_embeddings()
        vocabulary = head.weight.shape[0]
        chunk = max(1, MAX_LOGIT_ELEMENTS // vocabulary)
        if len(targets) <= chunk:
            with fast_linear():
                logits = head(rows)
            return score_logits(logits, targets, self.temperature, entropy)
        pieces = []
        for start in range(0, len(targets), chunk):
            part, target = rows[start : start + chunk], targets[start : start + chunk]

            def run(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
                with fast_linear():
                    logits = head(part)
                return score_logits(logits, target, self.temperature, entropy)

            pieces.append(checkpoint(run, part, target, use_reentrant=False))
        logprobs = torch.cat([p[0] for p in pieces])
        return logprobs, None if entropy == "none" else torch.cat([p[1] for p in pieces])

    def _padded(self, batch: Batch, entropy: str) -> tuple[Tensor, Tensor | None]:
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        attends = (columns[None, :] < batch.lengths[:, None]).long()
        logits = self.model(
            input_ids=batch.tokens,
            attention_mask=attends,
            position_ids=columns[None, :].expand_as(batch.tokens),
            use_cache=False,
        ).logits
        picked = logits[:, :-1][batch.mask[:, 1:]]
        return score_logits(picked, batch.tokens[batch.mask], self.temperature, entropy)

    @torch.no_grad()
    def _packed_agrees(self) -> bool:
        """Compare both paths on a small ragged batch with a shared prompt."""
        base = causal_lm(self.model)
        batch = _probe_batch(base.config.get_text_config().vocab_size)
        was_training = self.model.training
        self.model.eval()
        try:
            self.path = "padded"
            expected = self(batch, "none").logprobs
            self.path = "packed"
            try:
                got = self(batch, "none").logprobs
            except (TypeError, ValueError, AttributeError, RuntimeError):
                return False  # modules with another calling convention; the padded path serves them
        finally:
            self.model.train(was_training)
        exact = base.get_output_embeddings().weight.dtype == torch.float32
        return bool(torch.allclose(got, expected, atol=2e-4 if exact else 0.3))


def score_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: str) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[M]`` of ``targets`` under ``logits [M, V]``, and entropies ``[M]``.

    fp32, or float64 where the logits are.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    table = logits.log_softmax(dim=-1)  # subtracts the maximum first: exact where logits are large
    logprobs = table.gather(-1, targets[:, None])[:, 0]
    if entropy == "none":
        return logprobs, None
    if entropy == "detached":
        table = table.detach()
    # 0 · (−inf) is a token that cannot occur: it adds nothing.
    return logprobs, -torch.linalg.vecdot(table.exp(), table.clamp(min=torch.finfo(table.dtype).min))


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """``[M]`` back to ``[B, T]`` at the trained positions, 0 elsewhere."""
    out = torch.zeros(mask.shape, dtype=values.dtype, device=mask.device)
    return out.masked_scatter(mask, values)


def _probe_batch(vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (4, 9), generator=generator)
    tokens[1, :4] = tokens[0, :4]
    lengths = torch.tensor([9, 6, 7, 4])
    columns = torch.arange(9)
    mask = (columns[None, :] < lengths[:, None]) & (columns[None, :] >= torch.tensor([4, 4, 1, 3])[:, None])
    return Batch(
        tokens=tokens, lengths=lengths, mask=mask, group=torch.tensor([0, 0, 1, 2]), prefix=torch.tensor([4, 4, 0, 3])
    )
