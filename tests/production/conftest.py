"""Commands of these tests run in this process."""

from tests.helpers.command_line import peftkit

__all__ = ["peftkit"]  # a fixture of all tests here
