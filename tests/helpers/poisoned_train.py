"""`fastrl train` in which rank 1's gradients are not finite in its second step."""

import os
import sys

import pytest

from fastrl.cli import main
from tests.helpers.poisoned import poison

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {1} if os.environ["RANK"] == "1" else set())
        sys.exit(main(sys.argv[1:]))
