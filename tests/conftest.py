"""What all tests start from."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Under nohup or a shell's ``&`` these are ignored, and so would be by the programs that the tests end with them."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
