"""The head's op, from one call to its collectives."""
