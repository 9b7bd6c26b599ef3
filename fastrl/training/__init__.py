"""Training runs: sampling, environments, the loop, checkpoints, logs and display."""
