"""Adapters: the head in other projects' models and trainers."""
