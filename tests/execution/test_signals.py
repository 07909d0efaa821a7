"""Messages on signals."""

import os
import signal

from peftkit.execution.signals import STOPPING, stop_requests


def test_the_first_signal_prints_its_message(capfd):
    with stop_requests(message=STOPPING) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        assert capfd.readouterr().err.strip() == STOPPING
        assert len(STOPPING) < 80
    with stop_requests():
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ""
