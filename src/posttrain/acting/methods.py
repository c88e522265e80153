"""Conditions on which the options of components act: objectives, advantages, corrections, selections, rewards, ..."""

from __future__ import annotations

from posttrain.acting.facts import FP32_NOISE, ActsIf, Rounding, RunFacts, SwitchedOff


def why_ratio_is_one(facts: RunFacts, distance: float = 1.0) -> str:
    """Return why a bound in this ``distance`` from 1 never meets a ratio of the policy to its sampler."""
    if not facts.is_on_policy or facts.drops_inputs or distance < facts.noise:
        return ""
    one = "one update per batch of answers (train.num_minibatches 1, train.ppo_epochs 1), so the ratio is 1"
    if facts.rounds:
        return Rounding(f"{one} up to rounding")
    return one


def _bound(facts: RunFacts, key: str) -> str:
    value = facts.get(key)
    if value is None:  # no bound is as good as a far one
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
        return SwitchedOff(f"at {value:g} it is no bound, as a ratio is above 0")
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
        "one update per batch of answers (train.num_minibatches 1, train.ppo_epochs 1), so the critic's values are "
        "those of the batch"
    )


_SEVERAL = "if one batch of answers serves several updates, or is sampled ahead (rollout.staleness)"
_MORE_UPDATES = "Set train.num_minibatches or train.ppo_epochs to 2 or more"

IF_RATIO_MOVES = ActsIf(_SEVERAL, _bound, _MORE_UPDATES, by_default=True, distance=float)
IF_RATIO_FALLS = ActsIf(
    f"{_SEVERAL}; at 1 or more it is no bound", _lower_bound, _MORE_UPDATES, by_default=True, distance=float
)
IF_RATIO_REACHES_CAP = ActsIf(_SEVERAL, _cap, _MORE_UPDATES, by_default=True, distance=lambda cap: cap - 1.0)
IF_RATIO_VARIES = ActsIf(_SEVERAL, _gate, _MORE_UPDATES, by_default=True)
IF_SEQUENCES_DRIFT = ActsIf(_SEVERAL, _bound, _MORE_UPDATES, by_default=True)
IF_RATIO_LEAVES_ONE = ActsIf(_SEVERAL, lambda facts, key: why_ratio_is_one(facts), _MORE_UPDATES, by_default=True)
IF_VALUES_MOVE = ActsIf(_SEVERAL, _value_bound, _MORE_UPDATES, by_default=True)


def _samplers_ratio(facts: RunFacts, distance: float) -> str:
    """Return why a bound in this ``distance`` from 1 never meets a ratio of the trainer to the sampler."""
    if facts.rounds or facts.get("rollout.staleness") or distance < FP32_NOISE:
        return ""
    return "the native engine samples in fp32 with the trainer's own weights, so their ratio is 1"


def _samplers_cap(facts: RunFacts, key: str) -> str:
    if facts.next_to(key, "weigh") == "none":
        return "nothing is weighed (correction.weigh none)"
    return _samplers_ratio(facts, facts.get(key) - 1.0)


def _samplers_range(facts: RunFacts, key: str) -> str:
    return _samplers_ratio(facts, abs(facts.get(key) - 1.0))


def _samplers_weight(facts: RunFacts, key: str) -> str:
    return Rounding(_samplers_ratio(facts, 1.0))


_ELSEWHERE = "if the sampler's probabilities are not the trainer's: another engine, bf16, or rollout.staleness"
_ANOTHER_SAMPLER = "Set rollout.staleness, or take another engine or precision"

IF_SAMPLER_REACHES_CAP = ActsIf(_ELSEWHERE, _samplers_cap, _ANOTHER_SAMPLER, by_default=True)
IF_SAMPLER_DIFFERS = ActsIf(_ELSEWHERE, _samplers_range, _ANOTHER_SAMPLER, by_default=True)
IF_SAMPLER_IS_WEIGHED = ActsIf(_ELSEWHERE, _samplers_weight, _ANOTHER_SAMPLER)


def _single_turn(facts: RunFacts, key: str) -> str:
    if facts.get("rollout.max_turns") not in (None, 1):
        return ""
    return "a completion has one turn (rollout.max_turns)"


