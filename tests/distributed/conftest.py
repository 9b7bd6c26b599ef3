"""The pool of ranks, one for the whole session."""

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Runs a function on n gloo ranks."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
