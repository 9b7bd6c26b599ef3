"""`python -m tests.surface` writes surface.json anew: what users see is then what it is now."""

import tempfile
from pathlib import Path

import torch

from tests.surface.record import store

torch.set_num_threads(1)  # as in the tests, whose sums the file holds
with tempfile.TemporaryDirectory() as folder:
    store(Path(folder))
