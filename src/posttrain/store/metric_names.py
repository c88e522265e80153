"""The registry of metrics: name, label, unit, direction and meaning of every number that is recorded or shown.

The same quantity has the same name in ``metrics.jsonl``, on the terminal, in results of evaluations, reports, pictures
and trackers. ``docs/reference/metrics.md`` is written from here, and ``posttrain explain NAME`` answers from here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.errors import UsageError
from posttrain.registry import suggest

Unit = Literal["share", "number", "nats", "tokens", "seconds", "bytes", "tokens per second", "count"]
Direction = Literal["higher", "lower", "none"]
KL = "kl_initial"
_FORMS = {
    "share": ".1%",
    "tokens": ",.1f",
    "count": ",.0f",
    "seconds": ".1f",
    "bytes": ",.0f",
    "tokens per second": ",.0f",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity. ``better``: the direction that is better.

    A primary metric is shown with ``further`` ones; ``of``: what it is measured on.
    """

    name: str
    unit: Unit
    better: Direction
    meaning: str
    label: str = ""
    of: str = "prompts"
    further: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    @property
    def is_share(self) -> bool:
        return self.unit == "share"

    def value(self, results: Mapping[str, object]) -> float | None:
        """Return its value; None where it was not measured, or is no finite number."""
        value = results.get(self.name)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        return None

    def mean(self, evaluations: Iterable[Mapping[str, float]]) -> float | None:
        """Return the mean over those evaluations that have it."""
        values = []
        for results in evaluations:
            value = self.value(results)
            if value is not None:
                values.append(value)
        if values:
            return math.fsum(values) / len(values)
        return None

    def interval(self, results: Mapping[str, float]) -> tuple[float, float] | None:
        """Return its 95 % interval, where one was measured."""
        low = results.get(f"{self.name}_low", math.nan)
        high = results.get(f"{self.name}_high", math.nan)
        if self.value(results) is not None and math.isfinite(low) and math.isfinite(high):
            return (low, high)
        return None

    def goodness(self, value: float) -> float:
        """Return a number that is larger for what is better."""
        if self.better == "lower":
            return -value
        return value

    def numbers(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return value, interval and further metrics, of those results that are finite."""
        names = (self.name, f"{self.name}_low", f"{self.name}_high", *self.further)
        return {name: results[name] for name in names if math.isfinite(results.get(name, math.nan))}

    def brief(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return its value and the KL that is shown with it: enough for a line about one of many runs."""
        names = [self.name]
        if KL in self.further:
            names.append(KL)
        return {name: results[name] for name in names if name in results}

    def show(self, value: float) -> str:
        """``50.0%``, ``0.731``, ``1.2e-05``; a very large number in three digits."""
        if abs(value) >= 1e12:
            return f"{value:.3g}"
        form = _FORMS.get(self.unit, ".3f")
        if self.unit == "nats" and 0 < abs(value) < 1e-3:
            form = ".1e"
        return f"{value:{form}}"

    def describe(self, results: Mapping[str, float]) -> str:
        """``accuracy 50.0% [43.9%, 56.1%]``, ``reward 0.731 · KL from initial model 2.310``; empty if not measured."""
        value = self.value(results)
        if value is None:
            return ""
        shown = f"{self.label} {self.show(value)}"
        interval = self.interval(results)
        if interval is not None:
            low, high = interval
            shown += f" [{self.show(low)}, {self.show(high)}]"
        parts = [shown]
        for name in self.further:
            if name in results:
                metric = metric_of(name)
                parts.append(f"{metric.label} {metric.show(results[metric.name])}")
        return " · ".join(parts)


ACCURACY = Metric("accuracy", "share", "higher", "Share of the answers that are correct, of those with a reference "
                  "answer.", of="problems")  # fmt: skip
REWARD = Metric("reward", "number", "higher", "Weighted sum of the rewards of an answer, the mean.", further=(KL,))
# fmt: off
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Answers: sampled in training, or of an evaluation": (
        REWARD,
        ACCURACY,
        Metric("format", "share", "higher", "Share of the answers in the format that the template asks for."),
        Metric("shows_reasoning", "share", "higher", "Share of the answers that show their steps."),
        Metric("completion_length", "tokens", "none", "Tokens that the model wrote in an answer, the mean."),
        Metric("completion_length_correct", "tokens", "none", "The same of correct answers."),
        Metric("completion_length_wrong", "tokens", "none", "The same of wrong answers."),
        Metric("truncated", "share", "lower", "Share of the answers that a limit cut off."),
        Metric("out_of_turns", "share", "lower", "Share of the answers that the limit of turns ended."),
        Metric("tool_failed", "share", "lower", "Share of the answers that a tool ended by its time-out."),
        Metric("environment_failures", "share", "lower", "Share of the answers that a failing environment ended."),
        Metric("played_again", "share", "lower", "Share of the answers that were sampled again after a failure of the "
               "environment."),
        Metric("grading_failures", "share", "lower", "Share of the gradings that were stopped or crashed."),
        Metric("no_reward", "share", "none", "Share of the answers for which every reward function returned None."),
        Metric("num_turns", "number", "none", "Turns of an answer, the mean.", "turns"),
        Metric("num_calls", "number", "none", "Calls of tools in an answer, the mean.", "calls"),
        Metric("failed_calls", "share", "lower", "Share of the calls of tools that failed."),
    ),
    "Rollout batches": (
        Metric("uniform_groups", "share", "lower", "Share of the prompts whose answers all have the same reward: no "
               "signal."),
        Metric("accepted_groups", "share", "none", "Share of the sampled groups that dynamic sampling keeps."),
        Metric("selected", "share", "none", "Share of the answers that are trained on."),
        Metric("masked", "share", "none", "Share of the selected units that are left out of the loss as truncated."),
        Metric("staleness", "number", "none", "Rollout batches between the weights that sampled and those trained."),
        Metric("advantage_mean", "number", "none", "Mean of the advantages of the answers."),
        Metric("advantage_std", "number", "none", "Their standard deviation."),
        Metric("advantage_min", "number", "none", "The smallest of them."),
        Metric("advantage_max", "number", "none", "The largest of them."),
        Metric("return_mean", "number", "none", "Mean of the returns that the critic learns."),
        Metric("kl_in_reward", "nats", "none", "KL to the reference that the reward is reduced by, per answer.",
               "KL in the reward"),
        Metric("kl_weight", "number", "none", "Weight of that KL.", "KL weight"),
        Metric("prompts", "count", "none", "Prompts of a part of a mixture (`PART:prompts`) in the batch."),
        Metric("trained", "count", "none", "Those of them that are trained on (`PART:trained`)."),
    ),
    "Updates": (
        Metric("loss", "nats", "lower", "The objective under its aggregation; held out and of demonstrations, the mean "
               "of −log π over the trained tokens.", of="examples", further=("perplexity", "token_accuracy")),
        Metric("nll", "nats", "lower", "Mean of −log π over the trained tokens; `loss` under `token_mean`.", "NLL"),
        Metric("entropy", "nats", "none", "Entropy of the next token's distribution, the mean over the answers' "
               "tokens."),
        Metric("ratio", "number", "none", "Ratio of the trained policy's probability to that before the update."),
        Metric("ratio_distance", "number", "none", "Distance of that ratio from 1, the mean; rounding at the first "
               "update of a batch of answers."),
        Metric("clip_fraction", "share", "none", "Share of the tokens whose ratio is clipped."),
        Metric("kl_ref", "nats", "none", "KL to the reference model per token, the k3 estimate.", "KL to reference"),
        Metric("kl_sampler", "nats", "lower", "KL from the sampler to the trainer per token (k3): rounding alone, "
               "unless samples are reused.", "KL to sampler"),
        Metric("kl_teacher", "nats", "lower", "KL to the teacher per token, estimated from the sampled tokens.",
               "KL to teacher"),
        Metric("effective_sample_size", "share", "higher", "Share of the tokens that the importance weights between "
               "sampler and trainer leave."),
        Metric("correction", "number", "none", "Weight of the correction of sampler and trainer, the mean."),
        Metric("clamped_log_ratios", "share", "lower", "Share of the tokens with a log-ratio beyond ±20."),
        Metric("value_loss", "number", "lower", "Loss of the critic."),
        Metric("value_clip_fraction", "share", "none", "Share of the tokens whose value is clipped."),
        Metric("value_explained_variance", "share", "higher", "Share of the returns' variance that the critic "
               "explains."),
        Metric("divergence", "nats", "lower", "Divergence from the teacher per token."),
        Metric("student_mass", "share", "none", "Probability of the candidates under the student."),
        Metric("teacher_mass", "share", "none", "Probability of the candidates under the teacher."),
        Metric("feedback_share", "share", "none", "Share of the tokens in answers that have feedback."),
        Metric("weights_moved", "share", "none", "1 if the step changed a sample of the weights (first steps)."),
        Metric("grad_norm", "number", "none", "Norm of the gradient before clipping."),
        Metric("lr", "number", "none", "Learning rate of the update."),
        Metric("trained_tokens", "count", "none", "Tokens that the update is computed from."),
        Metric("computed_rows", "count", "none", "Rows that the update computed. Rows that cannot change the gradient "
               "are left out (`train.skip_zero_rows`), and the other metrics of an update are then of the computed "
               "rows; the first, the last and every saved step compute all rows."),
        Metric("padding_share", "share", "lower", "Share of the computed positions that are padding."),
    ),
    "Preferences and reward models": (
        Metric("pair_accuracy", "share", "higher", "Share of the pairs whose better answer has the higher score or "
               "implicit reward; a tie counts half.", of="pairs", further=("loss",)),
        Metric("answer_accuracy", "share", "higher", "Share of the answers whose final score or implicit reward agrees "
               "with the label; a tie counts half.", of="answers", further=("loss",)),
        Metric("step_accuracy", "share", "higher", "Share of the steps that are judged as they are labelled.",
               of="solutions", further=("loss",)),
        Metric("outcome_accuracy", "share", "higher", "Share of the trained tokens whose score agrees with the label."),
        Metric("solution_accuracy", "share", "higher", "Share of the solutions whose first wrong step is found, or "
               "that are found to have none."),
        Metric("margin", "number", "higher", "Score (or implicit reward) of the better answer less that of the worse."),
        Metric("chosen_score", "number", "none", "Score of the better answer of a pair."),
        Metric("rejected_score", "number", "none", "Score of the worse answer of a pair."),
        Metric("chosen_reward", "number", "none", "Implicit reward of the better answer of a pair."),
        Metric("rejected_reward", "number", "none", "Implicit reward of the worse answer of a pair."),
        Metric("chosen_logprob", "nats", "none", "Log-probability of the better answer of a pair."),
        Metric("rejected_logprob", "nats", "none", "Log-probability of the worse answer of a pair."),
        Metric("chosen_nll", "nats", "lower", "Mean of −log π over the tokens of the better answers.", "chosen NLL"),
        Metric("implicit_reward", "number", "none", "β times the log-ratio of an answer to the reference, the mean."),
        Metric("desirable", "share", "none", "Share of the answers that are desirable."),
        Metric("desirable_reward", "number", "higher", "Implicit reward of desirable answers."),
        Metric("undesirable_reward", "number", "lower", "Implicit reward of undesirable answers."),
        Metric("kl_baseline", "nats", "none", "KL to the reference that KTO compares with.", "KL baseline"),
        Metric("logprob", "nats", "none", "Log-probability of an answer, the mean."),
        Metric("positive_share", "share", "none", "Share of the steps with the best label."),
        Metric("correct_share", "share", "none", "Share of the given answers that are correct."),
        Metric("auc", "share", "higher", "Area under the ROC curve of scores of correct over wrong answers.", "AUC"),
        Metric("step_auc", "share", "higher", "The same of good over bad steps.", "step AUC"),
        Metric("top_one", "share", "higher", "Share of the problems whose highest-scored answer is correct."),
        Metric("random_one", "share", "none", "Share that a random answer would give."),
        Metric("oracle", "share", "none", "Share of the problems with a correct answer among those given."),
        Metric("error_f1", "share", "higher", "Harmonic mean of the next two.", "F1"),
        Metric("accuracy_erroneous", "share", "higher", "`solution_accuracy` of solutions with an error."),
        Metric("accuracy_correct", "share", "higher", "`solution_accuracy` of solutions without an error."),
        Metric("num_problems", "count", "none", "Problems with several answers."),
        Metric("labelled_steps", "count", "none", "Labelled steps."),
        Metric("dropped", "count", "lower", "Items that could not be scored."),
    ),
    "Evaluations": (
        Metric("n", "count", "none", "Items that were evaluated."),
        Metric("num_graded", "count", "none", "Items with a reference answer."),
        Metric("samples", "count", "none", "Answers to each item."),
        Metric("standard_error", "share", "none", "Standard error of the accuracy, clustered by item."),
        Metric("pass", "share", "higher", "`pass@K`: chance that one of K answers is correct."),
        Metric("majority", "share", "higher", "`majority@K`: chance that the most frequent of K answers is correct."),
        Metric("best_of", "share", "higher", "`best_of@K`: chance that the highest-scored of K answers is correct."),
        Metric("unscored", "share", "lower", "Share of the answers that the reward model could not score."),
        Metric("parse_failures", "share", "lower", "Share of the answers in which no final answer is found.",
               "no answer"),
        Metric("prompts_too_long", "count", "lower", "Prompts that do not fit into the model's context."),
        Metric("repeated_prompts", "count", "none", "Questions that the task repeats; they are asked once."),
        Metric("refusal", "share", "higher", "Share of the answers to harmful prompts that refuse."),
        Metric("over_refusal", "share", "lower", "Share of the answers to benign prompts that refuse."),
        Metric("called", "share", "none", "Share of the answers that call a tool.", "called a tool"),
        Metric("kl_initial", "nats", "lower", "KL from the initial model of a whole answer, the mean over sampled "
               "answers to held-out prompts.", "KL from initial model"),
        Metric("perplexity", "number", "lower", "e to the power of the held-out loss."),
        Metric("token_accuracy", "share", "higher", "Share of the tokens that the model finds likeliest."),
        Metric("loss_tokens", "count", "none", "Tokens that the held-out loss is the mean over."),
        Metric("loss_rows", "count", "none", "Demonstrations that the held-out loss is the mean over."),
        Metric("rows_dropped", "count", "lower", "Held-out rows that could not be used."),
        Metric("seconds", "seconds", "none", "Time of an evaluation."),
    ),
    "Two models, A and B, against one another": (
        Metric("win_rate", "share", "higher", "How often an answer of A beats one of B; a tie counts half."),
        Metric("win_rate_similar", "share", "higher", "The same of answers whose lengths differ by at most 10 %."),
        Metric("wins", "share", "higher", "Share of the pairs in which A is better."),
        Metric("ties", "share", "none", "Share of the pairs in which both are equally good."),
        Metric("losses", "share", "lower", "Share of the pairs in which B is better."),
        Metric("n_similar", "count", "none", "Items with answers of similar lengths."),
        Metric("characters_a", "number", "none", "Characters of an answer of A, the mean."),
        Metric("characters_b", "number", "none", "Characters of an answer of B, the mean."),
        Metric("accuracy_a", "share", "higher", "`accuracy` of A."),
        Metric("accuracy_b", "share", "higher", "`accuracy` of B."),
        Metric("kl_ab", "nats", "none", "KL of A from B of a whole answer of A; `kl_ab_per_token`.", "KL(A ‖ B)"),
        Metric("kl_ba", "nats", "none", "KL of B from A of a whole answer of B; `kl_ba_per_token`.", "KL(B ‖ A)"),
        Metric("judge_first", "share", "none", "How often the answer that is shown first wins."),
        Metric("judge_consistent", "share", "higher", "How often both orders have the same outcome."),
        Metric("judge_longer", "share", "none", "How often the longer answer wins."),
        Metric("judge_failed", "share", "lower", "Share of the pairs that were not judged."),
        Metric("judge_tokens_in", "count", "none", "Tokens that the judge read."),
        Metric("judge_tokens_out", "count", "none", "Tokens that the judge wrote."),
    ),
    "Runs of a sweep, over the seeds": (
        Metric("gain", "number", "higher", "By how much the primary metric got better over the run."),
        Metric("train_seconds", "seconds", "lower", "Time of the updates with their sampling, without evaluation."),
        Metric("sampled_tokens", "count", "none", "Tokens that a run sampled; `trained_tokens` is summed up, too."),
    ),
    "Sparse autoencoders": (
        Metric("fvu", "share", "lower", "Share of the activations' variance that the reconstruction leaves.", "FVU"),
        Metric("l0", "number", "none", "Features that are active on a row, the mean.", "L0"),
        Metric("silent", "share", "lower", "Share of the features that are active on no held-out row."),
        Metric("dense", "share", "lower", "Share of the features that are active on more than a tenth of the rows."),
        Metric("dead", "share", "lower", "Share of the features that have not been active for long."),
        Metric("squared_error", "number", "lower", "Squared error of the reconstruction."),
        Metric("penalty", "number", "none", "Sparsity penalty."),
        Metric("auxk", "number", "none", "Auxiliary loss of dead features.", "AuxK"),
    ),
    "Time and memory (`timing` in metrics.jsonl)": (
        Metric("step_seconds", "seconds", "lower", "Time of an update with its sampling."),
        Metric("generate_seconds", "seconds", "lower", "Time of sampling."),
        Metric("score_seconds", "seconds", "lower", "Time of grading and rewards."),
        Metric("fill_seconds", "seconds", "lower", "Time of log-probabilities of reference, teacher and critic."),
        Metric("update_seconds", "seconds", "lower", "Time of forward and backward pass and the optimizer."),
        Metric("sync_seconds", "seconds", "lower", "Time of giving the weights to the engine."),
        Metric("waited_seconds", "seconds", "lower", "Time of waiting for answers that are sampled in the background."),
        Metric("evaluation_seconds", "seconds", "lower", "Time of a held-out evaluation."),
        Metric("reward_model_seconds", "seconds", "lower", "Time of a reward model's scores in an evaluation."),
        Metric("tokens_per_second", "tokens per second", "higher", "Trained tokens by the time of the step."),
        Metric("update_tokens_per_second", "tokens per second", "higher", "Trained tokens by the time of the update."),
        Metric("generate_tokens_per_second", "tokens per second", "higher", "Sampled tokens by the time of sampling."),
        Metric("generated_tokens", "count", "none", "Sampled tokens."),
        Metric("rows_per_second", "number", "higher", "Rows of activations by time."),
        Metric("peak_memory_bytes", "bytes", "lower", "Most memory held: of the GPU that trains, else of the process."),
    ),
}
# fmt: on
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}
# Families of names: what surrounds the name of a metric, and its meaning.
FAMILIES = {
    "eval/TASK/SPLIT/NAME": "the metric NAME of a held-out evaluation in a run",
    "reward/NAME": "one reward of an answer unweighted, or a number that a grader adds",
    "KEY=VALUE:NAME": "the metric NAME of the items of a held-out evaluation whose `meta` has this value (`level=5`)",
    "PART:NAME": "the metric NAME of one part of a mixture",
    "sampled_NAME": "the metric NAME of answers at the temperature of training (`eval.num_kl_prompts`)",
    "NAME_low, NAME_high": "the 95 % interval of NAME",
    "start_NAME, mean_NAME": "of a sweep: NAME of the first evaluation, and its mean over the run's evaluations",
    "NAME_last": "of a sweep: NAME of the last update",
    "NAME_per_token": "NAME by the tokens of the answers",
    "NAME_n": "items that NAME is the mean over",
    "completion_length_p50, _p90, _max": "median, 90th percentile and maximum of the lengths",
}

