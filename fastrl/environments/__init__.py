"""Environments, and the worker processes that score completions. Imports no torch."""

from fastrl.environments.protocol import Environment, Problem

__all__ = ["Environment", "Problem"]
