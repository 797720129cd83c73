"""Settings of the real servers that tests start."""

# Tests listen to whole answers, and the embedded model likes to talk; greedy, so that it says the
# same every time.
BRIEF = {"PARLEY_MAX_REPLY_TOKENS": "48", "PARLEY_TEMPERATURE": "0"}
