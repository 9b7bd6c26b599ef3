"""Documents, packed batches, group-relative advantages and rollout files."""
