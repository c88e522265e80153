"""Per-token log-probabilities and scores: packed, shared prompts, trained positions only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from posttrain.errors import UsageError, first_line
from posttrain.models.config import shortest_window
from posttrain.models.forward.attention import ATTENTION_NAME, active, install_packed_attention, packed_attention
from posttrain.models.forward.fused import FusedLayers
from posttrain.models.forward.linear import fast_linear
from posttrain.models.forward.packing import Packing, Reads, pack
from posttrain.models.forward.predictions import Distribution, Draws, Entropy, States
from posttrain.models.forward.routing.replay import ReplayedPass, RouterReplay
from posttrain.models.forward.routing.routers import Routers, RouterSums, rows_of_tokens
from posttrain.models.heads import ScalarHead
from posttrain.process_group import Within
from posttrain.types import Batch, Model, Outputs

if TYPE_CHECKING:
    from posttrain.models.forward.noise import NoisyRows

_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # in configurations

T = TypeVar("T")
Precision = Literal["fp32", "bf16"]  # of the products inside the model


def causal_lm(model: Model) -> Any:
    """Find the transformers causal LM within ``model``, unwrapping peft."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def decoder_of(base: Model) -> Any:
    """Find the module producing final hidden states; for some models, ``get_decoder`` gives the LM or LM head."""
    decoder, embedding = base.get_decoder(), base.get_input_embeddings()
    if decoder is not base and any(module is embedding for module in decoder.modules()):
        return decoder
    return next(child for child in base.children() if any(module is embedding for module in child.modules()))


