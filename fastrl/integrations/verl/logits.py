"""What a model of transformers makes of h W^T + b, from its config.

verl's fused forward sees the hidden states after the body and forms no logits, so that what the
model's own forward does to either is known here by name, or refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
# Granite divides by it, HyperCLOVA X multiplies.
_SCALING = "logits_scaling"
# Names that sound as if they changed the logits; MiniCPM divides the hidden states by a width.
_SUSPECT = re.compile(r"(logit|lm_head|output)\w*(scal|cap|multipl)|dim_model_base")
_NOT_OF_THE_HEAD = re.compile(r"att|router|init_value")


@dataclass(frozen=True)
class LogitOptions:
    """softcap * tanh(logit_scale * z / softcap) of z = h W^T + b; logit_scale * z without a cap."""

    softcap: float | None = None
    logit_scale: float = 1.0


def logit_options(config: Any) -> LogitOptions:
    """The options of a model's config, of its text part where it has several.

    Raises:
        ValueError: a field that seems to change the logits and is not known here.
    """
    text = config.get_text_config()
    values = {
        name: value
        for name, value in vars(text).items()
        if _SUSPECT.search(name)
        and not _NOT_OF_THE_HEAD.search(name)
        and isinstance(value, int | float)
    }
    softcaps = [values.pop(name) for name in _SOFTCAPS if name in values]
    scale = 1.0
    for name in _FACTORS:
        scale *= values.pop(name, 1.0)
    scaling = values.pop(_SCALING, 1.0)
    scale = scale * scaling if text.model_type.startswith("hyperclovax") else scale / scaling
    unknown = {name: value for name, value in values.items() if value != 1}
    if unknown or len(softcaps) > 1:
        raise ValueError(
            "the config must change the logits by a scale and a soft cap that fastrl knows, but"
            f" {type(text).__name__} has {unknown or dict.fromkeys(_SOFTCAPS)}; set"
            " `use_fused_kernels: false` for this model."
        )
    return LogitOptions(softcaps[0] if softcaps else None, scale)
