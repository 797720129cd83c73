"""One caller's conversation: who has the floor, what was said, what is being answered."""
