"""Every error that posttrain raises for a user, as one tree.

::

    PosttrainError                    exit code 1; base of everything below
    ├── UsageError                    exit code 2; the request cannot be carried out
    │   ├── RecipeError               a recipe: unknown key, wrong type, components that do not fit
    │   ├── UnknownComponent          a name that no registry knows (with a suggestion)
    │   ├── UnallowedCode             code that a stored recipe names, and nobody allowed
    │   ├── DataError                 an input file: file, line, what is wrong
    │   │   └── DataNotThere          it is not there, or the hub cannot be reached
    │   ├── MissingExtra              an optional dependency, with the command that installs it
    │   └── RunConflict               a run directory that belongs to another recipe or process
    └── RunFailure                    exit code 1; the work itself failed
        ├── RewardFailure             a reward raised, or returned no finite number
        ├── NonFiniteLoss             loss or gradient is NaN or infinite; the batch was saved
        ├── CheckpointError           no checkpoint verifies
        ├── StorageError              the disk is full or not writable
        ├── PeerFailure               another process of the run failed: its message, its exit code
        ├── EngineMismatch            sampler and trainer disagree about the same tokens
        └── Unbalanced                an update is not what its records give

A message names the place (file, line, key), what is wrong, and what would work. ``assert`` is
kept for our own bugs; bad input never ends in a traceback.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # the exit code after Ctrl-C
MOST_LETTERS = 100  # of a name that is compared with others
LETTERS_OF_SHORT, LETTERS_OF_LONG = 5, 9  # of a word: an acronym, and one in which two slips happen
LEAST_LETTERS_OF_PART, LEAST_LETTERS_OF_WORD = 4, 3  # of a beginning, and of a whole word, that stands for a name
MOST_SLIPS = 2
WORDS_WITHOUT_MEANING = frozenset({"num", "number", "n", "of", "the", "new", "total", "use", "enable"})
_DIGITS = "0123456789"
# Ends of most names of methods, of which one letter makes another: policy and preference optimization, LoRA, SFT.
_METHOD = ("po", "ora", "sft", "opd")
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "1234567890")
# Names that are no more, with what to use instead. Commands and their options are named with ``posttrain``.
GONE = {
    "knights_and_knaves": "the task reasoning_gym with dataset: knights_knaves, and its grader scored",
    "llmbar": "preferences, with your file as task.path",
    "pandalm": "preferences, with your file as task.path",
    "mr_gsm8k": "prm800k or math_shepherd, or preferences with your file of steps",
    "prmbench": "prm800k or math_shepherd, or preferences with your file of steps",
    "sycophancy": "jsonl, with your questions as task.path",
    "ifeval": "ifeval:task of contrib/ (contrib/README.md), whose rows name its grader",
    "nim": "nim:nim of contrib/nim",
    "random_play": "nim:random_play of contrib/nim",
    "gymnasium": "gymnasium_adapter:gymnasium of contrib/",
    "openenv": "openenv_adapter:openenv of contrib/",
    "tiny/grpo-nim": "contrib/nim/grpo-nim.yaml",
    "tiny/sft-nim": "contrib/nim/sft-nim.yaml",
    "posttrain feedback": "`python contrib/constitutional/feedback.py`",
    "code_tests.level": "sandbox: bubblewrap (the default) or sandbox: process",
    "code_tests.image": "sandbox: bubblewrap (the default); docker is no longer supported",
    "python.level": "sandbox: bubblewrap (the default) or sandbox: process",
    "python.image": "sandbox: bubblewrap (the default); docker is no longer supported",
    "judge.key_variable": "the environment variable JUDGE_API_KEY",
    "native.cuda_graphs": "the defaults: on CUDA steps are recorded by themselves",
    "vllm.colocate": "a server on the trainer's own GPU, which sleeps while it computes (leave gpus out)",
    "vllm.collectives": "the defaults: NCCL to a server with a GPU of its own, else files in memory",
    "vllm.transfer": "the defaults: NCCL to a server with a GPU of its own, else files in memory",
    "vllm.servers": "gpus (tensor parallel), or a server of yours with vLLM's --data-parallel-size, as url",
    "vllm.logprobs": "the defaults: an evaluation with top_k or top_p has no log-probabilities",
    "judge.pairwise": "posttrain evaluate MODEL --against OTHER --judge judge.yaml, which compares answers",
    "vllm.restarts": "--resume: a server that dies ends the run with its last step saved",
    "vllm.port": "url, with a server that you start at a port of yours; a run's own takes a free one",
    "vllm.gpu_memory": "gpu_memory_utilization",
    "vllm.eager": "enforce_eager",
    "judge.template": "a judge behind a server, which has the template: `posttrain serve MODEL`, with its url",
    "posttrain serve-command --gpu-memory": "the printed line, with --gpu-memory-utilization added",
    "posttrain serve-command --gpu-memory-utilization": "the printed line, with this option of vLLM added",
    "posttrain serve-command --max-model-len": "the printed line, with this option of vLLM changed",
    "posttrain serve-command --dtype": "the printed line, with this option of vLLM changed",
    "posttrain serve-command --seed": "the printed line, with this option of vLLM changed",
    "posttrain serve-command --logprobs-mode": "processed_logprobs, which is always given; logprobs: false needs none",
    "opinion": "numeric, exact or multiple_choice",
    "native.native_kernel": "the defaults: torch computes attention",
    "native.cache": "the defaults: every row has a slot of its own",
    "train.native_kernel": "the defaults: layers run as they are",
    "tiny/grpo-curriculum": "tiny/grpo, with the weights of a mixture's parts",
    "tiny/transcoder": "tiny/sae",
    "native.weights": "the defaults: the trainer's own weights sample",
    "native.path": "the defaults: the fast path samples wherever it computes what the model does",
    "native.wait_steps": "the defaults: the batch waits for the replies",
    "eval.beside": "eval.engine: vllm, which answers on another device; training waits for it",
    "eval.device": "eval.engine: vllm, which answers on another device; training waits for it",
    "rollout.partial": "rollout.staleness alone: an answer ends with the weights with which it began",
    "rollout.partial_tokens": "rollout.staleness alone: an answer ends with the weights with which it began",
    "train.compile": "the defaults: layers run as they are",
    "train.offload": "scale.sharding: fsdp2 over several GPUs, an adapter, or train.gradient_checkpointing",
    "curriculum": "the weights of a mixture's parts; for stages, one run after another (model.name: runs/FIRST)",
    "posttrain chat --colours": "the probabilities of `/v1/chat/completions` (`posttrain serve`, logprobs)",
    "posttrain generate -n": "`--samples`, the number of answers to each prompt",
    "posttrain evaluate --n": "`--limit`, the number of rows of each task",
    "posttrain quantize --n": "`--limit`, the number of rows to measure on",
    "posttrain data --n": "`--limit`, the number of rows to read",
    "posttrain data show --n": "`--limit`, the number of rows to read",
    "posttrain runs tag": "a name that says it (`--run NAME`), or a file of your own in the run's folder",
    "posttrain runs note": "a file of your own in the run's folder",
    "posttrain runs list --tag": "a pattern of names, or `--state`",
    "posttrain runs list --cells": "a pattern such as 'sweep-ppo/cells/*'",
    "posttrain runs list --recipe": "a pattern of names, or `--state`",
    "posttrain runs list --objective": "a pattern of names, or `--state`",
    "posttrain runs list --model": "a pattern of names, or `--state`",
    "posttrain runs list --families": "`posttrain runs show NAME`, which has the runs that it came from",
    "posttrain runs delete --state": "names or a pattern; `posttrain runs --state STATE` lists them",
    "posttrain runs prune --state": "names or a pattern; `posttrain runs --state STATE` lists them",
    "posttrain runs list --reverse": "`--sort KEY`, which puts the largest first where that is best",
    "posttrain compare": "`posttrain sweep` with the same name or file, whose methods are called rows",
    "posttrain study": "`posttrain sweep` with the same name or file, whose parts are called rows",
    "posttrain pipeline": "`posttrain sweep` with the same name or file, whose parts are called rows",
    "methods": "rows",
    "reward_models": "rows",
    "policies": "rows, and needs: NAME of the reward model that rewards it",
    "study": "rows with best_of_n; leave this out",
    "optimize": "needs: NAME in each row that the reward model rewards",
    "task.hub": "task.path: hf:NAME, or hf:NAME:CONFIG@SPLIT",
    "task.hub_split": "task.path: hf:NAME@SPLIT",
    "prm800k.step_separator": "the defaults: a new line stands between two steps",
    "math_shepherd.step_separator": "the defaults: a new line stands between two steps",
    "task.strip_thinking": "rows without the thinking, or hh_rlhf, which has this option",
    "reward_model.bits": "the weights as they were trained; `posttrain evaluate` measures a quantized copy",
    "jsonl.meta_keys": "the defaults: all keys of a row are in meta",
    "mmlu.shots": "contrib/lm_eval_harness.py, or a file of such prompts (jsonl)",
    "mmlu.dev_path": "contrib/lm_eval_harness.py, or a file of such prompts (jsonl)",
    "mmlu.subjects": "the defaults: results are broken down by subject and area",
    "mbpp.shown_tests": "the defaults: the first test stands in the prompt",
    "gsm8k_solutions": "judged_solutions, with your file as task.path",
    "orm-gsm8k": "orm-gsm8k-own, with your file as task.path",
    "mixture.by_weight": "the defaults: examples stand in turns by weight",
    "mixture.size": "size of each part's task",
    "mixture.seed": "seed of each part's task",
    "mixture.split": "split of each part's task",
    "preferences.neutral": "num_classes: 3",
    "reasoning_gym.accept_code_scorer": "another data set (posttrain explain reasoning_gym)",
    "reasoning_gym.accept_exploitable": "another data set (posttrain explain reasoning_gym)",
    "prm800k.alternatives": "the defaults: every rated candidate is an answer of its own",
    "xml_reasoning.chat": "r1_zero, for a model without a chat template",
    "dialogue.user": "dialogue as it is (Human and Assistant), or the model's own chat template",
    "dialogue.assistant": "dialogue as it is (Human and Assistant), or the model's own chat template",
    "dialogue.separator": "dialogue as it is (a blank line), or the model's own chat template",
    "posttrain plan": "`posttrain train RECIPE --dry-run --memory`",
    "posttrain evaluate --probes": "`posttrain evaluate RM` on a file of yours, with such answers as the rejected ones",
    "posttrain evaluate --with": "`python contrib/lm_eval_harness.py MODEL --tasks A,B`",
    "posttrain evaluate --task-folder": "`python contrib/lm_eval_harness.py MODEL --tasks A,B --task-folder DIR`",
    "reward_model.combine": "the defaults: the lowest probability of a step is the score",
    "reward_model.clip": "normalize: true, or a reward of your own that calls it",
    "jumprelu": "batchtopk, which is stored as JumpReLU",
    "dictionary.skip": "`posttrain sae features` on the residual stream; transcoders are gone",
    "dictionary.matryoshka": "two dictionaries of different dictionary.features",
    "activations.target": "activations.site, such as resid.20; transcoders are gone",
    "activations.sites": "`posttrain activations --layer 10,20 --out FOLDER`, then activations.folder",
    "activations.paired": "`posttrain activations BASE --paired POST --out FOLDER`, then activations.folder",
    "activations.stream_rows": "activations.max_rows, and --yes for a large recording",
    "changes.crosscoder": "`posttrain sae train` with activations.source: difference, a dictionary of post - base",
    "post.from_base": "the name of a run; a recipe of post starts from the base",
    "changes.difference": "`posttrain sae train` with activations.source: difference, a dictionary of post - base",
    "changes.dictionaries": "changes.dictionary, with which they are trained",
    "posttrain generate --ablate": "--steer FEATURE=off",
    "posttrain activations --format": "index.json in the folder of the recording",
    "posttrain activations --site": "--layer: the residual stream after each layer is recorded",
    "posttrain sae diff --seeds": "--changes.seeds",
    "posttrain sae diff --site": "--layer: the residual stream after it is compared",
    "posttrain sae features --site": "the 'site' in the metadata of the dictionary's cfg.json",
    "posttrain sae features --top": "the page, which names ten tokens at each end",
    "posttrain sae features --judge": "the contexts and the logit lens of the page",
    "posttrain sae features --judge-model": "the contexts and the logit lens of the page",
    "posttrain sae features --judge-template": "the contexts and the logit lens of the page",
}
_SEPARATORS = re.compile(r"[\W_]+")
_USER_OF_URL = re.compile(r"(?<=://)[^\s'\"]*@")
_KEY_IN_QUERY = re.compile(r"(?i)([?&](?:\w*key|\w*token|\w*secret|pass\w*|auth\w*|sig\w*)=)[^&\s'\"#]+")


_NAMES_A_SECRET = re.compile(r"(?i)\w*(?:api_?key|token|secret|password|access_key\w*)")
_LEAST_SECRET_CHARS = 8


def hide_secrets(text: str) -> str:
    """Return the text without passwords and keys: to be shown and to be stored.

    ``***`` stands for names, passwords and keys in URLs, and for what variables of the environment hold that are
    called like a key (``JUDGE_API_KEY``, ``HF_TOKEN``).
    """
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET_CHARS and value in text and _NAMES_A_SECRET.fullmatch(name):
            text = text.replace(value, "***")
    return _KEY_IN_QUERY.sub(r"\1***", _USER_OF_URL.sub("***@", text))


def first_line(error: BaseException) -> str:
    """Return what the error of a library says: its first line, with the next where the first is only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text[:300]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    A name is meant if the other one is it with typing slips (``name_slips``), its beginning, its words in another order
    or some of its words. Case and the kind of separators do not count. A different name with similar letters is not
    meant: ``gdpo`` is not ``gmpo``.
    """
    found = None
    closest = float("inf")
    wanted = _spelled(name)
    for other in sorted(known):
        text = _spelled(other)
        if not wanted or not text or max(len(name), len(other)) > MOST_LETTERS:
            continue
        cost = _distance_of_names(wanted, text)
        if cost < closest:
            found = other
            closest = cost
    return found


def _distance_of_names(wanted: str, text: str) -> float:
    """Return how far a typed name is from a known one, or infinity for names that differ."""
    words = wanted.split("_")
    others = text.split("_")
    if words == others:
        return 0.0
    if sorted(words) == sorted(others) or "".join(words) == "".join(others):
        return 0.5
    costs = [float("inf")]
    if len(words) == len(others):
        is_acronym = len(words) == 1
        pairs = zip(words, others, strict=True)
        costs.append(sum(name_slips(word, other, is_acronym=is_acronym) for word, other in pairs))
    else:
        costs.append(name_slips("".join(words), "".join(others)) + 0.5)
    is_beginning = len(wanted) >= LEAST_LETTERS_OF_PART and text.startswith(wanted)
    is_some_words = len(wanted) >= LEAST_LETTERS_OF_WORD and set(words) < set(others)
    if is_beginning or is_some_words:
        costs.append(1.5 + len(text) / 1000)
    added = wanted.removeprefix(text)
    is_longer = added != wanted and added.isalpha() and not added.endswith(_METHOD) and len(added) <= len(text)
    if is_longer and len(text) > LEAST_LETTERS_OF_PART:
        costs.append(2.0)  # judgement
    if set(others) < set(words) and set(words) - set(others) <= WORDS_WITHOUT_MEANING:
        costs.append(1.2)  # num_steps
    best = min(costs)
    if best <= MOST_SLIPS:
        return best
    return float("inf")


def name_slips(word: str, other: str, *, is_acronym: bool = True) -> float:
    """Return the number of typing slips between two words, or infinity where they are different words.

    Slips are two neighbouring letters swapped and a letter missing, doubled or replaced. A short name (an acronym
    such as ``gspo``) with a different letter is another name: there, an added letter must be next to the right one on a
    keyboard, a replaced one is not the first, and none of a method (``..po``). Different digits at the end are another
    version. ``is_acronym``: the word is the whole name.
    """
    if word == other:
        return 0.0
    if word.rstrip(_DIGITS) == other.rstrip(_DIGITS):
        return float("inf")
    is_method = word.endswith(_METHOD) or other.endswith(_METHOD)
    if max(len(word), len(other)) > LETTERS_OF_SHORT and not is_method:
        distance = _edit_distance(word, other)
        allowed = 1
        if min(len(word), len(other)) >= LETTERS_OF_LONG:
            allowed = 2
        if distance <= allowed:
            return float(distance)
        return float("inf")
    is_added = not is_acronym and word[0] == other[0] and len(word) != len(other) and _edit_distance(word, other) == 1
    if is_added or _is_one_slip(word, other):
        return 1.0
    return float("inf")


def _is_one_slip(word: str, other: str) -> bool:
    """Return True if a short name is another one after one slip of the fingers."""
    start = 0
    while start < min(len(word), len(other)) and word[start] == other[start]:
        start += 1
    rest = word[start:]
    meant = other[start:]
    if len(rest) == len(meant):
        if rest[:2] == meant[:2][::-1] and rest[2:] == meant[2:]:
            return len(word) > 2
        is_method = word.endswith(_METHOD) or other.endswith(_METHOD)
        is_near = (rest[0] + meant[0]).isalpha() or _are_neighbours(rest[0], meant[0])
        return start > 0 and len(word) > 3 and rest[1:] == meant[1:] and not is_method and is_near
    if start == 0 or abs(len(word) - len(other)) != 1:
        return False
    if len(rest) > len(meant):  # a key was hit twice, or with its neighbour
        around = word[start - 1] + meant[:1]
        return rest[1:] == meant and any(rest[0] == one or _are_neighbours(rest[0], one) for one in around)
    may_miss = meant[0] == other[start - 1] or not rest or not other.endswith(_METHOD)  # gpo is not grpo
    return len(word) > 2 and rest == meant[1:] and may_miss


def _are_neighbours(one: str, other: str) -> bool:
    """Return True for keys that are side by side on a keyboard."""
    return any(one + other in row or other + one in row for row in _KEYBOARD)


def _edit_distance(word: str, other: str) -> int:
    """Return the number of letters added, left out, replaced or swapped with the next one (optimal alignment)."""
    if abs(len(word) - len(other)) > MOST_SLIPS:
        return MOST_LETTERS
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, start=1):
        last = row
        row = [i]
        for j, wanted in enumerate(other, start=1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + int(letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == wanted:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before = last
    return row[-1]


def _spelled(name: str) -> str:
    return _SEPARATORS.sub("_", name[: MOST_LETTERS + 1].lower()).strip("_")


class PosttrainError(Exception):
    """Base of all errors that the command line shows as one message without a traceback.

    Its message hides secrets in URLs.
    """

    exit_code = 1

    def __str__(self) -> str:
        return hide_secrets(super().__str__())


class UsageError(PosttrainError):
    """The request cannot be carried out; nothing was changed."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe or an override is wrong. The message names file, line and key where known."""


