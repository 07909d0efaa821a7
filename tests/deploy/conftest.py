"""The command line, for all tests of exports."""

from tests.helpers.command_line import peftkit

__all__ = ["peftkit"]