class Forward:
    """The trainer's forward pass for a model, optionally including a scalar head.

    ``path``: ``packed`` if results match on a probe batch, else ``padded`` (ordinary padded forward, full logits).

    Args:
        model: causal LM, plain or peft.
        temperature: divides logits before computing log-probabilities.
        head: computes ``Outputs.scores`` from the LM head's input states.
        reads: which state a head reads for trained token t. ``before``: the preceding state, for values; ``at``: t's
            own state, for token and step labels; ``last``: only the row's final trained token, for rewards, with 0
            elsewhere.
        scores_only: skip the LM head (reward models, separate critics).
        precision: ``bf16`` runs model products under bfloat16 autocast. Scalar heads and the packed path's LM head
            keep their dtype: bfloat16 shifts a logit of 20 by 0.06 (MiniMax-M1, arXiv:2506.13585, section 3.2).

    Raises:
        UsageError: ``model.attention`` and SDPA give different results.
    """

    def __init__(
        self,
        model: Model,
        temperature: float = 1.0,
        head: ScalarHead | None = None,
        reads: Reads = "before",
        scores_only: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        assert head is not None or (reads == "before" and not scores_only), "without a head nothing is read"
        self.model = model
        self.temperature = temperature
        self.head = head
        if head is not None:
            head.to(self.device)
        self.reads: Reads = reads
        self.scores_only = scores_only
        self._own_attention = causal_lm(model).config._attn_implementation
        if self._own_attention == ATTENTION_NAME:  # already packed by another Forward
            self._own_attention = "sdpa"
        self.layers = FusedLayers(causal_lm(model))
        self.attention = "mask"  # the kernel of the packed path, see ``active``
        self.precision: Precision = precision
        self.path: Literal["packed", "padded"] = "packed"
        self.window = shortest_window(causal_lm(model).config)
        self.root: Within | None = None  # gathers the shards for a pass
        self.num_ids: int | None = None  # see ``restrict``
        self.restricts_targets = False
        self.routers: Routers | None = None  # if set, each pass stores ``routed``
        self.routed: RouterSums | None = None
        self.replay: RouterReplay | None = None  # for batches that have ``experts``
        self._replayed: ReplayedPass | None = None
        self._last_experts: Tensor | None = None
        self.noise: NoisyRows | None = None  # added to embeddings
        self.choose_path()
        self.last_packing: Packing | None = None
        self.last_slots = self.last_tokens = 0  # positions that the last pass computed over, and those with a token

    def alike(
        self, model: Model, head: ScalarHead | None = None, reads: Reads = "before", scores_only: bool = False
    ) -> Forward:
        """Build a similar pass for another model or head. Only the same model replays experts."""
        forward = Forward(model, self.temperature, head, reads, scores_only, self.precision)
        if model is self.model:
            forward.replay = self.replay
        return forward

    @property
    def num_rows(self) -> int:
        """Count output rows; padded embeddings may exceed the tokenizer's vocabulary."""
        return int(causal_lm(self.model).get_output_embeddings().weight.shape[0])

    def restrict(self, num_ids: int | None, *, targets: bool = False) -> None:
        """Restrict candidate distributions to the first ``num_ids`` ids; None: unrestricted.

        ``targets``: restrict trained tokens as well, giving excluded ids ``LOG_ZERO``.
        """
        self.num_ids = num_ids
        if num_ids is not None and num_ids >= self.num_rows:
            self.num_ids = None
        self.restricts_targets = targets and self.num_ids is not None

    @property
    def _distribution(self) -> Distribution:
        return Distribution(self.temperature, self.num_ids, self.restricts_targets)

    @property
    def device(self) -> torch.device:
        """LM head device, where outputs also live."""
        return causal_lm(self.model).get_output_embeddings().weight.device

    def __call__(self, batch: Batch, entropy: Entropy = "detached", with_candidates: bool = False) -> Outputs:
        """Compute log-probabilities (and entropies) at trained positions: ``float32 [B, T]``, 0 elsewhere.

        ``scores_only`` models return zeros, without entropy. ``with_candidates``: also score ``teacher_ids``
        (``int64 [B, T, K]``). Run backward before calling again, within ``backward_context`` if activations are
        recomputed. Prefer CPU batches, because planning reads their values.
        """
        return self.run(batch, self.plan(batch), entropy, with_candidates)

    def plan(self, batch: Batch) -> Packing | None:
        """Pack a batch onto the model's device; None for the padded path."""
        if not self.packs(batch):
            return None
        if self.replay is None:
            batch = replace(batch, experts=None)
        if self.noise is not None:  # noise differs per row, so prompts cannot be shared
            batch = replace(batch, group=torch.arange(batch.num_rows))
        return pack(self._as_read(batch), reads=self.reads, keeps_last=self.routers is not None).to(self.device)

    def packs(self, batch: Batch) -> bool:
        """Check if a batch is packed: the packed path is active, and rows fit within attention windows and chunks."""
        return self.path == "packed" and (self.window is None or self._columns(batch) <= self.window)

    def run(self, batch: Batch, packing: Packing | None, entropy: Entropy, with_candidates: bool = False) -> Outputs:
        """``__call__`` using a given plan, which two models may share."""
        return Outputs(*self._gathered(lambda: self._outputs(batch, packing, entropy, with_candidates)))

    @property
    def is_sharded(self) -> bool:
        """Check if weights are sharded across processes."""
        return self.root is not None

    def _gathered(self, compute: Callable[[], T]) -> T:
        """``compute`` where sharded weights are gathered."""
        if self.root is None:
            return compute()
        result: T = self.root(compute)
        return result

    def _outputs(
        self, batch: Batch, packing: Packing | None, entropy: Entropy, with_candidates: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The fields of ``Outputs``, in order, as a tuple whose tensors a sharded model's hooks find."""
        assert not (with_candidates and self.scores_only), "a model that only scores has no distributions"
        states = self._states(batch, packing, predicts=not self.scores_only)
        scores = None
        if states.reading is not None:
            scores = self._scores(states)
        if states.predicting is None:
            return torch.zeros(batch.mask.shape, device=states.where.device), None, scores, None, None
        candidates = None
        if with_candidates:
            candidates = batch.field("teacher_ids")[batch.mask].to(states.targets.device)
        logprobs, entropies, of_candidates = self._distribution.predict(
            states, entropy, candidates, self._draws_of(batch)
        )
        if entropies is not None:
            entropies = states.spread(entropies)
        if of_candidates is not None:
            of_candidates = states.spread(of_candidates)
        return states.spread(logprobs), entropies, scores, of_candidates, self._rerouted(batch, packing, states)

    def _rerouted(self, batch: Batch, packing: Packing | None, states: States) -> Tensor | None:
        """Spread the fraction of routers that replay changed to the tokens predicted there."""
        if self._replayed is None:
            return None
        fractions = self._replayed.rerouted()
        if packing is not None:
            return states.spread(fractions.index_select(0, packing.predictors))
        before = fractions.view(batch.num_rows, -1)[:, : batch.tokens.shape[1] - 1]
        return states.spread(before[batch.mask[:, 1:].to(before.device)])

    def read_scores(self, batch: Batch) -> Tensor:
        """Compute head scores, ``[B, T]`` or ``[B, T, C]``, skipping the LM head."""
        return self._gathered(lambda: self._scores(self._states(batch, self.plan(batch), predicts=False)))

    @torch.no_grad()
    def top_candidates(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens at each trained position and their log-probabilities, likeliest first.

        ``int64 [B, T, K]`` and ``float32 [B, T, K]``, 0 elsewhere; K is ``k``, at most V (``restrict``). If the batch
        has kept sets, tokens come from these, padded by -1.
        """

        def compute() -> tuple[Tensor, Tensor]:
            states = self._states(batch, self.plan(batch), predicts=True)
            ids, logprobs = self._distribution.likeliest(states, k, self._draws_of(batch))
            return states.spread(ids), states.spread(logprobs)

        return self._gathered(compute)

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Context of backward: gradient checkpointing recomputes layers, with packing and replayed experts."""
        with ExitStack() as around:
            if self.last_packing is not None:
                around.enter_context(packed_attention(self.last_packing))
                around.enter_context(self.layers)
            if self.replay is not None and self._last_experts is not None:
                around.enter_context(self.replay.replaying(self._last_experts))
            yield

    def _columns(self, batch: Batch) -> int:
        """Count computed columns; final columns predict nothing, so they are dropped unless read."""
        columns = int(batch.tokens.shape[1])
        if self.reads == "before" and self.routers is None:
            columns -= 1
        return max(1, columns)

    def _as_read(self, batch: Batch) -> Batch:
        """Restrict the mask to trained tokens actually read."""
        if self.reads != "last":
            return batch
        behind = batch.mask.flip(1).cumsum(dim=1).flip(1)  # trained tokens remaining, including this position
        return replace(batch, mask=batch.mask & (behind == 1))

    def _states(self, batch: Batch, packing: Packing | None, *, predicts: bool) -> States:
        size = causal_lm(self.model).get_input_embeddings().weight.shape[0]
        if batch.tokens.device.type == "cpu" and bool((batch.tokens >= size).any()):
            raise UsageError(
                f"model.name: a row has the token id {int(batch.tokens.max())}, and the embeddings have {size} rows: "
                "its tokenizer is of another model, or tokens were added to it alone; give one with its own, or resized"
            )
        self.last_packing = packing
        if packing is None:
            columns = self._columns(batch)
            self.last_slots = batch.num_rows * columns
            self.last_tokens = int(batch.lengths.clamp(max=columns).sum())
            filled = torch.arange(columns) < batch.lengths.cpu()[:, None]
            noise = None
            if self.noise is not None:
                noise = self.noise.rectangle(columns, self._width)
            experts = None
            if self.replay is not None and batch.experts is not None:
                experts = batch.experts[:, :columns].flatten(0, 1).to(self.device)
            with self._watched(filled.flatten(), noise, experts):
                return self._padded(self._as_read(batch).to(self.device), columns, predicts)
        weights: Tensor | None = None
        if self.routers is not None:
            weights = rows_of_tokens(packing)
        noise = None
        if self.noise is not None:
            noise = self.noise.stream(packing, self._width)
        with self._watched(weights, noise, packing.experts):
            states = self._packed(packing, predicts)
        self.last_slots, self.last_tokens = packing.num_slots, packing.num_tokens
        return states

    @property
    def _width(self) -> int:
        return int(causal_lm(self.model).get_input_embeddings().weight.shape[1])

    @contextmanager
    def _watched(self, weights: Tensor | None, noise: Tensor | None, experts: Tensor | None) -> Iterator[None]:
        """Read the routers of a pass, whose tokens stand for ``weights [N]`` rows, and add noise to its embeddings.

        ``experts`` ``int16 [N, routers, k]``: choices to replay.
        """
        logits: list[Tensor] = []
        self._replayed = None
        self._last_experts = experts
        with ExitStack() as around:
            if self.replay is not None and experts is not None:
                self._replayed = around.enter_context(self.replay.replaying(experts))
            if noise is not None:
                from posttrain.models.forward.noise import added_to

                around.enter_context(added_to(causal_lm(self.model).get_input_embeddings(), noise))
            if self.routers is not None:
                around.enter_context(self.routers.reading(logits))
            yield
        if self.routers is not None:
            assert weights is not None, "known where routers are read"
            chosen = None
            if self._replayed is not None:
                chosen = self._replayed.chosen
            self.routed = self.routers.sums(logits, weights.to(logits[0].device), chosen)

    def _packed(self, packing: Packing, predicts: bool) -> States:
        base = causal_lm(self.model)
        self.layers.is_autocast = self.precision == "bf16"
        with packed_attention(packing), self.layers, fast_linear(), self._products():
            hidden = decoder_of(base)(
                input_ids=packing.tokens[None], position_ids=packing.positions[None], use_cache=False
            ).last_hidden_state[0]
        self.attention = active.kernel
        hidden = hidden.to(base.get_output_embeddings().weight.dtype)  # unchanged, except bf16 products in some models
        predicting = None
        if predicts or packing.readers is None:
            predicting = hidden.index_select(0, packing.predictors)
        reading = None
        if self.head is not None and packing.readers is None:
            reading = predicting
        elif self.head is not None:
            reading = hidden.index_select(0, packing.readers)
        if not predicts:
            predicting = None
        lm_head = base.get_output_embeddings()

        def project(part: Tensor) -> Tensor:
            with fast_linear():
                return lm_head(part)

        return States(
            predicting=predicting,
            project=project,
            reading=reading,
            targets=packing.targets,
            num_targets=packing.num_targets,
            where=packing.where,
            num_logits=self.num_rows,
            is_head_fixed=not any(p.requires_grad for p in lm_head.parameters()),
        )

    def _products(self) -> AbstractContextManager[Any]:
        """Enter autocast according to ``precision``."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _padded(self, batch: Batch, columns: int, predicts: bool) -> States:
        places = torch.arange(columns, device=batch.tokens.device)
        inputs = {
            "input_ids": batch.tokens[:, :columns],
            "attention_mask": (places[None, :] < batch.lengths[:, None]).long(),
            "position_ids": places[None, :].expand(batch.num_rows, -1),
            "use_cache": False,
        }
        decoder = decoder_of(causal_lm(self.model))
        hidden_states: list[Tensor] = []
        predicting = None
        if predicts:
            # Use model logits, which may be scaled or capped after the LM head.
            hook = decoder.register_forward_hook(lambda _, __, output: hidden_states.append(output.last_hidden_state))
            try:
                with self._products():
                    logits = self.model(**inputs).logits
            finally:
                hook.remove()
            predicting = logits[:, : batch.tokens.shape[1] - 1][batch.mask[:, 1:]]
        else:
            with self._products():
                hidden_states.append(decoder(**inputs).last_hidden_state)
        reading = None
        if self.head is not None and self.reads == "before":
            reading = hidden_states[-1][:, : batch.tokens.shape[1] - 1][batch.mask[:, 1:]]
        elif self.head is not None:
            reading = hidden_states[-1][batch.mask]
        targets = batch.tokens[batch.mask]
        return States(predicting, lambda logits: logits, reading, targets, len(targets), batch.mask, self.num_rows)

    def _scores(self, states: States) -> Tensor:
        assert self.head is not None, "scores need a head"
        assert states.reading is not None
        return states.spread(self.head(states.reading))

    def _draws_of(self, batch: Batch) -> Draws | None:
        """Describe the sampling distribution; None for the plain model distribution."""
        if batch.kept is None and batch.rules is None:
            return None
        mask = self._as_read(batch).mask
        parts: dict[str, Tensor] = {}
        if batch.kept is not None:
            parts["sets"] = batch.kept.dense(mask.cpu())
        if batch.rules is not None:
            parts["tokens"] = batch.tokens
            parts["rows"], parts["columns"] = mask.nonzero(as_tuple=True)
            if batch.rules.barred_ids:
                parts["is_barred"] = batch.field("barred")[mask] > 0
        on_device: dict[str, Any] = {name: x.to(self.device) for name, x in parts.items()}
        return Draws(rules=batch.rules, **on_device)

    @property
    def _takes_sdpa(self) -> bool:
        """Check SDPA support.

        Capped attention scores (dropped by transformers 5.17's SDPA) require the model's original attention, padded.
        """
        model = causal_lm(self.model)
        is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        return bool(getattr(model, "_supports_sdpa", False)) and not is_capped

    def choose_path(self) -> None:
        """Find out whether batches can be packed, on the model's device."""
        precision = self.precision
        if self.device.type == "cpu":  # a GPU's kernels for fp32 are not wanted where products are in bfloat16
            self.precision = "fp32"
        named = self._own_attention != "sdpa" and self._takes_sdpa
        if named and not self._agrees(["padded"]):
            raise UsageError(
                f"model.attention: {self._own_attention!r} does not compute what sdpa computes with this model here; "
                "use sdpa, or another train.precision"
            )
        settings = causal_lm(self.model).config.get_text_config()
        is_capped = any(getattr(settings, key, None) for key in _LOGIT_CAPS)  # unseen in a probe
        self.path = "packed"
        if named or is_capped or not self._takes_sdpa or not self._agrees(["padded", "packed"]):
            self.path = "padded"
            causal_lm(self.model).config._attn_implementation = self._own_attention
            self._gathered(self._refuse_reading_ahead)
        self.precision = precision

    @torch.no_grad()
    def _refuse_reading_ahead(self) -> None:
        """Refuse models whose logits depend on later tokens, such as encoders; the packed path is always causal.

        Raises:
            UsageError: names the model class, or explains why computing failed.
        """
        base = causal_lm(self.model)
        ids = _probe_batch(base.config.get_text_config().vocab_size).tokens.to(self.device)
        rows = torch.stack([ids[0], torch.cat([ids[0, :-1], ids[1, -1:]])])
        try:
            first, second = (self.model(input_ids=row[None], use_cache=False).logits[0, :-1].float() for row in rows)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            what = f"model.name: {type(base).__name__} with this config.json ends in {type(error).__name__}"
            raise UsageError(f"{what}: {first_line(error)}") from error
        if not torch.allclose(first, second, atol=self._rounding, equal_nan=True):
            raise UsageError(
                f"model.name: {type(base).__name__} reads the tokens that come after, so it is no causal language "
                "model. An encoder becomes one by is_decoder: true in its config.json; or give a decoder"
            )

    @torch.no_grad()
    def _agrees(self, paths: Sequence[Literal["packed", "padded"]]) -> bool:
        """Check ``paths`` against padded SDPA on a small ragged batch containing a shared prompt.

        Padded runs use the packed attention's name as well, because some models select masks by name.
        """
        base = causal_lm(self.model)
        batch = _probe_batch(base.config.get_text_config().vocab_size)
        was_training = self.model.training
        self.model.eval()
        try:
            base.config._attn_implementation = "sdpa"
            expected = self._probed(batch, "padded")
            if self._own_attention == "sdpa":
                install_packed_attention(base)
            else:
                base.config._attn_implementation = self._own_attention
            found = [self._probed(batch, path) for path in paths]
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False  # modules with another calling convention; the padded path serves them
        finally:
            self.model.train(was_training)
        return all(torch.allclose(got, expected, atol=self._rounding) for got in found)

    @property
    def _rounding(self) -> float:
        """Allowed logit difference between two computation paths."""
        is_exact = causal_lm(self.model).get_output_embeddings().weight.dtype.itemsize >= 4 and self.precision == "fp32"
        if self.device.type != "cpu":
            is_exact = is_exact and torch.get_float32_matmul_precision() == "highest"  # TF32 rounds by 1e-3
        if is_exact:
            return 2e-4
        return 0.3

    def _probed(self, batch: Batch, path: Literal["packed", "padded"]) -> Tensor:
        self.path = path

        def compute() -> Tensor:
            states = self._states(batch, self.plan(batch), predicts=True)
            return states.spread(self._distribution.predict(states, "none")[0])

        return self._gathered(compute)


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