class UnknownComponent(UsageError):
    """A name that no registered function carries; the message suggests the nearest."""


class UnallowedCode(UsageError):
    """A function that a file names as ``module:function``, and that nobody allowed to be imported."""


class DataError(UsageError):
    """An input file is missing or malformed.

    Args:
        path: the file.
        what: what is wrong, and what would work.
        line: 1-based line number, where there is one.
    """

    def __init__(self, path: str | Path, what: str, line: int | None = None) -> None:
        place = str(path)
        if line is not None:
            place = f"{path}:{line}"
        super().__init__(f"{place}: {what}")
        self.path = str(path)
        self.line = line


class DataNotThere(DataError):
    """An input file, or a data set of the hub, that is not there or cannot be reached."""


class MissingExtra(UsageError):
    """An optional dependency is not installed.

    Args:
        package: the module that could not be imported.
        extra: the extra of this package that installs it.
        purpose: what it is needed for.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation: from its checkout, or from where it was installed."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        place = str(checkout)
        if checkout == Path.cwd():
            place = "."
        return f"{sys.executable} -m pip install -e '{place}[{extra}]'"
    with suppress(PackageNotFoundError, ValueError):  # a folder, a file or a repository (PEP 610)
        direct_url = json.loads(distribution("posttrain").read_text("direct_url.json") or "{}")
        source = ""
        if direct_url:
            source = f" @ {_source_of(direct_url)}"
        return f"{sys.executable} -m pip install 'posttrain[{extra}]{source}'"
    return f"{sys.executable} -m pip install 'posttrain[{extra}]'"


def _source_of(direct_url: Mapping[str, Any]) -> str:
    """Return where a package was installed from as pip reads it, such as ``git+https://...@COMMIT``."""
    vcs = direct_url.get("vcs_info")
    url = str(direct_url["url"])
    if not vcs:
        return url
    source = f"{vcs.get('vcs', '')}+{url}"
    if vcs.get("commit_id"):
        source = f"{source}@{vcs['commit_id']}"
    return source


class RunConflict(UsageError):
    """A run directory belongs to another recipe, or to a process that is still alive."""


class RunFailure(PosttrainError):
    """The work itself failed; what had been saved is still there."""


class RewardFailure(RunFailure):
    """A reward function raised, or returned something that is no finite number."""


class NonFiniteLoss(RunFailure):
    """A loss or gradient norm is NaN or infinite. The weights were not updated."""


class CheckpointError(RunFailure):
    """No checkpoint could be verified against its manifest."""


class StorageError(RunFailure):
    """The disk is full or not writable."""


class PeerFailure(RunFailure):
    """Another process of the same run failed, ended, or does not answer.

    Args:
        message: says which one, and why.
        exit_code: with which that one ended, where it ended by an error of ours.
        is_loss: that one lost what it works with, so that the same again may succeed.
    """

    def __init__(self, message: str, exit_code: int = RunFailure.exit_code, is_loss: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_loss = is_loss


class EngineMismatch(RunFailure):
    """Sampler and trainer give different log-probabilities for the same tokens."""


class Unbalanced(RunFailure):
    """The log of an update is not what its records give (``train.strict``)."""
