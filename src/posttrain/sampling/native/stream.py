"""Token-by-token streaming of one completion for interactive use."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from posttrain.models.config import context_length
from posttrain.sampling.base import Conversation, Sampling, begin, check_prompts, check_sampling
from posttrain.sampling.native.engine import sampling_mode
from posttrain.sampling.native.reference_path import PlainSchedule
from posttrain.sampling.native.schedule import check_finite
from posttrain.types import Finish


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A sampled token and its log-probability at the sampling temperature (1 for greedy), before truncation.

    ``is_last``: a stop token, or the length limit. ``finish`` is valid only for the last token.
    """

    id: int
    logprob: float
    is_last: bool
    finish: Finish


def stream(
    model: PreTrainedModel, prompt: Sequence[int], key: int, sampling: Sampling
) -> Generator[StreamedToken, None, None]:
    """Stream one completion of ``prompt``, drawing identical tokens to the native engine with this key.

    Closing the iterator stops sampling.

    Raises:
        UsageError: empty prompt, no room left in the context, or sampling options out of range.
        RunFailure: non-finite logits.
        EngineMismatch: no cache returned by the model.
    """
    context = sampling.within(context_length(model.config))
    check_sampling(sampling)
    check_prompts([prompt], context, int(model.get_input_embeddings().weight.shape[0]))
    [[row]] = begin([prompt], [[key]], sampling.max_tokens, context)
    return _steps(model, PlainSchedule(model, [prompt], [row], sampling, 1, is_cached=True), row)


def _steps(model: PreTrainedModel, schedule: PlainSchedule, row: Conversation) -> Generator[StreamedToken, None, None]:
    while row.finish is None:
        with sampling_mode(model):  # entered per token, because others may use the model in between
            schedule.step()
        check_finite(row)
        yield StreamedToken(row.ids[-1], row.logprobs[-1], row.finish is not None, row.finish or "length")
