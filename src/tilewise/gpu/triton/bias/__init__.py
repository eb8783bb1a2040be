"""The gradient of a bias that several scores share: the kernel, and how its sums are split."""