def _single_prompt(facts: RunFacts, key: str) -> str:
    if facts.get("rollout.num_prompts") != 1:
        return ""
    return Rounding("a batch has one group (rollout.num_prompts 1), so both means are the same")


IF_SEVERAL_TURNS = ActsIf("if a completion has several turns", _single_turn, "Set rollout.max_turns", by_default=True)
IF_SEVERAL_PROMPTS = ActsIf("if a batch has several prompts", _single_prompt, "Set rollout.num_prompts")


def _always_short(facts: RunFacts, key: str) -> str:
    limit = facts.get("rollout.max_tokens")
    margin = facts.next_to(key, "limit") - facts.next_to(key, "cache")
    if limit is None or facts.get("rollout.max_turns") not in (None, 1) or margin < limit:
        return ""
    longest = f"no answer is longer than rollout.max_tokens {limit}"
    return f"{longest}, and none of up to limit - cache = {margin} tokens is punished"


def _demonstrations(facts: RunFacts, key: str) -> str:
    if not facts.samples:
        return ""
    return "the model samples its answers, and demonstrations are not read"


IF_ANSWERS_GROW_LONG = ActsIf("if limit - cache is below rollout.max_tokens", _always_short, "Set limit lower")
IF_DEMONSTRATIONS_ARE_READ = ActsIf("if the recipe has 'data'", _demonstrations)


def _cancels(facts: RunFacts, key: str) -> str:
    """Return why the weight of a reward does nothing: it is the only one, and the advantage divides by the spread."""
    num_counted = 0
    for name, value in facts.settings.items():
        if name.startswith("rewards.") and name.endswith(".weight") and value:
            num_counted += 1
    if not facts.scale_free or num_counted > 1 or not facts.get(key) > 0 or facts.get("kl_in_reward.weight"):
        return ""
    return Rounding("there is one reward, and the advantage divides by its spread or mean")


IF_REWARDS_DIFFER = ActsIf("if there are several rewards, or the advantage keeps their scale", _cancels, "Add a reward")


def _adapts(facts: RunFacts, key: str) -> str:
    targets = facts.get("model.adapter.targets") == "all-linear" and not facts.get("model.adapter.target_parameters.0")
    if not targets or "head.trunk" in facts.settings:
        return ""
    return "the adapter's matrices are all that is trained, and Muon orthogonalizes all of them"


IF_ADAMW_TRAINS_SOME = ActsIf("if anything but hidden matrices is trained", _adapts)


def _all_are_kept(facts: RunFacts, key: str) -> str:
    if facts.get(key) < 1:
        return ""
    return SwitchedOff("at 1 every token is kept")


IF_SOME_ARE_LEFT_OUT = ActsIf("below 1", _all_are_kept)


def unless_zero(option: str) -> ActsIf:
    """Return the condition that the option next to it is not 0."""

    def why_not(facts: RunFacts, key: str) -> str:
        if facts.next_to(key, option):
            return ""
        above, _, _ = key.rpartition(".")
        return f"{above}.{option} is 0"

    return ActsIf(f"if {option} is above 0", why_not, f"Set {option}")


def if_option_is(option: str, value: object) -> ActsIf:
    """Return the condition that the option next to it has a ``value``."""

    def why_not(facts: RunFacts, key: str) -> str:
        other = facts.next_to(key, option)
        if other == value:
            return ""
        above, _, _ = key.rpartition(".")
        return f"{above}.{option} is {other}"

    return ActsIf(f"if {option} is {value}", why_not, f"Set {option}: {value}")


def if_below_share_of_group(parts: int) -> ActsIf:
    """Return the condition that a number of answers of a prompt is less than ``rollout.group_size`` over ``parts``."""

    def why_not(facts: RunFacts, key: str) -> str:
        most = int(facts.get("rollout.group_size")) // parts
        if facts.get(key) < most:
            return ""
        return f"a group of rollout.group_size {facts.get('rollout.group_size')} gives at most {most}"

    share = "rollout.group_size"
    if parts > 1:
        share = f"{share} / {parts}"
    return ActsIf(f"below {share}", why_not, "Set rollout.group_size higher")
