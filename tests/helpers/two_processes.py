"""Runs of several processes on the CPU, as torchrun would start them."""

import multiprocessing
import os
import socket

import pytest

from helpers.tiny_run import train
from matbackprop.vision.signals import RunInterrupted


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_two(config, prepare=None, train=train, processes=2):
    """Train in several forked processes with the environment of torchrun."""
    port = free_port()

    def body(rank):
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
        }
        if prepare is not None:
            prepare(rank)
        try:
            train(config)
        except RunInterrupted as stop:
            os._exit(128 + stop.signum)

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=body, args=(rank,)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        if process.is_alive():
            process.kill()
            pytest.fail("a process hangs")
    return [process.exitcode for process in started]
