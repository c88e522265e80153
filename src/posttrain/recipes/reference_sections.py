"""The sections of a recipe that hold a policy near a reference, with types, bounds and defaults."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.acting import sections as conditions
from posttrain.recipes.sections import Section


class RegularizeSection(Section):
    """A term of the objective of a policy at every token: ``β · KL(π‖π_ref) − c_H · H(π)``.

    On the policy's own samples the expected gradient of k2 is that of KL(π‖π_ref), of k3 (as in GRPO) that of
    KL(π_ref‖π), of k1 zero (Tang & Munos 2025, section 3); k1 is right in the reward (``kl_in_reward``). k3_weighted is
    ρ · k3 with ρ = π/μ, whose gradient is that of KL(π‖π_ref) in later updates on the same samples, too (DeepSeek-V3.2
    2025, section 3.1).

    Args:
        kl_coef: β; 0 loads no reference model.
        kl_estimator: estimator of the KL from the sampled tokens, differentiated as it stands.
        entropy_coef: c_H, the entropy bonus.
    """

    kl_coef: Annotated[float, conditions.IF_POLICY_DRIFTS] = Field(default=0.0, ge=0)
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "k3_weighted"], conditions.IF_KL_COUNTS] = "k3"
    entropy_coef: float = 0.0


class ReferenceSection(Section):
    """A reference that moves with the policy (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656, eq. 5 and 6).

    After every n-th update ``ref ← α π + (1 − α) ref``. Its log-probabilities are computed again before each update; a
    penalty in the reward is of the reference at sampling.

    Args:
        every: n; 512 in the paper. With ``mixing: 1`` the reference becomes the policy.
        mixing: α; 0.6 in the paper.
    """

    every: Annotated[int, conditions.IF_REFERENCE_MOVES] = Field(default=512, ge=1)
    mixing: Annotated[float, conditions.IF_REFERENCE_MOVES] = Field(default=0.6, gt=0, le=1)


class KLInRewardSection(Section):
    """A penalty inside the reward: −weight · KL to the reference, at every token.

    Advantages of whole completions see the sum over the tokens; advantages per token see each.

    Args:
        weight: weight of the KL.
        estimator: estimator of the KL from the sampled tokens.
        target: KL in nats per completion that the weight adapts to (Ziegler et al. 2019, section 2.2).
        horizon: completions over which it adapts.
    """

    weight: Annotated[float, conditions.IF_SAMPLER_DRIFTS] = Field(ge=0)
    estimator: Annotated[Literal["k1", "k2", "k3"], conditions.IF_PENALTY_COUNTS] = "k1"
    target: Annotated[float | None, conditions.IF_SAMPLER_DRIFTS] = Field(default=None, gt=0)
    horizon: Annotated[int, conditions.IF_WEIGHT_ADAPTS] = Field(default=10_000, ge=1)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target is not None and self.weight == 0:
            raise ValueError("a weight of 0 is multiplied and never moves towards 'target'; start from 0.01 or so")
        return self
