"""What documents say of FlashAttention. Importing this puts all claims on the list, in the tables' order."""

from tilewise.lab.claims import arithmetic, attention, datasheets, long_range, worked  # noqa: F401
