"""GRPO of a Hugging Face model in a loop of one's own: it learns to answer with one token.

Run: python examples/transformers_head.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fastrl import Document, OptimizerStep
from fastrl.integrations.transformers import attach_head, packing_of

STEPS, PROMPTS, GROUP, LENGTH, WANTED = 20, 4, 8, 6, 7


def make_model():
    """A tiny one; one of your own comes from AutoModelForCausalLM.from_pretrained("...")."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=0, eos_token_id=1)
    return AutoModelForCausalLM.from_config(config)


def rollouts(model) -> tuple[list[Document], float]:
    """Sampled completions with their group's advantages, and the mean reward."""
    prompts = torch.randint(2, 32, (PROMPTS, 3)).repeat_interleave(GROUP, 0)
    lengths = {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH, "pad_token_id": 0}
    sampled = model.generate(prompts, attention_mask=prompts > 0, do_sample=True, **lengths)
    rewards = (sampled[:, 3:] == WANTED).float().mean(1)
    of_group = rewards.view(PROMPTS, GROUP)
    advantages = of_group - of_group.mean(1, keepdim=True)
    documents = [
        Document(tokens=tokens.tolist(), prompt_length=3, advantage=float(advantage))
        for tokens, advantage in zip(sampled, advantages.flatten(), strict=True)
    ]
    return documents, float(rewards.mean())


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    model = make_model()
    head = attach_head(model, {"policy": {"type": "grpo", "on_policy": True}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    print(f"documents are {packing_of(model)}")
    means = []
    for number in range(STEPS):
        documents, mean = rollouts(model)
        means += [mean]
        step = OptimizerStep.from_documents(documents, max_tokens=128)
        for batch in step:  # micro-batches; their losses add up to the step's
            output = model(batch=batch)
            output.loss.backward()
            step.add(output)
        optimizer.step()
        optimizer.zero_grad()
        entropy = step.finish(head.loss_groups)["policy/entropy"]
        print(f"step {number}: reward {mean:.3f}, entropy {entropy:.3f}")
    return means[0], means[-1]


if __name__ == "__main__":
    main()
