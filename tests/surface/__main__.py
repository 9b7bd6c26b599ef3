"""`python -m tests.surface` writes surface.json anew: what users see is then what it is now."""

import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401  its settings are those of the stored numbers
from tests.surface.record import store

with tempfile.TemporaryDirectory() as folder:
    store(Path(folder))
