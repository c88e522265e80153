"""User-facing posttrain errors, as a tree.

::

    PosttrainError                    exit code 1; base of everything below
    ├── UsageError                    exit code 2; impossible request
    │   ├── RecipeError               invalid recipe: unknown key, wrong type, incompatible components
    │   ├── UnknownComponent          unregistered name (suggests alternatives)
    │   ├── UnallowedCode             unallowed code named by a stored recipe
    │   ├── DataError                 bad input file: path, line, problem
    │   │   └── DataNotThere          missing file, or hub unreachable
    │   ├── MissingExtra              missing optional dependency, plus install command
    │   └── RunConflict               run directory used by another recipe or process
    └── RunFailure                    exit code 1; the work itself failed
        ├── RewardFailure             reward raised, or returned a non-finite value
        ├── NonFiniteLoss             NaN or infinite loss or gradient; batch saved
        ├── CheckpointError           no valid checkpoint
        ├── StorageError              disk full or read-only
        ├── PeerFailure               another process in this run failed: message, exit code
        ├── EngineMismatch            sampler and trainer disagree on identical tokens
        └── Unbalanced                logged update contradicts its records

Messages state place (file, line, key), problem and remedy. ``assert`` is reserved for internal bugs; bad
input never causes a traceback.
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
MOST_LETTERS = 100  # limit on names being compared
LETTERS_OF_SHORT, LETTERS_OF_LONG = 5, 9  # word lengths: acronyms, and words long enough for two slips
LEAST_LETTERS_OF_PART, LEAST_LETTERS_OF_WORD = 4, 3  # lengths from which prefixes and whole words match
MOST_SLIPS = 2
WORDS_WITHOUT_MEANING = frozenset({"num", "number", "n", "of", "the", "new", "total", "use", "enable"})
_DIGITS = "0123456789"
# Common method suffixes, where a single changed letter gives another method: policy or preference optimization, LoRA,
# SFT.
_METHOD = ("po", "ora", "sft", "opd")
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "1234567890")
# Removed names, mapped to replacements. Commands and options start with ``posttrain``.
GONE = {
    "knights_and_knaves": "task reasoning_gym, dataset: knights_knaves, grader scored",
    "llmbar": "preferences, setting task.path to your file",
    "pandalm": "preferences, setting task.path to your file",
    "mr_gsm8k": "prm800k, math_shepherd, or preferences reading your step file",
    "prmbench": "prm800k, math_shepherd, or preferences reading your step file",
    "sycophancy": "jsonl, setting task.path to your questions",
    "ifeval": "ifeval:task from contrib/ (contrib/README.md); rows name the grader",
    "nim": "nim:nim from contrib/nim",
    "random_play": "nim:random_play from contrib/nim",
    "gymnasium": "gymnasium_adapter:gymnasium from contrib/",
    "openenv": "openenv_adapter:openenv from contrib/",
    "tiny/grpo-nim": "contrib/nim/grpo-nim.yaml",
    "tiny/sft-nim": "contrib/nim/sft-nim.yaml",
    "posttrain feedback": "`python contrib/constitutional/feedback.py`",
    "code_tests.level": "sandbox: bubblewrap (the default) or sandbox: process",
    "code_tests.image": "sandbox: bubblewrap (default); docker support was dropped",
    "python.level": "sandbox: bubblewrap (the default) or sandbox: process",
    "python.image": "sandbox: bubblewrap (default); docker support was dropped",
    "judge.key_variable": "the environment variable JUDGE_API_KEY",
    "native.cuda_graphs": "the defaults: CUDA graphs are recorded automatically",
    "vllm.colocate": "a server sharing the trainer's GPU, sleeping during training (omit gpus)",
    "vllm.collectives": "the defaults: NCCL for servers on separate GPUs, else in-memory files",
    "vllm.transfer": "the defaults: NCCL for servers on separate GPUs, else in-memory files",
    "vllm.servers": "gpus (tensor parallel), or url for your server started with --data-parallel-size",
    "vllm.logprobs": "the defaults: evaluations using top_k or top_p omit log-probabilities",
    "judge.pairwise": "posttrain evaluate MODEL --against OTHER --judge judge.yaml to compare answers",
    "vllm.restarts": "--resume: if a server dies, the run stops after saving",
    "vllm.port": "url, if you start a server on a fixed port; managed servers pick free ports",
    "vllm.gpu_memory": "gpu_memory_utilization",
    "vllm.eager": "enforce_eager",
    "judge.template": "url of a judge server, which applies the template: `posttrain serve MODEL`",
    "posttrain serve-command --gpu-memory": "the printed line, with --gpu-memory-utilization added",
    "posttrain serve-command --gpu-memory-utilization": "the printed line, with this option of vLLM added",
    "posttrain serve-command --max-model-len": "the printed line, with this option of vLLM changed",
    "posttrain serve-command --dtype": "the printed line, with this option of vLLM changed",
    "posttrain serve-command --seed": "the printed line, with this option of vLLM changed",
    "posttrain serve-command --logprobs-mode": "processed_logprobs, which is always set; logprobs: false needs nothing",
    "opinion": "numeric, exact or multiple_choice",
    "native.native_kernel": "the defaults: torch computes attention",
    "native.cache": "the defaults: every row gets a separate slot",
    "train.native_kernel": "the defaults: layers run unmodified",
    "tiny/grpo-curriculum": "tiny/grpo, setting mixture weights",
    "tiny/transcoder": "tiny/sae",
    "native.weights": "the defaults: sampling uses the trainer's weights",
    "native.path": "the defaults: the fast path is used whenever it matches the model",
    "native.wait_steps": "the defaults: batches wait for replies",
    "eval.beside": "eval.engine: vllm, running on another device while training waits",
    "eval.device": "eval.engine: vllm, running on another device while training waits",
    "rollout.partial": "only rollout.staleness: weights never change during an answer",
    "rollout.partial_tokens": "only rollout.staleness: weights never change during an answer",
    "train.compile": "the defaults: layers run unmodified",
    "train.offload": "scale.sharding: fsdp2 over several GPUs, an adapter, or train.gradient_checkpointing",
    "curriculum": "mixture weights; for stages, consecutive runs (model.name: runs/FIRST)",
    "posttrain chat --colours": "the probabilities of `/v1/chat/completions` (`posttrain serve`, logprobs)",
    "posttrain generate -n": "`--samples`, the number of answers per prompt",
    "posttrain evaluate --n": "`--limit`, the number of rows per task",
    "posttrain quantize --n": "`--limit`, the number of rows to measure on",
    "posttrain data --n": "`--limit`, the number of rows to read",
    "posttrain data show --n": "`--limit`, the number of rows to read",
    "posttrain runs tag": "a descriptive name (`--run NAME`), or your notes file in the run folder",
    "posttrain runs note": "your notes file in the run folder",
    "posttrain runs list --tag": "a pattern of names, or `--state`",
    "posttrain runs list --cells": "a pattern such as 'sweep-ppo/cells/*'",
    "posttrain runs list --recipe": "a pattern of names, or `--state`",
    "posttrain runs list --objective": "a pattern of names, or `--state`",
    "posttrain runs list --model": "a pattern of names, or `--state`",
    "posttrain runs list --families": "`posttrain runs show NAME`, which lists parent runs",
    "posttrain runs delete --state": "names or a pattern; `posttrain runs --state STATE` lists them",
    "posttrain runs prune --state": "names or a pattern; `posttrain runs --state STATE` lists them",
    "posttrain runs list --reverse": "`--sort KEY`, which sorts best first",
    "posttrain compare": "`posttrain sweep` on the same name or file, renaming methods to rows",
    "posttrain study": "`posttrain sweep` on the same name or file, renaming parts to rows",
    "posttrain pipeline": "`posttrain sweep` on the same name or file, renaming parts to rows",
    "methods": "rows",
    "reward_models": "rows",
    "policies": "rows, naming the reward model under needs: NAME",
    "study": "rows with best_of_n; omit this key",
    "optimize": "needs: NAME in every row using this reward model",
    "task.hub": "task.path: hf:NAME, or hf:NAME:CONFIG@SPLIT",
    "task.hub_split": "task.path: hf:NAME@SPLIT",
    "prm800k.step_separator": "the defaults: steps are separated by newlines",
    "math_shepherd.step_separator": "the defaults: steps are separated by newlines",
    "task.strip_thinking": "rows without thinking, or hh_rlhf, which supports this option",
    "reward_model.bits": "unquantized weights; `posttrain evaluate` measures quantized copies",
    "jsonl.meta_keys": "the defaults: meta holds all row keys",
    "mmlu.shots": "contrib/lm_eval_harness.py, or such prompts in jsonl",
    "mmlu.dev_path": "contrib/lm_eval_harness.py, or such prompts in jsonl",
    "mmlu.subjects": "the defaults: results are listed by subject and area",
    "mbpp.shown_tests": "the defaults: prompts contain the first test",
    "gsm8k_solutions": "judged_solutions, setting task.path to your file",
    "orm-gsm8k": "orm-gsm8k-own, setting task.path to your file",
    "mixture.by_weight": "the defaults: examples alternate by weight",
    "mixture.size": "size in every part's task",
    "mixture.seed": "seed in every part's task",
    "mixture.split": "split in every part's task",
    "preferences.neutral": "num_classes: 3",
    "reasoning_gym.accept_code_scorer": "another data set (posttrain explain reasoning_gym)",
    "reasoning_gym.accept_exploitable": "another data set (posttrain explain reasoning_gym)",
    "prm800k.alternatives": "the defaults: every rated candidate is a separate answer",
    "xml_reasoning.chat": "r1_zero, for a model without a chat template",
    "dialogue.user": "plain dialogue (Human and Assistant), or the model's chat template",
    "dialogue.assistant": "plain dialogue (Human and Assistant), or the model's chat template",
    "dialogue.separator": "plain dialogue (blank line), or the model's chat template",
    "posttrain plan": "`posttrain train RECIPE --dry-run --memory`",
    "posttrain evaluate --probes": "`posttrain evaluate RM` on your file, using such answers as rejected",
    "posttrain evaluate --with": "`python contrib/lm_eval_harness.py MODEL --tasks A,B`",
    "posttrain evaluate --task-folder": "`python contrib/lm_eval_harness.py MODEL --tasks A,B --task-folder DIR`",
    "reward_model.combine": "the defaults: the lowest step probability is the score",
    "reward_model.clip": "normalize: true, or your custom reward wrapping it",
    "jumprelu": "batchtopk, which is stored as JumpReLU",
    "dictionary.skip": "`posttrain sae features` on the residual stream; transcoders are gone",
    "dictionary.matryoshka": "two dictionaries of different dictionary.features",
    "activations.target": "activations.site, such as resid.20; transcoders are gone",
    "activations.sites": "`posttrain activations --layer 10,20 --out FOLDER`, then activations.folder",
    "activations.paired": "`posttrain activations BASE --paired POST --out FOLDER`, then activations.folder",
    "activations.stream_rows": "activations.max_rows, and --yes for a large recording",
    "changes.crosscoder": "`posttrain sae train` with activations.source: difference, for a post - base dictionary",
    "post.from_base": "a run name; post recipes start from the base",
    "changes.difference": "`posttrain sae train` with activations.source: difference, for a post - base dictionary",
    "changes.dictionaries": "changes.dictionary, which configures their training",
    "posttrain generate --ablate": "--steer FEATURE=off",
    "posttrain activations --format": "index.json in the recording folder",
    "posttrain activations --site": "--layer: the residual stream after each layer is recorded",
    "posttrain sae diff --seeds": "--changes.seeds",
    "posttrain sae diff --site": "--layer: compares the residual stream after that layer",
    "posttrain sae features --site": "'site' in the metadata inside the dictionary's cfg.json",
    "posttrain sae features --top": "the page, listing ten tokens per end",
    "posttrain sae features --judge": "contexts and logit lens on the page",
    "posttrain sae features --judge-model": "contexts and logit lens on the page",
    "posttrain sae features --judge-template": "contexts and logit lens on the page",
}
_SEPARATORS = re.compile(r"[\W_]+")
_USER_OF_URL = re.compile(r"(?<=://)[^\s'\"]*@")
_KEY_IN_QUERY = re.compile(r"(?i)([?&](?:\w*key|\w*token|\w*secret|pass\w*|auth\w*|sig\w*)=)[^&\s'\"#]+")


_NAMES_A_SECRET = re.compile(r"(?i)\w*(?:api_?key|token|secret|password|access_key\w*)")
_LEAST_SECRET_CHARS = 8


def hide_secrets(text: str) -> str:
    """Redact passwords and keys before showing or storing text.

    Replaces by ``***``: credentials and keys in URLs, plus values of environment variables named like keys
    (``JUDGE_API_KEY``, ``HF_TOKEN``).
    """
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET_CHARS and value in text and _NAMES_A_SECRET.fullmatch(name):
            text = text.replace(value, "***")
    return _KEY_IN_QUERY.sub(r"\1***", _USER_OF_URL.sub("***@", text))


def first_line(error: BaseException) -> str:
    """Extract a library error's first line, adding the second if the first is only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text[:300]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the most likely intended name, or None.

    Matches typing slips (``name_slips``), prefixes, reordered words and subsets of words, ignoring case and
    separators. Similar but distinct names do not match: ``gdpo`` is not ``gmpo``.
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
    """Measure the distance between typed and known names; infinite if unrelated."""
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
    """Count typing slips between two words; infinite if they are different words.

    A slip swaps two adjacent letters, or drops, doubles or replaces a letter. For short names (acronyms such as
    ``gspo``), most letter changes give another name: an added letter must neighbor the correct key, and a replaced
    letter must not be the first, nor may the name be a method (``..po``). Different trailing digits mean another
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
    """Check if two short names differ by a single slip."""
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
    if len(rest) > len(meant):  # doubled or neighboring key
        around = word[start - 1] + meant[:1]
        return rest[1:] == meant and any(rest[0] == one or _are_neighbours(rest[0], one) for one in around)
    may_miss = meant[0] == other[start - 1] or not rest or not other.endswith(_METHOD)  # gpo is not grpo
    return len(word) > 2 and rest == meant[1:] and may_miss


def _are_neighbours(one: str, other: str) -> bool:
    """Check if two keys are adjacent."""
    return any(one + other in row or other + one in row for row in _KEYBOARD)


def _edit_distance(word: str, other: str) -> int:
    """Compute edit distance, counting adjacent swaps as one (optimal alignment)."""
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
    """Base class for errors shown as a single message without traceback.

    Messages redact secrets in URLs.
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
    """Raised for unregistered component names; the message suggests the nearest."""


