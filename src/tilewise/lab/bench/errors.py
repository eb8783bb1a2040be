"""What goes wrong in a benchmark in a way that its user can mend."""

from __future__ import annotations


class BenchError(Exception):
    """Bad input: the command line shows the message in one line and exits with status 2."""


class Refusal(Exception):
    """A peer does not serve a case; the message is its reason."""
