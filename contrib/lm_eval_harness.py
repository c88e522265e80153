"""The lm-evaluation-harness on a model of ours, offline, through the native engine.

python contrib/lm_eval_harness.py MODEL --tasks A,B [--task-folder DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from posttrain import registry
from posttrain.data.render import encode_plain, encode_prompt, stop_ids
from posttrain.errors import PosttrainError, UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import MicroBatching
from posttrain.randomness import derive_key
from posttrain.recipes.sections import Component
from posttrain.runs.models import find_source
from posttrain.sampling.base import Sampling
from posttrain.sampling.models import OpenedModel, complete_template, open_model
from posttrain.store.durable import replace_file
from posttrain.types import Message, Sample, collate

MAX_NEW_TOKENS = 256  # the harness's own default (``max_gen_toks``)
TOKENS_PER_MICRO = 16_384
# The options of generation that are known here.
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):
    """Asks the engine of an opened model, whose weights it also takes likelihoods by.

    A context is the task's own text as it stands; with ``templated`` it is the user's message in the model's template.
    """

    def __init__(self, opened: OpenedModel, *, seed: int = 0, templated: bool = False) -> None:
        super().__init__()
        self.opened, self.seed, self.templated = opened, seed, templated
        self.forward = Forward(opened.model)

    @property
    def eot_token_id(self) -> int:
        """Return the token before a text that has no context."""
        return int(self.opened.tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        """Return how many tokens context and text may have together."""
        return self.opened.context_tokens

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids, with the tokenizer's own beginning unless it is switched off or there already."""
        tokenizer = self.opened.tokenizer
        begins = bool(tokenizer.bos_token) and string.startswith(tokenizer.bos_token)
        adds = not begins if add_special_tokens is None else add_special_tokens
        return list(tokenizer.encode(string, add_special_tokens=adds))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not self.templated:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            return pair
        return self._prompt(context), encode_plain(self.opened.tokenizer, continuation)

    def _prompt(self, context: str) -> list[int]:
        if not self.templated:
            return self.tok_encode(context)
        return encode_prompt(self.opened.tokenizer, self.opened.grader.template, [Message("user", context)])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability in nats, and whether it is the greedy one."""
        samples: list[Sample] = []
        for _texts, context, continuation in requests:
            ids = [*context, *continuation]
            if len(ids) > self.max_length:
                raise UsageError(f"a text of {len(ids)} tokens, and the model's context has {self.max_length}")
            samples.append(Sample(ids, [i >= len(context) for i in range(len(ids))], group=len(samples)))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(samples)
        batch = collate(samples)
        with torch.no_grad():
            for micro in MicroBatching(TOKENS_PER_MICRO).over(batch, self.forward):
                part = micro.part
                logprobs = self.forward(part, "none").logprobs.cpu().double()
                likeliest = self.forward.top_candidates(part, 1)[0][..., 0].cpu()
                for place, row in enumerate(micro.rows):
                    mask = part.mask[place]
                    is_greedy = bool((likeliest[place] == part.tokens[place])[mask].all())
                    found[row] = float(logprobs[place][mask].sum()), is_greedy
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each whole text's log-probability in nats; a long one in windows that predict each token once."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return how the engine continues each context, up to the first of its stop texts.

        Raises:
            UsageError: a task asks for an option of generation that is not known here, or a context leaves no room.
        """
        texts = [""] * len(requests)
        alike: dict[Sampling, list[int]] = {}  # requests that are drawn in the same way are drawn together
        stops = []
        for number, request in enumerate(requests):
            sampling, until = self._sampling(request.args[1])
            alike.setdefault(sampling, []).append(number)
            stops.append(until)
        for sampling, numbers in alike.items():
            prompts = [self._prompt(requests[number].args[0]) for number in numbers]
            keys = [[derive_key(self.seed, "lm-eval", 0, number)] for number in numbers]
            completions = self.opened.engine.generate(prompts, keys, sampling)
            for number, [completion] in zip(numbers, completions, strict=True):
                kept = [token for token in completion.ids if token not in sampling.stop_ids]
                text = str(self.opened.tokenizer.decode(kept, skip_special_tokens=True))
                ends = [place for stop in stops[number] if (place := text.find(stop)) >= 0]
                texts[number] = text[: min(ends, default=len(text))]
        return texts

    def _sampling(self, options: Mapping[str, Any]) -> tuple[Sampling, list[str]]:
        unknown = sorted(options.keys() - KNOWN)
        if unknown:
            raise UsageError(f"generation_kwargs {unknown} are not known here; {sorted(KNOWN)} are")
        until = options.get("until") or []
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        sampling = Sampling(
            min(int(options.get("max_gen_toks", MAX_NEW_TOKENS)), self.max_length - 1),
            temperature=temperature,
            top_k=options.get("top_k") if temperature else None,
            top_p=float(options.get("top_p", 1.0)) if temperature else 1.0,
            stop_ids=stop_ids(self.opened.tokenizer, self.opened.grader.template),
        )
        return sampling, [until] if isinstance(until, str) else [stop for stop in until if stop]


def measure(opened: OpenedModel, given: argparse.Namespace) -> Mapping[str, Any]:
    """Return the harness's results of the tasks.

    Raises:
        UsageError: no such task, or the harness failed.
    """
    tasks, folder = given.tasks.split(","), given.task_folder
    place = f"--task-folder {folder}" if folder is not None else "--tasks"
    manager = registry.call(
        place, lambda: TaskManager(include_path=None if folder is None else str(folder), include_defaults=not folder)
    )
    for task in tasks:
        if task not in manager.all_tasks:
            raise UsageError(f"{place}: no task {task!r}.{registry.suggest(task, manager.all_tasks)}")
    model = HarnessModel(opened, seed=given.seed, templated=given.template is not None)
    options = {"limit": given.limit, "log_samples": True, "bootstrap_iters": 0, "random_seed": given.seed}
    return dict(
        registry.call(
            f"--tasks {given.tasks}",
            lambda: simple_evaluate(model=model, tasks=tasks, task_manager=manager, **options),
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one model; print its metrics, and write them with every answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="tiny, a model directory, a run, or a hub name")
    parser.add_argument("--tasks", required=True, metavar="A,B", help="tasks of the harness")
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="task files of yours, which run as code")
    parser.add_argument("--template", help="ask in this prompt template (default: the task's text alone)")
    parser.add_argument("--limit", type=int, default=500, help="the first rows of each task, at most (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="default: the run's, or auto")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for (default: runs)")
    parser.add_argument("--out", type=Path, default=Path("evaluations/lm-eval"), help="where results and answers go")
    given = parser.parse_args(arguments)
    try:
        if given.task_folder is not None and not given.task_folder.is_dir():
            raise UsageError(f"--task-folder {given.task_folder}: no such folder")
        source = find_source(given.model, given.runs_dir)
        template = complete_template(Component(name=given.template), source) if given.template else None
        results = measure(open_model(source, template, device=given.device), given)
    except PosttrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    given.out.mkdir(parents=True, exist_ok=True)
    for name in ("results", "samples"):
        replace_file(given.out / f"{name}.json", json.dumps(results[name], default=str, indent=1).encode())
    for task, metrics in results["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float | int) and "_stderr" not in metric and "," in metric:
                print(f"{task}  {metric.replace(',none', '')}  {value:.4g}  (n = {len(results['samples'][task])})")
    print(f"results and every answer: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
