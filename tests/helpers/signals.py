"""Signals for processes that are to be interrupted."""

import signal


def heed_signals():
    """Undo what a shell does to background jobs, and nohup: they ignore these, as would every process started here."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
