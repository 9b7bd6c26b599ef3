"""Benchmarks of the head against the floor and against other projects."""
