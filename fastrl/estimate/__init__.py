"""Memory of each rank of a run, and the bytes of every collective. Arithmetic only."""
