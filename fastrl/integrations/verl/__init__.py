"""The head in verl 0.9: its fused forward, and fastrl's losses under names of their own.

verl loads this module into each of its processes:

    export VERL_USE_EXTERNAL_MODULES=fastrl.integrations.verl

With `model.use_fused_kernels: true` and the backend `torch`, log-probabilities and entropy of the
FSDP engines then come from the head: with the model's softcap, scale, bias and LoRA adapters on
the output layer, with one temperature or one for each sample, and with the sum of squared
probabilities (`calculate_sum_pi_squared`), which verl's own fused forward leaves out or refuses.
`policy_loss.loss_mode` may be `fastrl_grpo`, `fastrl_gspo` or `fastrl_cispo`; `register_loss` adds
any other policy-gradient loss of fastrl. The backends `triton` and `liger` stay verl's.
"""

from collections.abc import Mapping
from typing import Any

from verl.models.transformers import monkey_patch
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from fastrl.integrations.verl.engine import prepare_model_inputs, prepare_model_outputs
from fastrl.integrations.verl.forward import fused_forward, patch_forward
from fastrl.integrations.verl.losses import verl_loss

__all__ = ["register_loss"]


def register_loss(name: str, options: Mapping[str, Any]) -> None:
    """Registers a loss of fastrl as the policy loss `name` of verl; see `verl_loss`.

    Args:
        name: for verl's `policy_loss.loss_mode`.
        options: of the loss's config, such as `{"type": "sapo", "tau_negative": 1.1}`.

    Raises:
        ValueError: an option that verl sets or whose columns it does not have.
    """
    register_policy_loss(name)(verl_loss(options))


FusedLinearForPPO.forward = fused_forward
monkey_patch.patch_forward_with_backends = patch_forward
FSDPEngineWithLMHead.prepare_model_inputs = prepare_model_inputs
FSDPEngineWithLMHead.prepare_model_outputs = prepare_model_outputs
register_policy_loss("fastrl_grpo")(verl_loss({"type": "grpo"}, dual_clip=True))
register_policy_loss("fastrl_gspo")(verl_loss({"type": "gspo"}))
register_policy_loss("fastrl_cispo")(verl_loss({"type": "cispo"}))
