"""The language-model head and its losses."""
