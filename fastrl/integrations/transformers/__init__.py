"""The head in a causal language model of Hugging Face transformers.

`attach_head` puts it under the model's own call, `detach_head` takes it away without a trace.
"""

from fastrl.integrations.transformers.attach import attach_head, detach_head, packing_of

__all__ = ["attach_head", "detach_head", "packing_of"]
