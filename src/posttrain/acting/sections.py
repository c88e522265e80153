"""Conditions for recipe section keys."""

from __future__ import annotations

from posttrain.acting.facts import ActsIf, Rounding, RunFacts, SwitchedOff


def _no_kl(facts: RunFacts, key: str) -> str:
    if facts.get("regularize.kl_coef"):
        return ""
    return "regularize.kl_coef is 0"


def _never_drifts(facts: RunFacts, key: str) -> str:
    """Explain why KL terms vanish: KL from the policy to itself is 0, and so are k2 and k3 gradients."""
    moves = facts.steps != 1 or facts.next_to(key, "kl_estimator") == "k1" or facts.drops_inputs
    if moves or not facts.get(key):
        return ""
    return Rounding("the run makes one update (train.steps 1), and before it policy and reference are equal")


def _reward_never_drifts(facts: RunFacts, key: str) -> str:
    if not facts.has_one_batch or not facts.get("kl_in_reward.weight"):
        return ""
    return Rounding("the run samples a single batch of answers, with reference weights, so the KL is 0")


def _no_penalty(facts: RunFacts, key: str) -> str:
    if facts.get("kl_in_reward.weight"):
        return _reward_never_drifts(facts, key)
    return "kl_in_reward.weight is 0"


def _no_target(facts: RunFacts, key: str) -> str:
    if facts.get("kl_in_reward.target") is not None:
        return ""
    return "without kl_in_reward.target, the weight is constant"


def _keeps_groups(facts: RunFacts, key: str) -> str:
    if facts.get("rollout.drop_uniform_groups"):
        return ""
    return "rollout.drop_uniform_groups is false"


def _trains_truncated(facts: RunFacts, key: str) -> str:
    if facts.get("rollout.mask_truncated"):
        return ""
    return "rollout.mask_truncated is false"


def _never_moves(facts: RunFacts, key: str) -> str:
    every = facts.get("reference.every")
    if facts.steps is None or facts.steps > every:
        return ""
    return f"the run makes {facts.steps} updates (train.steps), and the reference moves after {every} (reference.every)"


def _no_labels(facts: RunFacts, key: str) -> str:
    sees_samples = facts.get("teacher.name") == "self" and facts.get("teacher.sees") == "right_sample"
    if "labels" in facts.needs or sees_samples:
        return ""
    return "the objective uses no labels"


def _old_logprobs(facts: RunFacts, key: str) -> str:
    if "old_logprobs" not in facts.needs:
        return "the objective uses no sampler probabilities"
    if facts.rounds or facts.get("rollout.staleness"):
        return ""
    return Rounding("the native engine samples in fp32 with the trainer's own weights, so both agree")


_OF_SAMPLER = frozenset({"advantages", "sampler_logprobs", "returns", "rewards", "has_feedback", "old_values"})


def _routes_alike(facts: RunFacts, key: str) -> str:
    if not facts.get(key):
        return SwitchedOff("the model routes by itself")
    if _OF_SAMPLER.isdisjoint(facts.needs):
        return "the objective does not follow the sampler"
    if facts.rounds or not facts.is_on_policy:
        return ""
    return Rounding("each answer is trained once, in fp32 with the weights that sampled it, so both route alike")


def _one_batch(facts: RunFacts, key: str) -> str:
    if not facts.has_one_batch:
        return ""
    return f"the run uses a single batch of answers (train.steps {facts.steps}, {facts.updates} updates per batch)"


def _turn_fits(facts: RunFacts, key: str) -> str:
    limit = facts.get("rollout.max_tokens")
    if facts.get(key) is None or facts.get(key) < limit:
        return ""
    return f"rollout.max_tokens ({limit}) ends answers earlier"


def _no_candidates(facts: RunFacts, key: str) -> str:
    if "teacher_ids" in facts.needs:
        return ""
    return "the objective uses teacher probabilities only for sampled tokens"


def _another_teaches(facts: RunFacts, key: str) -> str:
    if facts.get("teacher.name") == "self":
        return ""
    return "the teacher is a separate model (teacher.name)"


def _teacher_is_not_averaged(facts: RunFacts, key: str) -> str:
    weights = facts.get("teacher.weights")
    if weights == "ema":
        return _another_teaches(facts, key)
    return f"teacher.weights is {weights}"


def _still_warms_up(facts: RunFacts, key: str) -> str:
    warmup = facts.get("train.warmup_steps")
    if facts.steps is None or not warmup or warmup < facts.steps:
        return ""
    return f"warmup (train.warmup_steps {warmup}) covers the whole run (train.steps {facts.steps})"


