"""Cost of weights, keys and values in fewer bits, in answers and perplexity."""
