"""What documents say of FlashAttention. Importing this puts all claims on the list, in the tables' order."""

# isort: off
from tilewise.lab.claims import arithmetic, datasheets, worked  # noqa: F401 - counted
from tilewise.lab.claims import attention, models, long_range  # noqa: F401 - measured
