"""What documents say of FlashAttention. Importing this puts all claims on the list, in the tables' order."""

from tilewise.lab.claims import arithmetic, orders, attention, long_range  # isort: skip  # noqa: F401 (models before long_range)
