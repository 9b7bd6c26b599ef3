"""Models that end in the language-model head."""
