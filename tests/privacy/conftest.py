"""Several buckets, as in the tests of strategies."""

from ..strategy.conftest import _small_buckets  # noqa: F401