class UnallowedCode(UsageError):
    """Raised if a file names ``module:function`` code the user did not allow."""


class DataError(UsageError):
    """Raised for missing or malformed input files.

    Args:
        path: input file.
        what: problem plus remedy.
        line: 1-based line number, if known.
    """

    def __init__(self, path: str | Path, what: str, line: int | None = None) -> None:
        place = str(path)
        if line is not None:
            place = f"{path}:{line}"
        super().__init__(f"{place}: {what}")
        self.path = str(path)
        self.line = line


class DataNotThere(DataError):
    """Raised if an input file or hub data set is missing or unreachable."""


class MissingExtra(UsageError):
    """Raised if an optional dependency is not installed.

    Args:
        package: missing module.
        extra: this package's extra providing it.
        purpose: why it is needed.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Build the command adding an extra to this installation, from its checkout or original source."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        place = str(checkout)
        if checkout == Path.cwd():
            place = "."
        return f"{sys.executable} -m pip install -e '{place}[{extra}]'"
    with suppress(PackageNotFoundError, ValueError):  # folder, file or repository (PEP 610)
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
    """Raised if a run directory belongs to another recipe or a live process."""


class RunFailure(PosttrainError):
    """The work itself failed; what had been saved is still there."""


class RewardFailure(RunFailure):
    """Raised if a reward function fails or returns anything except a finite number."""


class NonFiniteLoss(RunFailure):
    """Raised for NaN or infinite losses or gradient norms. Weights were not updated."""


class CheckpointError(RunFailure):
    """Raised if no checkpoint matches its manifest."""


class StorageError(RunFailure):
    """Raised if the disk is full or read-only."""


class PeerFailure(RunFailure):
    """Raised if another process in this run failed, ended, or stopped answering.

    Args:
        message: names the process and reason.
        exit_code: that process's exit code, if it ended by a posttrain error.
        is_loss: the process lost a resource, so retrying may succeed.
    """

    def __init__(self, message: str, exit_code: int = RunFailure.exit_code, is_loss: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_loss = is_loss


class EngineMismatch(RunFailure):
    """Raised if sampler and trainer assign different log-probabilities to identical tokens."""


class Unbalanced(RunFailure):
    """Raised if a logged update does not follow from its records (``train.strict``)."""
