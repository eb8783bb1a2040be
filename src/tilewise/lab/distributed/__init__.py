"""One sequence over many devices: what the cost model predicts, and what a run measures."""
