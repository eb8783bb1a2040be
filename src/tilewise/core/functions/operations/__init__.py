"""What a user's function may do to a score and its indices, and formulas of what no kernel has."""
