"""Recipe sections that keep the policy close to a reference."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.acting import sections as conditions
from posttrain.recipes.sections import Section


class RegularizeSection(Section):
    """Per-token policy regularization: ``β · KL(π‖π_ref) − c_H · H(π)``.

    On-policy, the expected k2 gradient equals the KL(π‖π_ref) gradient, k3 (used by GRPO) gives KL(π_ref‖π), and k1
    gives zero (Tang & Munos 2025, section 3). k1 is correct as a reward penalty (``kl_in_reward``). k3_weighted
    multiplies k3 by ρ = π/μ, so later updates on the same samples also follow the KL(π‖π_ref) gradient (DeepSeek-V3.2
    2025, section 3.1).

    Args:
        kl_coef: β. 0 loads no reference model.
        kl_estimator: KL estimator on sampled tokens, differentiated directly.
        entropy_coef: entropy bonus c_H.
    """

    kl_coef: Annotated[float, conditions.IF_POLICY_DRIFTS] = Field(default=0.0, ge=0)
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "k3_weighted"], conditions.IF_KL_COUNTS] = "k3"
    entropy_coef: float = 0.0


class ReferenceSection(Section):
    """Moving reference (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656, eq. 5 and 6).

    Every n updates, ``π_ref ← α π + (1 − α) π_ref``. Reference log-probabilities are recomputed before each update. A
    KL penalty in the reward uses the reference at sampling time.

    Args:
        every: n; 512 in the paper. ``mixing: 1`` replaces the reference by the policy.
        mixing: α; 0.6 in the paper.
    """

    every: Annotated[int, conditions.IF_REFERENCE_MOVES] = Field(default=512, ge=1)
    mixing: Annotated[float, conditions.IF_REFERENCE_MOVES] = Field(default=0.6, gt=0, le=1)


class KLInRewardSection(Section):
    """KL penalty in the reward: −weight · KL to the reference, per token.

    Sequence-level advantages use the sum over tokens. Token-level advantages use each value.

    Args:
        weight: KL weight.
        estimator: KL estimator on sampled tokens.
        target: target KL for the adaptive weight, in nats per completion (Ziegler et al. 2019, section 2.2).
        horizon: adaptation horizon in completions.
    """

    weight: Annotated[float, conditions.IF_SAMPLER_DRIFTS] = Field(ge=0)
    estimator: Annotated[Literal["k1", "k2", "k3"], conditions.IF_PENALTY_COUNTS] = "k1"
    target: Annotated[float | None, conditions.IF_SAMPLER_DRIFTS] = Field(default=None, gt=0)
    horizon: Annotated[int, conditions.IF_WEIGHT_ADAPTS] = Field(default=10_000, ge=1)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target is not None and self.weight == 0:
            raise ValueError("an adaptive weight of 0 can never move towards 'target'; start at 0.01")
        return self
