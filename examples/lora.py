"""LoRA on the body and on the output layer of a Hugging Face model: learns a text, then forgets it.

Run: python examples/lora.py. No [vocabulary, hidden] product of the adapter is formed: the head
reads the layer's weight and both low-rank factors.
"""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from fastrl import Document, OptimizerStep
from fastrl.integrations.transformers import attach_head, detach_head

STEPS = 30


def make_model():
    """A tiny one; one of your own comes from AutoModelForCausalLM.from_pretrained("...")."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4))
    modules = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=modules, task_type=TaskType.CAUSAL_LM)
    return get_peft_model(model, adapters)


def main() -> tuple[float, float, float]:
    model = make_model()
    head = attach_head(model, {"sft": {"type": "cross_entropy"}})
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    texts = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(1)).tolist()
    documents = [Document(tokens=text, prompt_length=2) for text in texts]
    losses = []
    for _ in range(STEPS):
        step = OptimizerStep.from_documents(documents, max_tokens=24)
        for batch in step:
            output = model(batch=batch)
            output.loss.backward()
            step.add(output)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(step.finish(head.loss_groups)["loss"]))
    # The model that one started from is the same model without its adapters.
    with model.disable_adapter(), torch.no_grad():
        reference = [model(batch=batch).logprobs for batch in step]
    labels = sum(int((batch.labels >= 0).sum()) for batch in step)
    start = -float(sum(each.sum() for each in reference)) / labels
    detach_head(model)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; without the adapters {start:.3f}")
    return losses[0], losses[-1], start


if __name__ == "__main__":
    main()
