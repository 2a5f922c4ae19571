"""Forbid connections to other machines. Python imports this module at startup if its folder is on ``PYTHONPATH``."""

import sys

LOOPBACK = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", b"localhost", b"127.0.0.1", b"::1"}


def _forbid(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a string is the path of a Unix socket
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in LOOPBACK:
        raise ConnectionError(f"Tests must not use the network ({host}).")


sys.addaudithook(_forbid)
