"""`python -m fastrl` and the `fastrl` script: the command, and Ctrl-C from its first import on."""

import signal
import sys

from fastrl.training.interrupt import end_at_once


def run() -> int:
    """Runs the command of this process's arguments; its exit code."""
    # A shell starts background jobs with SIGINT ignored; that stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)

    from fastrl.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
