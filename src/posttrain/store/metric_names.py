"""Registry of metrics: name, label, unit, direction and meaning of each recorded number.

A quantity keeps one name in ``metrics.jsonl``, on the terminal, in evaluation results, reports, figures and trackers.
``docs/reference/metrics.md`` and ``posttrain explain NAME`` are generated from this table.
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
    """A quantity and how to show it.

    Attributes:
        better: whether higher or lower values are better.
        of: the unit of observation, such as problems or pairs.
        further: metrics shown next to it if it is the primary metric.
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
        """Return the finite value, or None if missing or not finite."""
        value = results.get(self.name)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        return None

    def mean(self, evaluations: Iterable[Mapping[str, float]]) -> float | None:
        """Return the mean over evaluations, ignoring missing values."""
        values = []
        for results in evaluations:
            value = self.value(results)
            if value is not None:
                values.append(value)
        if values:
            return math.fsum(values) / len(values)
        return None

    def interval(self, results: Mapping[str, float]) -> tuple[float, float] | None:
        """Return the 95 % interval, or None."""
        low = results.get(f"{self.name}_low", math.nan)
        high = results.get(f"{self.name}_high", math.nan)
        if self.value(results) is not None and math.isfinite(low) and math.isfinite(high):
            return (low, high)
        return None

    def goodness(self, value: float) -> float:
        """Return the value, negated if lower is better."""
        if self.better == "lower":
            return -value
        return value

    def numbers(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return value, interval and further metrics, finite ones only."""
        names = (self.name, f"{self.name}_low", f"{self.name}_high", *self.further)
        return {name: results[name] for name in names if math.isfinite(results.get(name, math.nan))}

    def brief(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return the value, plus KL if applicable, for one line in a list of runs."""
        names = [self.name]
        if KL in self.further:
            names.append(KL)
        return {name: results[name] for name in names if name in results}

    def show(self, value: float) -> str:
        """Format a value: ``50.0%``, ``0.731``, ``1.2e-05``. Huge numbers get three digits."""
        if abs(value) >= 1e12:
            return f"{value:.3g}"
        form = _FORMS.get(self.unit, ".3f")
        if self.unit == "nats" and 0 < abs(value) < 1e-3:
            form = ".1e"
        return f"{value:{form}}"

    def describe(self, results: Mapping[str, float]) -> str:
        """Describe results: ``accuracy 50.0% [43.9%, 56.1%]``, ``reward 0.731 · KL from initial model 2.310``.

        Returns an empty string if the metric is missing.
        """
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


ACCURACY = Metric("accuracy", "share", "higher", "Fraction of answers that are correct, among problems with a "
                  "reference answer.", of="problems")  # fmt: skip
REWARD = Metric("reward", "number", "higher", "Mean weighted reward per answer.", further=(KL,))
# fmt: off
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Answers, sampled in training or evaluation": (
        REWARD,
        ACCURACY,
        Metric("format", "share", "higher", "Fraction of answers that follow the template's format."),
        Metric("shows_reasoning", "share", "higher", "Fraction of answers that show their steps."),
        Metric("completion_length", "tokens", "none", "Mean number of generated tokens per answer."),
        Metric("completion_length_correct", "tokens", "none", "`completion_length` of correct answers."),
        Metric("completion_length_wrong", "tokens", "none", "`completion_length` of wrong answers."),
        Metric("truncated", "share", "lower", "Fraction of answers cut off by a token limit."),
        Metric("out_of_turns", "share", "lower", "Fraction of answers that reached the turn limit."),
        Metric("tool_failed", "share", "lower", "Fraction of answers that ended because a tool timed out."),
        Metric("environment_failures", "share", "lower", "Fraction of answers that ended because the environment "
               "failed."),
        Metric("played_again", "share", "lower", "Fraction of answers sampled again after an environment failure."),
        Metric("grading_failures", "share", "lower", "Fraction of grading calls that crashed or timed out."),
        Metric("no_reward", "share", "none", "Fraction of answers for which every reward function returned None."),
        Metric("num_turns", "number", "none", "Mean number of turns per answer.", "turns"),
        Metric("num_calls", "number", "none", "Mean number of tool calls per answer.", "calls"),
        Metric("failed_calls", "share", "lower", "Fraction of tool calls that failed."),
    ),
    "Rollout batches": (
        Metric("uniform_groups", "share", "lower", "Fraction of groups whose rewards are all equal. They give no "
               "gradient."),
        Metric("accepted_groups", "share", "none", "Fraction of sampled groups kept by dynamic sampling."),
        Metric("selected", "share", "none", "Fraction of answers selected for training."),
        Metric("masked", "share", "none", "Fraction of selected answers masked out of the loss because they were "
               "truncated."),
        Metric("staleness", "number", "none", "How many rollout batches the sampler's weights are behind the trained "
               "weights."),
        Metric("advantage_mean", "number", "none", "Mean advantage."),
        Metric("advantage_std", "number", "none", "Standard deviation of advantages."),
        Metric("advantage_min", "number", "none", "Smallest advantage."),
        Metric("advantage_max", "number", "none", "Largest advantage."),
        Metric("return_mean", "number", "none", "Mean return that the critic is trained on."),
        Metric("kept_tokens", "tokens", "none", "Mean number of tokens that top-k, top-p or min-p keep for a draw. "
               "Log-probabilities, entropies and KLs of training are of the distribution over these."),
        Metric("kept_sets_cut", "share", "lower", "Fraction of draws whose set the limit of 512 tokens made smaller."),
        Metric("kl_in_reward", "nats", "none", "KL to the reference per answer, as subtracted from the reward; of the "
               "truncated distributions if sampling is truncated.",
               "KL in the reward"),
        Metric("kl_weight", "number", "none", "Weight of `kl_in_reward`.", "KL weight"),
        Metric("prompts", "count", "none", "Prompts from this mixture part (`PART:prompts`) in a batch."),
        Metric("trained", "count", "none", "Prompts from this mixture part (`PART:trained`) used for training."),
    ),
    "Updates": (
        Metric("loss", "nats", "lower", "Objective after aggregation. For held-out demonstrations, mean −log π per "
               "trained token.", of="examples", further=("perplexity", "token_accuracy")),
        Metric("nll", "nats", "lower", "Mean −log π per trained token. Equal to `loss` under `token_mean`.", "NLL"),
        Metric("entropy", "nats", "none", "Mean entropy of next-token distributions, over generated tokens; of the "
               "truncated distributions if sampling is truncated (`kept_tokens`)."),
        Metric("ratio", "number", "none", "Importance ratio: probability under the current policy divided by its "
               "probability before the update."),
        Metric("ratio_distance", "number", "none", "Mean |ratio − 1|. Only rounding error in the first update after "
               "sampling."),
        Metric("clip_fraction", "share", "none", "Fraction of tokens whose ratio is clipped."),
        Metric("cov_fraction", "share", "none", "Fraction of tokens chosen by their covariance."),
        Metric("masked_tokens", "share", "none", "Fraction of tokens that `masks` leave out of the policy's term, "
               "over all rows."),
        Metric("kl_ref", "nats", "none", "KL to the reference model per token (k3 estimator); of the truncated "
               "distributions if sampling is truncated.", "KL to reference"),
        Metric("kl_sampler", "nats", "lower", "KL between sampler and trainer per token (k3 estimator). Only rounding "
               "error, unless samples are reused.", "KL to sampler"),
        Metric("kl_teacher", "nats", "lower", "KL to the teacher per token, estimated on sampled tokens; of the "
               "truncated distributions if sampling is truncated.",
               "KL to teacher"),
        Metric("effective_sample_size", "share", "higher", "Effective sample size of the importance weights between "
               "sampler and trainer, divided by the number of tokens."),
        Metric("correction", "number", "none", "Mean importance weight that corrects for the sampler's mismatch."),
        Metric("clamped_log_ratios", "share", "lower", "Fraction of tokens whose log-ratio was clamped to ±20."),
        Metric("value_loss", "number", "lower", "Critic loss."),
        Metric("value_clip_fraction", "share", "none", "Fraction of tokens whose value is clipped."),
        Metric("value_explained_variance", "share", "higher", "Fraction of return variance explained by the critic."),
        Metric("divergence", "nats", "lower", "Divergence from the teacher per token."),
        Metric("student_mass", "share", "none", "Total probability of the candidate tokens under the student."),
        Metric("teacher_mass", "share", "none", "Total probability of the candidate tokens under the teacher."),
        Metric("feedback_share", "share", "none", "Fraction of tokens whose answer has feedback."),
        Metric("weights_moved", "share", "none", "1 if the step changed a sample of weights (checked in the first "
               "steps)."),
        Metric("grad_norm", "number", "none", "Gradient norm before clipping."),
        Metric("lr", "number", "none", "Learning rate."),
        Metric("trained_tokens", "count", "none", "Tokens in the loss."),
        Metric("computed_rows", "count", "none", "Rows that went through forward and backward. `train.skip_zero_rows` "
               "skips rows without a gradient; other update metrics then cover computed rows only. First, last and "
               "saved steps compute all rows."),
        Metric("router_aux_loss", "number", "lower", "Auxiliary loss of the routers (mixture of experts), without its "
               "coefficient: E times the product of an expert's share and its mean probability, summed over experts."),
        Metric("router_max_load", "number", "lower", "Load of the busiest expert, divided by the mean load."),
        Metric("routing_mismatch", "share", "none", "Under `rollout.router_replay`: fraction of routers, per trained "
               "token, that would have chosen other experts than the sampler did."),
        Metric("padding_share", "share", "lower", "Fraction of computed positions that are padding."),
    ),
    "Preferences and reward models": (
        Metric("pair_accuracy", "share", "higher", "Fraction of pairs where the chosen answer gets a higher score or "
               "implicit reward. Ties count half.", of="pairs", further=("loss",)),
        Metric("answer_accuracy", "share", "higher", "Fraction of answers whose score or implicit reward agrees with "
               "the label. Ties count half.", of="answers", further=("loss",)),
        Metric("step_accuracy", "share", "higher", "Fraction of steps classified as labelled.",
               of="solutions", further=("loss",)),
        Metric("outcome_accuracy", "share", "higher", "Fraction of trained tokens whose score agrees with the label."),
        Metric("solution_accuracy", "share", "higher", "Fraction of solutions whose first wrong step is found, or "
               "that are correctly judged error-free."),
        Metric("margin", "number", "higher", "Score or implicit reward: chosen minus rejected."),
        Metric("chosen_score", "number", "none", "Score of chosen answers."),
        Metric("rejected_score", "number", "none", "Score of rejected answers."),
        Metric("chosen_reward", "number", "none", "Implicit reward of chosen answers."),
        Metric("rejected_reward", "number", "none", "Implicit reward of rejected answers."),
        Metric("chosen_logprob", "nats", "none", "Log-probability of chosen answers."),
        Metric("rejected_logprob", "nats", "none", "Log-probability of rejected answers."),
        Metric("chosen_nll", "nats", "lower", "Mean −log π per token of chosen answers.", "chosen NLL"),
        Metric("implicit_reward", "number", "none", "Mean β · log-ratio to the reference."),
        Metric("desirable", "share", "none", "Fraction of answers labelled desirable."),
        Metric("desirable_reward", "number", "higher", "Implicit reward of desirable answers."),
        Metric("undesirable_reward", "number", "lower", "Implicit reward of undesirable answers."),
        Metric("kl_baseline", "nats", "none", "KL estimate that KTO uses as its reference point.", "KL baseline"),
        Metric("logprob", "nats", "none", "Mean log-probability per answer."),
        Metric("positive_share", "share", "none", "Fraction of steps with the best label."),
        Metric("correct_share", "share", "none", "Fraction of given answers that are correct."),
        Metric("auc", "share", "higher", "Area under the ROC curve: scores of correct against wrong answers.", "AUC"),
        Metric("step_auc", "share", "higher", "Area under the ROC curve: scores of good against bad steps.",
               "step AUC"),
        Metric("top_one", "share", "higher", "Fraction of problems whose highest-scored answer is correct."),
        Metric("random_one", "share", "none", "Expected `top_one` when picking at random."),
        Metric("oracle", "share", "none", "Fraction of problems where at least one given answer is correct."),
        Metric("error_f1", "share", "higher", "Harmonic mean of `accuracy_erroneous` and `accuracy_correct`.", "F1"),
        Metric("accuracy_erroneous", "share", "higher", "`solution_accuracy` on solutions with an error."),
        Metric("accuracy_correct", "share", "higher", "`solution_accuracy` on error-free solutions."),
        Metric("num_problems", "count", "none", "Problems with multiple answers."),
        Metric("labelled_steps", "count", "none", "Labelled steps."),
        Metric("dropped", "count", "lower", "Items that could not be scored."),
    ),
    "Evaluations": (
        Metric("n", "count", "none", "Evaluated items."),
        Metric("num_graded", "count", "none", "Items with a reference answer."),
        Metric("samples", "count", "none", "Answers per item."),
        Metric("standard_error", "share", "none", "Standard error of accuracy, clustered by item."),
        Metric("pass", "share", "higher", "`pass@K`: probability that at least one of K answers is correct."),
        Metric("majority", "share", "higher", "`majority@K`: probability that the most frequent of K answers is "
               "correct."),
        Metric("best_of", "share", "higher", "`best_of@K`: probability that the highest-scored of K answers is "
               "correct."),
        Metric("unscored", "share", "lower", "Fraction of answers the reward model could not score."),
        Metric("parse_failures", "share", "lower", "Fraction of answers without a final answer.", "no answer"),
        Metric("prompts_too_long", "count", "lower", "Prompts longer than the model's context."),
        Metric("repeated_prompts", "count", "none", "Duplicate questions in the task. Each is asked once."),
        Metric("refusal", "share", "higher", "Fraction of harmful prompts that the model refuses."),
        Metric("over_refusal", "share", "lower", "Fraction of benign prompts that the model refuses."),
        Metric("called", "share", "none", "Fraction of answers that call a tool.", "called a tool"),
        Metric("kl_initial", "nats", "lower", "KL from the initial model, summed over an answer. Mean over sampled "
               "answers to held-out prompts.", "KL from initial model"),
        Metric("perplexity", "number", "lower", "exp of the held-out loss."),
        Metric("token_accuracy", "share", "higher", "Fraction of tokens that are the model's top prediction."),
        Metric("loss_tokens", "count", "none", "Tokens in the held-out loss."),
        Metric("loss_rows", "count", "none", "Demonstrations in the held-out loss."),
        Metric("rows_dropped", "count", "lower", "Held-out rows that could not be used."),
        Metric("seconds", "seconds", "none", "Duration of the evaluation."),
    ),
    "Comparison of two models, A and B": (
        Metric("win_rate", "share", "higher", "Probability that A's answer beats B's. Ties count half."),
        Metric("win_rate_similar", "share", "higher", "`win_rate` on answers whose lengths differ by at most 10 %."),
        Metric("wins", "share", "higher", "Fraction of pairs won by A."),
        Metric("ties", "share", "none", "Fraction of pairs that are tied."),
        Metric("losses", "share", "lower", "Fraction of pairs won by B."),
        Metric("n_similar", "count", "none", "Items whose answers have similar lengths."),
        Metric("characters_a", "number", "none", "Mean characters per answer, model A."),
        Metric("characters_b", "number", "none", "Mean characters per answer, model B."),
        Metric("accuracy_a", "share", "higher", "Accuracy of model A."),
        Metric("accuracy_b", "share", "higher", "Accuracy of model B."),
        Metric("kl_ab", "nats", "none", "KL(A ‖ B) per answer sampled from A. Per token: `kl_ab_per_token`.",
               "KL(A ‖ B)"),
        Metric("kl_ba", "nats", "none", "KL(B ‖ A) per answer sampled from B. Per token: `kl_ba_per_token`.",
               "KL(B ‖ A)"),
        Metric("judge_first", "share", "none", "How often the judge prefers the answer shown first."),
        Metric("judge_consistent", "share", "higher", "How often the judge's verdict survives swapping the order."),
        Metric("judge_longer", "share", "none", "How often the judge prefers the longer answer."),
        Metric("rubric_unanswered", "count", "lower", "Criteria of an answer that the judge did not judge."),
        Metric("judge_failed", "share", "lower", "Fraction of pairs without a verdict."),
        Metric("judge_tokens_in", "count", "none", "Tokens read by the judge."),
        Metric("judge_tokens_out", "count", "none", "Tokens written by the judge."),
    ),
    "Sweeps": (
        Metric("gain", "number", "higher", "Improvement of the primary metric during a run."),
        Metric("train_seconds", "seconds", "lower", "Training time, sampling included, evaluation excluded."),
        Metric("sampled_tokens", "count", "none", "Tokens sampled during a run. `trained_tokens` is summed as well."),
    ),
    "Sparse autoencoders": (
        Metric("fvu", "share", "lower", "Fraction of variance unexplained by the reconstruction.", "FVU"),
        Metric("l0", "number", "none", "Mean number of active features per row.", "L0"),
        Metric("silent", "share", "lower", "Fraction of features that never fire on held-out rows."),
        Metric("dense", "share", "lower", "Fraction of features that fire on more than 10 % of rows."),
        Metric("dead", "share", "lower", "Fraction of features that have not fired recently."),
        Metric("squared_error", "number", "lower", "Squared reconstruction error."),
        Metric("penalty", "number", "none", "Sparsity penalty."),
        Metric("auxk", "number", "none", "Auxiliary loss for dead features.", "AuxK"),
    ),
    "Time and memory (`timing` in metrics.jsonl)": (
        Metric("step_seconds", "seconds", "lower", "Total step time, sampling included."),
        Metric("generate_seconds", "seconds", "lower", "Sampling time."),
        Metric("score_seconds", "seconds", "lower", "Time for grading and rewards."),
        Metric("fill_seconds", "seconds", "lower", "Time for reference, teacher and critic log-probabilities."),
        Metric("update_seconds", "seconds", "lower", "Time for forward, backward and optimizer."),
        Metric("sync_seconds", "seconds", "lower", "Time to send weights to the engine."),
        Metric("waited_seconds", "seconds", "lower", "Time spent waiting for background sampling."),
        Metric("evaluation_seconds", "seconds", "lower", "Time for held-out evaluation."),
        Metric("reward_model_seconds", "seconds", "lower", "Time for scoring with a reward model during evaluation."),
        Metric("tokens_per_second", "tokens per second", "higher", "Trained tokens per second of step time."),
        Metric("update_tokens_per_second", "tokens per second", "higher", "Trained tokens per second of update time."),
        Metric("generate_tokens_per_second", "tokens per second", "higher", "Sampled tokens per second of sampling "
               "time."),
        Metric("generated_tokens", "count", "none", "Sampled tokens."),
        Metric("rows_per_second", "number", "higher", "Activation rows per second."),
        Metric("peak_memory_bytes", "bytes", "lower", "Peak memory: GPU memory if training on a GPU, otherwise "
               "process memory."),
    ),
}
# fmt: on
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}
# Patterns that extend a metric name, and their meaning.
FAMILIES = {
    "eval/TASK/SPLIT/NAME": "NAME on a held-out split during training",
    "reward/NAME": "a single unweighted reward, or a number added by a grader",
    "KEY=VALUE:NAME": "NAME restricted to items whose `meta` has this value (`level=5`)",
    "PART:NAME": "NAME for one mixture part",
    "sampled_NAME": "NAME for answers sampled at training temperature (`eval.num_kl_prompts`)",
    "NAME_low, NAME_high": "95 % interval",
    "start_NAME, mean_NAME": "in sweeps: NAME at the first evaluation, and averaged over all evaluations",
    "NAME_last": "in sweeps: NAME at the last update",
    "NAME_per_token": "NAME divided by answer length in tokens",
    "NAME_n": "number of items averaged",
    "completion_length_p50, _p90, _max": "median, 90th percentile and maximum length",
}

