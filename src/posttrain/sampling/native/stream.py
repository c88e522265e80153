"""One completion token by token, for someone who waits at the screen."""

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
    """A token with its log-probability at the sampling temperature (1 when greedy), before truncation.

    ``is_last``: it is a stop token, or there is no room for another. ``finish`` counts for the last token only.
    """

    id: int
    logprob: float
    is_last: bool
    finish: Finish


def stream(
    model: PreTrainedModel, prompt: Sequence[int], key: int, sampling: Sampling
) -> Generator[StreamedToken, None, None]:
    """Draw one completion of ``prompt``: the tokens that the native engine draws for the same key.

    Closing the iterator ends the work.

    Raises:
        UsageError: an empty prompt, one that leaves no room in the model's context, or sampling options out of range.
        RunFailure: the model's logits are not finite.
        EngineMismatch: the model returns no cache.
    """
    context = sampling.within(context_length(model.config))
    check_sampling(sampling)
    check_prompts([prompt], context, int(model.get_input_embeddings().weight.shape[0]))
    [[row]] = begin([prompt], [[key]], sampling.max_tokens, context)
    return _steps(model, PlainSchedule(model, [prompt], [row], sampling, 1, is_cached=True), row)


def _steps(model: PreTrainedModel, schedule: PlainSchedule, row: Conversation) -> Generator[StreamedToken, None, None]:
    while row.finish is None:
        with sampling_mode(model):  # entered anew for each token: in between, the model belongs to others
            schedule.step()
        check_finite(row)
        yield StreamedToken(row.ids[-1], row.logprobs[-1], row.finish is not None, row.finish or "length")
