"""Training runs: sampling, environments, the loop, checkpoints and what a person sees of them."""