# Facts about the measurement. Runs are never ranked by them.
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
# Candidates for the primary metric, in order of preference.
_PREFERRED = ("accuracy", "pair_accuracy", "answer_accuracy", "step_accuracy", "loss")
_AROUND = re.compile(
    r"(?:eval/.+?/(?=(?:sampled_)?reward/[^/]*$|[^/]+$))?((?:sampled|start|mean)_)?((?:.*:)?)(.*?)"
    r"((?:_low|_high|_n|_p50|_p90|_max|_last|_per_token|@\d+)*)",
    re.DOTALL,
)


def find_metric(name: str) -> Metric | None:
    """Look up a metric by name. Names that match ``FAMILIES`` get an extended label."""
    around = _AROUND.fullmatch(name)
    assert around is not None, "all groups are optional"
    sampled, part, own, end = (text or "" for text in around.groups())
    base = METRICS.get(name) or METRICS.get(own)
    if f"{part}{own}".startswith("reward/"):
        return Metric(name, "number", "higher", FAMILIES["reward/NAME"], f"{sampled}{part}{own}{end}")
    if base is None or base.name == name:
        return base
    label = f"{part} {sampled}{base.label}{end}"
    return replace(base, name=name, label=label.strip().replace("_", " "))


def metric_of(name: str) -> Metric:
    """Look up a metric by name. An unknown name is treated as a number where higher is better."""
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
    """Choose the primary metric, used to rank runs and to keep the best checkpoint.

    The first task decides. Candidates, in order: accuracy if answers have references; agreement with labelled pairs,
    answers or steps; reward (with KL from the initial model) if the run trains on samples; held-out loss.

    Args:
        evaluations: results by task name.
        named: metric requested by ``eval.best``, if any.
        samples: whether the run trains on sampled answers.

    Returns:
        The metric, or None without a candidate.

    Raises:
        UsageError: no evaluation measures ``named``. The message lists available metrics.
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
