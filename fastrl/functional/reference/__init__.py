"""The definition of the head and its losses, in plain loops; for tests and benchmarks alone."""
