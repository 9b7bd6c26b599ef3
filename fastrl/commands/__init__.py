"""The commands of `fastrl`, a file for each group: their arguments, and what each runs."""