def _stays(facts: RunFacts, key: str) -> str:
    if facts.get("train.min_lr_ratio") == 1 and facts.get("train.schedule") != "constant":
        return "train.min_lr_ratio is 1, so the learning rate does not decay"
    return _still_warms_up(facts, key)


def _constant(facts: RunFacts, key: str) -> str:
    if facts.get("train.schedule") == "constant":
        return "train.schedule is constant"
    return _still_warms_up(facts, key)


def _beyond(facts: RunFacts, key: str) -> str:
    every = facts.get(key)
    if facts.steps is None or not every or every <= facts.steps:
        return ""
    return f"it is more than the run's {facts.steps} steps (train.steps), and the last one is always counted"


def _few_checkpoints(facts: RunFacts, key: str) -> str:
    if facts.steps is None:
        return ""
    most = 1
    for section in ("train.save_every", "eval.every"):
        every = facts.get(section)
        if every:
            most += facts.steps // every
    if facts.get(key) < most:
        return ""
    return f"the run saves at most {most} checkpoint{'s' * (most > 1)}"


def _on_cpu(facts: RunFacts, key: str) -> str:
    if facts.get("model.device") != "cpu":
        return ""
    return "CPU reductions (model.device) are always deterministic"


def _never_evaluates(facts: RunFacts, key: str) -> str:
    if facts.get("eval.every"):
        return ""
    return "nothing is evaluated (eval.every 0)"


def _scores_only(facts: RunFacts, key: str) -> str:
    if facts.scores_only:
        return "reward models generate no answers"
    return _never_evaluates(facts, key)


IF_KL_COUNTS = ActsIf("if regularize.kl_coef is above 0", _no_kl, "Set regularize.kl_coef")
IF_POLICY_DRIFTS = ActsIf(
    "from the second update on, when policy and reference differ", _never_drifts, "Set train.steps"
)
IF_SAMPLER_DRIFTS = ActsIf(
    "from the second batch of answers on, when policy and reference differ", _reward_never_drifts, "Set train.steps"
)
IF_PENALTY_COUNTS = ActsIf("if kl_in_reward.weight is above 0", _no_penalty, "Set kl_in_reward.weight")
IF_WEIGHT_ADAPTS = ActsIf("if kl_in_reward.target is given", _no_target, "Set kl_in_reward.target")
IF_GROUPS_ARE_DROPPED = ActsIf(
    "if rollout.drop_uniform_groups is true", _keeps_groups, "Set rollout.drop_uniform_groups: true"
)
IF_TRUNCATED_ARE_MASKED = ActsIf(
    "if rollout.mask_truncated is true", _trains_truncated, "Set rollout.mask_truncated: true"
)
IF_REFERENCE_MOVES = ActsIf("below train.steps", _never_moves, "Set reference.every below train.steps", by_default=True)
IF_LABELS_ARE_READ = ActsIf("if the objective uses labels, such as kto", _no_labels)
IF_OLD_LOGPROBS_ARE_READ = ActsIf(
    "if the objective uses ratios, and sampler and trainer differ: different engine, or bf16", _old_logprobs
)
IF_ROUTING_DIFFERS = ActsIf(
    "if the objective follows the sampler, and routing may differ: several updates per batch, staleness, or bf16",
    _routes_alike,
)
IF_SEVERAL_BATCHES = ActsIf("from the second batch of answers on", _one_batch, "Set train.steps")
IF_TURN_IS_SHORTER = ActsIf("below rollout.max_tokens", _turn_fits)
IF_CANDIDATES_ARE_READ = ActsIf("if the objective compares whole distributions", _no_candidates)
IF_TEACHES_ITSELF = ActsIf("if teacher.name is self", _another_teaches, "Set teacher.name: self")
IF_TEACHER_IS_AVERAGED = ActsIf("if teacher.weights is ema", _teacher_is_not_averaged, "Set teacher.weights: ema")
IF_RATE_FALLS = ActsIf(
    "after warmup, if train.min_lr_ratio is below 1", _stays, "Set train.warmup_steps below train.steps"
)
IF_SCHEDULED = ActsIf("after warmup, if train.schedule is linear or cosine", _constant, "Set train.schedule: linear")
IF_WITHIN_RUN = ActsIf("up to the run's number of steps", _beyond)
IF_CHECKPOINTS_ARE_DELETED = ActsIf("if the run saves more checkpoints", _few_checkpoints)
IF_ON_GPU = ActsIf("on a GPU", _on_cpu)
IF_EVALUATED = ActsIf("if eval.every is above 0", _never_evaluates, "Set eval.every")
IF_ANSWERS_ARE_EVALUATED = ActsIf("if eval.every is above 0 and the model generates answers", _scores_only)
