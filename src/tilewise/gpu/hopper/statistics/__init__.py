"""Statistics of the weights: a second pass over the scores, when lse is known."""
