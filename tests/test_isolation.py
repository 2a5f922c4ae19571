"""Tests are isolated from the network, the data sets and the caches of the user."""

import os
import socket
import subprocess
import sys

import pytest


def test_connections_to_other_machines_fail():
    with pytest.raises(ConnectionError, match="must not use the network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(ConnectionError, match=r"must not use the network \(example\.org\)"):
        socket.getaddrinfo("example.org", 80)


def test_connections_of_child_processes_fail():
    program = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Tests must not use the network (192.0.2.1)" in done.stderr


def test_connections_to_this_machine_work():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()[:2], timeout=5).close()


def test_data_sets_and_caches_of_the_user_are_hidden():
    assert "MATBACKPROP_DATA" not in os.environ
    assert "matbackprop-tests-" in os.environ["MATBACKPROP_CACHE"]
