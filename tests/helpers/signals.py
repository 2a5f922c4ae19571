"""Default signal handlers."""

import signal


def heed_signals():
    """Restore the handlers of SIGINT and SIGHUP if they are ignored, as in background jobs and under nohup."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
