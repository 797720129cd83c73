"""What operators look at: traces of turns."""
