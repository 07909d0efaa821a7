"""The command line in this process."""

from tests.helpers.command_line import peftkit

__all__ = ["peftkit"]
