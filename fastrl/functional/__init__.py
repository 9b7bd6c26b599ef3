"""The streaming head: log-probabilities and losses of hidden states without their logits."""
