"""What a run needs on each rank: memory, and the bytes of every collective. Arithmetic only."""
