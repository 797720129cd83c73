"""What operators look at: traces of turns, and the metrics and spans that are made of them."""
