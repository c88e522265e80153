"""Conditions for component options: objectives, advantages, corrections, selections, rewards, ..."""

from __future__ import annotations

from posttrain.acting.facts import FP32_NOISE, ActsIf, Rounding, RunFacts, SwitchedOff


def why_ratio_is_one(facts: RunFacts, distance: float = 1.0) -> str:
    """Explain why a bound at this ``distance`` from 1 is never reached by the policy-sampler ratio."""
    if not facts.is_on_policy or facts.drops_inputs or distance < facts.noise:
        return ""
    one = "one update per batch of answers (train.num_minibatches 1, train.ppo_epochs 1), so the ratio is 1"
    if facts.rounds:
        return Rounding(f"{one} up to rounding")
    return one


def _bound(facts: RunFacts, key: str) -> str:
    value = facts.get(key)
    if value is None:  # a missing bound is like a distant one
        return why_ratio_is_one(facts)
    return why_ratio_is_one(facts, float(value))


def _cap(facts: RunFacts, key: str) -> str:
    value = facts.get(key)
    if value is None:
        return Rounding(why_ratio_is_one(facts))
    return why_ratio_is_one(facts, float(value) - 1.0)


def _lower_bound(facts: RunFacts, key: str) -> str:
    value = float(facts.get(key))
    if value >= 1:
        return SwitchedOff(f"{value:g} disables the bound, because ratios are above 0")
    return why_ratio_is_one(facts, value)


def _gate(facts: RunFacts, key: str) -> str:
    return Rounding(why_ratio_is_one(facts))


def _value_bound(facts: RunFacts, key: str) -> str:
    if facts.next_to(key, "value_weight") == 0:
        return "objective.value_weight is 0"
    if facts.get(key) is None:
        return Rounding(why_ratio_is_one(facts))
    is_first = facts.samples and facts.updates == 1 and not facts.get("rollout.staleness")
    if not is_first or facts.drops_inputs or facts.rounds or facts.get(key) < FP32_NOISE:
        return ""
    return (
        "one update per batch of answers (train.num_minibatches 1, train.ppo_epochs 1), so critic values match "
        "the batch exactly"
    )


_SEVERAL = "if a rollout batch is used for multiple updates, or prefetched (rollout.staleness)"
_MORE_UPDATES = "Set train.num_minibatches or train.ppo_epochs to 2 or more"

IF_RATIO_MOVES = ActsIf(_SEVERAL, _bound, _MORE_UPDATES, by_default=True, distance=float)
IF_RATIO_FALLS = ActsIf(
    f"{_SEVERAL}; values of 1 or more disable the bound", _lower_bound, _MORE_UPDATES, by_default=True, distance=float
)
IF_RATIO_REACHES_CAP = ActsIf(_SEVERAL, _cap, _MORE_UPDATES, by_default=True, distance=lambda cap: cap - 1.0)
IF_RATIO_VARIES = ActsIf(_SEVERAL, _gate, _MORE_UPDATES, by_default=True)
IF_SEQUENCES_DRIFT = ActsIf(_SEVERAL, _bound, _MORE_UPDATES, by_default=True)
IF_RATIO_LEAVES_ONE = ActsIf(_SEVERAL, lambda facts, key: why_ratio_is_one(facts), _MORE_UPDATES, by_default=True)
IF_VALUES_MOVE = ActsIf(_SEVERAL, _value_bound, _MORE_UPDATES, by_default=True)


def _samplers_ratio(facts: RunFacts, distance: float) -> str:
    """Explain why a bound at this ``distance`` from 1 is never reached by the trainer-sampler ratio."""
    if facts.rounds or facts.get("rollout.staleness") or distance < FP32_NOISE:
        return ""
    return "the native engine samples in fp32 with the trainer's own weights, so their ratio is 1"


def _samplers_cap(facts: RunFacts, key: str) -> str:
    if facts.next_to(key, "weigh") == "none":
        return "nothing is weighted (correction.weigh none)"
    return _samplers_ratio(facts, facts.get(key) - 1.0)


def _samplers_range(facts: RunFacts, key: str) -> str:
    return _samplers_ratio(facts, abs(facts.get(key) - 1.0))


def _samplers_weight(facts: RunFacts, key: str) -> str:
    return Rounding(_samplers_ratio(facts, 1.0))


_ELSEWHERE = "if sampler and trainer probabilities differ: different engine, bf16, or rollout.staleness"
_ANOTHER_SAMPLER = "Set rollout.staleness, or choose a different engine or precision"

IF_SAMPLER_REACHES_CAP = ActsIf(_ELSEWHERE, _samplers_cap, _ANOTHER_SAMPLER, by_default=True)
IF_SAMPLER_DIFFERS = ActsIf(_ELSEWHERE, _samplers_range, _ANOTHER_SAMPLER, by_default=True)
IF_SAMPLER_IS_WEIGHED = ActsIf(_ELSEWHERE, _samplers_weight, _ANOTHER_SAMPLER)


