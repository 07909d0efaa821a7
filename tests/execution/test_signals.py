"""What a signal tells."""

import os
import signal

from peftkit.execution.signals import stop_requests


def test_the_first_signal_says_what_it_waits_for(capfd):
    with stop_requests(waits_for="this step and its checkpoint") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        told = capfd.readouterr().err
        assert (
            told.strip()
            == "Stopping after this step and its checkpoint; once more: at once, unsaved."
        )
        assert len(told.strip()) < 80
    with stop_requests():
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ""
