"""Default signal handlers."""

import signal


def restore_signals():
    """Restore the handlers of SIGINT and SIGHUP if they are ignored (background jobs, nohup)."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