def _single_turn(facts: RunFacts, key: str) -> str:
    if facts.get("rollout.max_turns") not in (None, 1):
        return ""
    return "completions have one turn (rollout.max_turns)"


def _single_prompt(facts: RunFacts, key: str) -> str:
    if facts.get("rollout.num_prompts") != 1:
        return ""
    return Rounding("batches have one group (rollout.num_prompts 1), so both means are equal")


IF_SEVERAL_TURNS = ActsIf("if completions have multiple turns", _single_turn, "Set rollout.max_turns", by_default=True)
IF_SEVERAL_PROMPTS = ActsIf("if batches contain multiple prompts", _single_prompt, "Set rollout.num_prompts")


def _always_short(facts: RunFacts, key: str) -> str:
    limit = facts.get("rollout.max_tokens")
    margin = facts.next_to(key, "limit") - facts.next_to(key, "cache")
    if limit is None or facts.get("rollout.max_turns") not in (None, 1) or margin < limit:
        return ""
    longest = f"answers have at most rollout.max_tokens {limit} tokens"
    return f"{longest}, but the penalty starts above limit - cache = {margin} tokens"


def _demonstrations(facts: RunFacts, key: str) -> str:
    if not facts.samples:
        return ""
    return "training uses sampled answers, not demonstrations"


IF_ANSWERS_GROW_LONG = ActsIf("if limit - cache is below rollout.max_tokens", _always_short, "Set limit lower")
IF_DEMONSTRATIONS_ARE_READ = ActsIf("if the recipe has 'data'", _demonstrations)


def _cancels(facts: RunFacts, key: str) -> str:
    """Explain why a reward weight has no effect: it is the only reward, and advantages are normalized."""
    num_counted = 0
    for name, value in facts.settings.items():
        if name.startswith("rewards.") and name.endswith(".weight") and value:
            num_counted += 1
    if not facts.scale_free or num_counted > 1 or not facts.get(key) > 0 or facts.get("kl_in_reward.weight"):
        return ""
    return Rounding("there is only one reward, and the advantage divides by its spread or mean")


IF_REWARDS_DIFFER = ActsIf(
    "if there are multiple rewards, or the advantage depends on their scale", _cancels, "Add a reward"
)


def _adapts(facts: RunFacts, key: str) -> str:
    targets = facts.get("model.adapter.targets") == "all-linear" and not facts.get("model.adapter.target_parameters.0")
    if not targets or "head.trunk" in facts.settings:
        return ""
    return "only adapter matrices are trained, and Muon orthogonalizes all of them"


IF_ADAMW_TRAINS_SOME = ActsIf("if weights other than hidden matrices are trained", _adapts)


def _all_are_kept(facts: RunFacts, key: str) -> str:
    if facts.get(key) < 1:
        return ""
    return SwitchedOff("at 1 every token is kept")


IF_SOME_ARE_LEFT_OUT = ActsIf("below 1", _all_are_kept)


def unless_zero(*options: str) -> ActsIf:
    """Build a condition requiring a nonzero neighboring option, or at least one of several."""
    names = " or ".join(options)

    def why_not(facts: RunFacts, key: str) -> str:
        if any(facts.next_to(key, option) for option in options):
            return ""
        above, _, _ = key.rpartition(".")
        are_zero = "is 0"
        if len(options) > 1:
            are_zero = "are 0"
        return f"{above}.{' and '.join(options)} {are_zero}"

    return ActsIf(f"if {names} is above 0", why_not, f"Set {names}")


def if_option_is(option: str, value: object) -> ActsIf:
    """Build a condition requiring a neighboring option to equal ``value``."""

    def why_not(facts: RunFacts, key: str) -> str:
        other = facts.next_to(key, option)
        if other == value:
            return ""
        above, _, _ = key.rpartition(".")
        return f"{above}.{option} is {other}"

    return ActsIf(f"if {option} is {value}", why_not, f"Set {option}: {value}")


def if_below_share_of_group(parts: int) -> ActsIf:
    """Build a condition requiring fewer answers per prompt than ``rollout.group_size`` over ``parts``."""

    def why_not(facts: RunFacts, key: str) -> str:
        most = int(facts.get("rollout.group_size")) // parts
        if facts.get(key) < most:
            return ""
        return f"a group of rollout.group_size {facts.get('rollout.group_size')} gives at most {most}"

    share = "rollout.group_size"
    if parts > 1:
        share = f"{share} / {parts}"
    return ActsIf(f"below {share}", why_not, "Set rollout.group_size higher")