# Results about the measurement itself, which rank nothing.
_COUNTS = {
    "n",
    "num_graded",
    "samples",
    "seconds",
    "prompts_too_long",
    "rows_dropped",
    "repeated_prompts",
    "standard_error",
}
# Primary metrics in the order in which they are looked for. Agreement is with the labels that the data have.
_PREFERRED = ("accuracy", "pair_accuracy", "answer_accuracy", "step_accuracy", "loss")
_AROUND = re.compile(
    r"(?:eval/.+?/(?=(?:sampled_)?reward/[^/]*$|[^/]+$))?((?:sampled|start|mean)_)?((?:.*:)?)(.*?)"
    r"((?:_low|_high|_n|_p50|_p90|_max|_last|_per_token|@\d+)*)",
    re.DOTALL,
)


def find_metric(name: str) -> Metric | None:
    """Return the metric of a name; of one of a family (``FAMILIES``) with what surrounds it in the label."""
    around = _AROUND.fullmatch(name)
    assert around is not None, "every part of the pattern may be empty"
    sampled, part, own, end = (text or "" for text in around.groups())
    base = METRICS.get(name) or METRICS.get(own)
    if f"{part}{own}".startswith("reward/"):
        return Metric(name, "number", "higher", FAMILIES["reward/NAME"], f"{sampled}{part}{own}{end}")
    if base is None or base.name == name:
        return base
    label = f"{part} {sampled}{base.label}{end}"
    return replace(base, name=name, label=label.strip().replace("_", " "))


