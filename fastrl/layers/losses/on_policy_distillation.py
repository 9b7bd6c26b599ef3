"""Advantages from a teacher: distillation on the policy's own tokens as a policy gradient."""

from __future__ import annotations

import math

from torch import Tensor

from fastrl.config.loss_options import OnPolicyDistillationConfig


def teacher_advantages(
    teacher_logprobs: Tensor,  # [T]
    logprobs: Tensor,  # [T]
    config: OnPolicyDistillationConfig,
) -> Tensor:  # [T]
    """coefficient * clip(ref - logp, -bound, bound) of each token, without gradient.

        E_policy[(logp - ref) d logp] = d KL(policy, teacher)

    so that the gradient of -A logp, A = ref - logp, is that of the reverse KL to the teacher at the
    token; what a token does to later ones is left out (a discount of 0). The surrogate's ratio, to
    the old policy or the sampler, corrects for tokens of another policy, and its clip or mask acts
    by the sign of A.

    References:
        Lu et al., On-Policy Distillation, Thinking Machines Lab, 2025, and tinker-cookbook, which
        add it to the advantages of the rewards; verl's `use_policy_gradient` with `loss_mode: k1`,
        its `loss_max_clamp` is `bound`; prime-rl's `ref_kl`. As in the last two logp is that of the
        current policy; tinker-cookbook and slime take the sampler's.
    """
    bound = math.inf if config.bound is None else config.bound
    return config.coefficient * (teacher_logprobs - logprobs.detach()).clamp(-bound, bound)
