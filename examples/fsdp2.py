"""A Hugging Face model under FSDP2 with a head attached: two ranks, one loss.

Run: torchrun --nproc-per-node 2 examples/fsdp2.py. On GPUs take "cuda" and "nccl".
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from fastrl import Document, OptimizerStep, ParallelGroups
from fastrl.integrations.transformers import attach_head

STEPS = 10


def make_model(mesh):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    model = make_model(mesh)
    groups = ParallelGroups(dp=mesh.get_group("data"))
    head = attach_head(model, {"sft": {"type": "cross_entropy"}}, groups=groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = torch.randint(2, 64, (6, 12), generator=torch.Generator().manual_seed(1)).tolist()
    mine = [Document(tokens=text, prompt_length=2) for text in texts[rank::size]]
    for number in range(STEPS):
        # All ranks get equally many micro-batches, however long their documents.
        step = OptimizerStep.from_documents(mine, max_tokens=24, groups=groups)
        for batch in step:
            output = model(batch=batch)
            # FSDP2 averages gradients over its ranks; the loss of a rank is a part of a sum.
            (size * output.loss).backward()
            step.add(output)
        optimizer.step()
        optimizer.zero_grad()
        loss = float(step.finish(head.loss_groups)["loss"])
        if rank == 0:
            print(f"step {number}: loss {loss:.6f} on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