def metric_of(name: str) -> Metric:
    """Return the metric of a name; of an unknown one a number that is better when it is higher."""
    known = find_metric(name)
    if known is not None:
        return known
    unit: Unit = "number"
    if name.endswith("accuracy"):
        unit = "share"
    return Metric(name, unit, "higher", "")


def choose_primary_metric(
    evaluations: Mapping[str, Mapping[str, float]], *, named: str | None, samples: bool
) -> Metric | None:
    """Return the primary metric of a run, by which it is shown and ranked and the best weights are kept.

    The first task decides: accuracy where there are reference answers; else agreement with labelled pairs, answers or
    steps; else the reward with the KL from the initial model for a run that samples; else the held-out loss; None where
    there is none of these.

    Args:
        evaluations: results by task.
        named: the metric that the recipe asks for instead (``eval.best``).
        samples: the run trains on its own samples, by their reward.

    Raises:
        UsageError: no evaluation has a result of that name; the message lists those that there are.
    """
    if named is not None:
        every = {name for results in evaluations.values() for name in results}
        measured = sorted(name for name in every - _COUNTS if not name.endswith(("_low", "_high")))
        if named in measured:
            return metric_of(named)
        hint = f"{suggest(named, measured)} There are: {', '.join(measured)}"
        raise UsageError(f"eval.best: no evaluation measures {named!r}.{hint}")
    first = next(iter(evaluations.values()))
    chosen = next((METRICS[name] for name in _PREFERRED if name in first), None)
    if samples and REWARD.name in first and (chosen is None or not chosen.is_share):
        return REWARD
    return chosen
