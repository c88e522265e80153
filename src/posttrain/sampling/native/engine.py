"""In-process engine that samples by reference with the trainer's weights.

It tries a fast path for a family of blocks, a reference path over the model's modules, and a plain path for models
with state other than keys and values. The first path whose log-probabilities match the model's forward pass is used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field

from posttrain.activity import phase
from posttrain.errors import EngineMismatch, PosttrainError, UsageError, first_line
from posttrain.models.config import context_length, find_switches
from posttrain.models.forward.forward import causal_lm
from posttrain.models.forward.precision import full_precision
from posttrain.models.forward.routing.replay import ExpertRecorder, find_replay
from posttrain.registry import register
from posttrain.sampling.base import (
    Conversation,
    Engine,
    Groups,
    Respondent,
    Sampling,
    begin,
    check_prompts,
    check_sampling,
    num_tokens_of,
)
from posttrain.sampling.native.cache import Decoder, LayerShape
from posttrain.sampling.native.fast_path import FastDecoder
from posttrain.sampling.native.known_paths import fingerprint, is_known, remember
from posttrain.sampling.native.probe import Decode, decode_in_slots, probe, probe_lengths
from posttrain.sampling.native.recorded import RecordedSteps
from posttrain.sampling.native.sampler import largest_set
from posttrain.sampling.native.schedule import STEPS_BETWEEN_LOOKS, Schedule, check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.sampling.native.reference_path import PlainSchedule
    from posttrain.sampling.stop_texts import StopFinder

Path = Literal["lean", "modules", "plain", "reread"]
PROBED_TOKENS = 64  # minimum per row
SMALLEST_REACH = 256  # minimum for generations that accept more rows
PATHS: dict[Path, str] = {
    "lean": "the fast path",
    "modules": "the model's own modules over a shared cache",
    "plain": "the model's own cache, prompts of one length at a time",
    "reread": "no cache: every token reads all tokens before it",
}
_OWN_FORWARD = ("plain", "reread")  # paths using only the model's forward pass


@register("engine", keeps_sets=True, keeps_experts=True, applies_rules=True)
def native(model: object, tokenizer: object, *, slots: Annotated[int, Field(ge=1)] = 64) -> Engine:
    """Sample in this process with the trainer's weights, without copies or synchronization.

    Continuous batching over ``slots`` rows in flight. Each prompt is computed once per group, and log-probabilities
    are fp32. Qwen3, Qwen2 and Llama models use a fast path if its log-probabilities match the model; other
    architectures sample through their modules.

    Args:
        slots: rows in flight.
    """
    engine = NativeEngine(model, slots=slots)
    engine.num_tokens = num_tokens_of(tokenizer)
    engine.tokenizer = tokenizer
    return engine


class NativeEngine(Engine):
    """See ``native``. ``model`` is a transformers causal language model, optionally wrapped by peft.

    ``path``: ``lean`` allows the fast path if it matches the model; ``modules`` never uses it.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int = 64, path: Literal["lean", "modules"] = "lean") -> None:
        self.model, self.slots, self.wanted = model, slots, path
        self._chosen: dict[Hashable, tuple[Path, list[LayerShape]]] = {}
        self._can_record = True  # decode steps can be recorded on this GPU
        self.tokenizer: Any = None  # needed for stop texts
        self.num_tokens: int | None = None  # tokenizer size; larger ids are never sampled

    @property
    def path(self) -> Path:
        """Decoding path for the current model, probed once per structure."""
        with sampling_mode(self.model):
            return self._choose(PROBED_TOKENS)[0]

    @property
    def context_tokens(self) -> int:
        return context_length(self.model.config)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Restores the model's training mode afterwards.

        Raises:
            UsageError: empty prompt, no room left in the context, unknown ids, or sampling options out of range.
            EngineMismatch: no path matches the model.
            RunFailure: non-finite logits.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        context = sampling.within(self.context_tokens)
        check_sampling(sampling)
        check_prompts(prompts, context, self.vocab_size)
        groups = begin(prompts, keys, sampling.max_tokens, context)
        self._sample(prompts, [row for group in groups for row in group], sampling)
        return [[row.completion(self.version) for row in group] for group in groups]

    def _converse(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[Conversation], sampling: Sampling, respondent: Respondent
    ) -> int:
        check_prompts(prompts, self.context_tokens, self.vocab_size)
        with sampling_mode(self.model):
            reads_anew = bool(rows) and self._choose(_reach(prompts, rows))[0] in _OWN_FORWARD
        if reads_anew:
            return super()._converse(prompts, rows, sampling, respondent)
        self._sample(prompts, rows, sampling, respondent)
        return self.version

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        respondent: Respondent | None = None,
    ) -> None:
        """Complete every row."""
        if not rows:
            return
        with sampling_mode(self.model):
            path, shapes = self._choose(_reach(prompts, rows))
            with torch.inference_mode(path == "lean"):
                work = self._schedule(path, shapes, prompts, rows, sampling, self.slots, respondent=respondent)
                with phase("sampling", describe=partial(_describe_rows, rows)), _recording(work):
                    work.run()
                if isinstance(work, Schedule):
                    self._can_record = work.recorded is None or work.recorded.can_record
        for row in rows:
            check_finite(row)

    def begin_generation(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[Conversation], sampling: Sampling, *, slots: int
    ) -> Generation:
        """Begin a stepwise generation that accepts further rows while slots are free.

        Args:
            slots: maximum rows in flight.

        Raises:
            EngineMismatch: no path matches the model.
        """
        needed = max(_reach(prompts, rows), SMALLEST_REACH)
        reach = min(self.context_tokens, 1 << (needed - 1).bit_length())
        with sampling_mode(self.model):
            path, shapes = self._choose(reach)
            with torch.inference_mode(path == "lean"):
                work = self._schedule(path, shapes, prompts, rows, sampling, slots, reach=reach)
        return Generation(self.model, work, is_lean=path == "lean", reach=reach)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token and row."""
        with sampling_mode(self.model):
            shapes = self._choose(PROBED_TOKENS)[1]
        if shapes:
            return sum(one.heads * (one.key_dim + one.value_dim) * one.dtype.itemsize for one in shapes)
        settings = self.model.config.get_text_config()
        weight = self.model.get_input_embeddings().weight
        return int(2 * settings.num_hidden_layers * settings.hidden_size * weight.dtype.itemsize)

    def _schedule(
        self,
        path: Path,
        shapes: list[LayerShape],
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        slots: int,
        *,
        reach: int | None = None,
        respondent: Respondent | None = None,
    ) -> Schedule | PlainSchedule:
        """Build a schedule for these rows. With ``reach``, more rows up to this length may join."""
        if self.num_tokens is not None and self.num_tokens < self.vocab_size:
            sampling = replace(sampling, num_tokens=self.num_tokens)
            self._say(
                f"the model has {self.vocab_size:,} ids and its tokenizer text for {self.num_tokens:,}; the others are "
                "never sampled"
            )
        stop_texts: StopFinder | None = None
        if sampling.stop:
            from posttrain.sampling.stop_texts import StopFinder

            assert self.tokenizer is not None, "an engine that knows texts has a tokenizer"
            stop_texts = StopFinder(self.tokenizer, sampling.stop)
        if path in _OWN_FORWARD:
            from posttrain.sampling.native.reference_path import PlainSchedule

            if sampling.keeps_experts:
                raise UsageError(
                    f"rollout.router_replay: {type(self.model).__name__} samples through {PATHS[path]}, which records "
                    "no experts; remove it"
                )
            return PlainSchedule(
                self.model, prompts, rows, sampling, slots, is_cached=path == "plain", stop_texts=stop_texts
            )
        decoder = self._bind(path, shapes, reach or _reach(prompts, rows))
        work = Schedule(
            decoder,
            prompts,
            rows,
            sampling,
            slots,
            respondent,
            self.vocab_size,
            limit=reach,
            stop_texts=stop_texts,
            recorder=self._build_recorder(path, sampling),
        )
        if reach is not None:
            work.longest_burst = 1 if decoder.device.type == "cpu" else STEPS_BETWEEN_LOOKS
        if isinstance(decoder, FastDecoder) and decoder.device.type == "cuda" and self._can_record:
            most_kept = 0
            if sampling.keeps_sets:
                most_kept = largest_set(sampling, self.vocab_size)
            work.recorded = RecordedSteps(
                decoder, work.num_slots, work.limit, work.longest_burst, self._say, most_kept=most_kept
            )
        return work

    def _build_recorder(self, path: Path, sampling: Sampling) -> ExpertRecorder | None:
        """Build the recorder for ``keeps_experts``.

        Raises:
            UsageError: no supported routers.
        """
        if not sampling.keeps_experts:
            return None
        assert path == "modules", "routers run as modules"
        return ExpertRecorder(find_replay(causal_lm(self.model)).routers)

    def _bind(self, path: Path, shapes: list[LayerShape] | None, reach: int) -> Decoder:
        """Bind a path to the current parameters, for positions below ``reach``.

        Raises:
            EngineMismatch: unsupported by the fast path.
        """
        if path == "modules":
            from posttrain.sampling.native.reference_path import ModulesDecoder  # which few models need

            return ModulesDecoder(self.model, shapes)
        if _has_hooks(self.model):  # hooks run only in module forward passes
            raise EngineMismatch("its modules have hooks")
        decoder = FastDecoder.bind(self.model, reach)
        if decoder is None:
            raise EngineMismatch(
                "its blocks are not those of Qwen3, Qwen2 or Llama with plain weights or LoRA and no sliding window"
            )
        return decoder

    def _choose(self, reach: int) -> tuple[Path, list[LayerShape]]:
        """Choose a path for rows of ``reach`` tokens with the current model structure.

        Probes if this structure is new, or if rows are the first to exceed a length switch in the configuration.
        """
        reach = min(context_length(self.model.config), max(reach, PROBED_TOKENS))
        switches = find_switches(self.model.config, reach)
        structure = _structure(self.model), switches
        if structure not in self._chosen:
            batches = probe_lengths(switches, reach)
            found = self._read_known(reach, batches, structure) if self.uses_cache else None
            self._chosen[structure] = found or self._probe_paths(reach, batches)
            if self.uses_cache and found is None and self._chosen[structure][0] == "lean":
                remember(fingerprint(self.model, [batches, *structure]))
        return self._chosen[structure]

    def _read_known(
        self, reach: int, batches: list[tuple[int, ...]], structure: tuple[Hashable, ...]
    ) -> tuple[Path, list[LayerShape]] | None:
        """Use the fast path if an earlier process verified it for this model, else None."""
        if self.wanted != "lean" or not is_known(fingerprint(self.model, [batches, *structure])):
            return None
        try:
            with _probing():
                return "lean", self._bind("lean", None, reach).shapes
        except EngineMismatch:
            return None

    @phase("comparing the sampler with the model")
    def _probe_paths(self, reach: int, batches: list[tuple[int, ...]]) -> tuple[Path, list[LayerShape]]:
        reasons: dict[Path, str] = {}
        for path, what in PATHS.items():
            if path == "lean" and self.wanted == "modules":
                continue
            try:
                with _probing():
                    shapes = self._probe(path, reach, batches)
            except EngineMismatch as reason:
                reasons[path] = str(reason)
                continue
            if reasons:
                faster = list(reasons.values())[-1]
                self._say(f"sampling takes a slower path, {what}: of the faster one, {faster}")
            return path, shapes
        shorter = ""
        if len(batches) > 1:
            longest = min(max(lengths) for lengths in batches[1:])
            shorter = (
                f". Rows of this run may have {reach} tokens and get past a window, a chunk or another scale of "
                f"positions that the configuration names; keep them well below {longest} (prompt.max_prompt_tokens, "
                "rollout.max_tokens)"
            )
        raise EngineMismatch(
            f"{type(self.model).__name__}: the native engine cannot sample from this architecture. "
            f"{'; '.join(f'{PATHS[path]}: {reason}' for path, reason in reasons.items())}{shorter}"
        )

    def _probe(self, path: Path, reach: int, batches: list[tuple[int, ...]]) -> list[LayerShape]:
        """Compare a path with the model and return its key and value shapes.

        Raises:
            EngineMismatch: log-probabilities differ.
        """
        shapes: list[LayerShape] = []
        if path in _OWN_FORWARD:
            from posttrain.sampling.native.reference_path import decode_plainly

            dtype = self.model.get_input_embeddings().weight.dtype
            decode: Decode = partial(decode_plainly, self.model, is_cached=path == "plain")
        else:
            decoder = self._bind(path, None, reach)
            shapes, dtype, decode = decoder.shapes, decoder.shapes[0].dtype, partial(decode_in_slots, decoder)
        found = [probe(self.model, decode, dtype, reach, batches[0])]
        for batch in batches[1:]:
            try:
                found.append(probe(self.model, decode, dtype, reach, batch))
            except torch.OutOfMemoryError:  # while comparing; sampling may need less
                tokens = max(batch)
                self._say(f"for rows of {tokens} tokens there is no memory to compare the sampler with the model")
        difference, tolerance = max(found, key=lambda one: one[0] - one[1])
        if difference > tolerance:
            raise EngineMismatch(
                f"its log-probabilities differ by {difference:.1e} from the model's own forward (at most "
                f"{tolerance:.1e} is allowed)"
            )
        return shapes


def _recording(work: Schedule | PlainSchedule) -> AbstractContextManager[None]:
    """Record expert choices inside the block, if the schedule keeps them."""
    if isinstance(work, Schedule) and work.recorder is not None:
        return work.recorder.recording()
    return nullcontext()


def _describe_rows(rows: Sequence[Conversation]) -> str:
    """Return ``12 of 64 answers, 3,456 tokens``."""
    num_done = sum(row.finish is not None for row in rows)
    return f"{num_done:,} of {len(rows):,} answers, {sum(len(row.ids) for row in rows):,} tokens"


class Generation:
    """A generation advanced by its caller, so that several can share a model.

    Args:
        is_lean: uses the fast path.
        reach: maximum tokens of a joining row, including its prompt.
    """

    def __init__(self, model: PreTrainedModel, work: Schedule | PlainSchedule, *, is_lean: bool, reach: int) -> None:
        self.model, self.work, self.is_lean, self.reach = model, work, is_lean, reach

    @property
    def is_done(self) -> bool:
        """True once all rows have finished."""
        return self.work.is_done

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Step until all rows have finished or ``is_enough`` returns True.

        Between steps, callers may set ``finish`` on a row to remove it.
        """
        with sampling_mode(self.model), torch.inference_mode(self.is_lean):
            while not self.work.is_done:
                self.work.step()
                if is_enough():
                    return

    def join(self, prompts: Sequence[Sequence[int]], rows: Sequence[Conversation]) -> bool:
        """Add rows with identical sampling options; False if they do not fit."""
        if len(rows) > self.work.num_free or _reach(prompts, rows) > self.reach:
            return False
        assert isinstance(self.work, Schedule), "others have no free slots"
        self.work.join(prompts, rows)
        return True


