"""The call of a Hugging Face body on packed documents, as docs/data.md gives it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fastrl import BatchKwargs, Document, TokenBatch

PAGE = Path(__file__).parent.parent.parent / "docs" / "data.md"


def _batch(*documents: list[int]) -> BatchKwargs:
    made = [Document(tokens, prompt_length=1) for tokens in documents]
    (batch,) = TokenBatch.from_documents(made).to_kwargs()
    return batch


def test_b2_the_call_of_the_docs_keeps_documents_apart() -> None:
    (call,) = re.findall(
        r"^hidden_states = (model\.base_model\(.*?\)\.last_hidden_state\[0\])",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    tiny = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(tiny).double().eval()

    def hidden_states(text: str, batch: BatchKwargs) -> torch.Tensor:
        result: torch.Tensor = eval(text, {"model": model, "batch": batch})
        return result

    documents = [[3, 1, 4, 1, 5], [9, 2, 6, 5], [3, 5, 8, 9, 7, 9]]
    alone = torch.cat([hidden_states(call, _batch(each)) for each in documents])
    packed = hidden_states(call, _batch(*documents))
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    # What the text warns of: transformers' default.
    leaking = hidden_states(call.replace("use_cache=False", "use_cache=None"), _batch(*documents))
    assert (leaking - alone).abs().max() > 0.01
