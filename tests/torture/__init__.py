"""Random sequences of calls that look for failures which single tests miss: `python -m tests.torture`."""
