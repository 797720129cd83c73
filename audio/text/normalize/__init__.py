"""English text normalisation: numbers, dates, units and symbols in words."""