def _reach(prompts: Sequence[Sequence[int]], rows: Sequence[Conversation]) -> int:
    """Compute the maximum tokens of any row, including its prompt."""
    return max(len(prompts[row.prompt]) + row.limit for row in rows)


@contextmanager
def _probing() -> Iterator[None]:
    """Use full precision, and report any library error as a mismatch.

    This includes binding, since transformers 5.17 computes rotary angles with a product.
    """
    with full_precision():
        try:
            yield
        except (PosttrainError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineMismatch(f"it ends in {type(error).__name__}: {first_line(error)}") from error


@contextmanager
def sampling_mode(model: PreTrainedModel) -> Iterator[None]:
    """Disable training mode, gradients and autocast, restoring each module's mode afterwards.

    cuDNN attention is disabled: it plans each new shape (about 100 ms), and cache width grows with every token.
    """
    modes = [(module, module.training) for module in model.modules()]
    device_type = next(model.parameters()).device.type
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        model.eval()
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for module, training in modes:
            module.training = training


def _structure(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """Collect facts that determine the path besides parameter values: modules, dtype, device, hooks."""
    parameter = next(model.parameters())
    kinds = tuple((name, type(module)) for name, module in model.named_modules())
    return kinds, parameter.dtype, parameter.device, _has_hooks(model)


def _has_hooks(model: PreTrainedModel) -> bool:
    """Check if any module's forward pass is hooked or replaced."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in model.modules()
    )
