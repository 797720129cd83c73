"""Speculative decoding: cheap guesses at what comes next, and one forward that checks them all.

A drafter proposes a tree of tokens for each sequence (``drafter``, ``tree``); the target computes
all trees of a batch together, beside the prompts' chunks; ``accept`` walks down as long as what the
target says is among the guesses. The output is what plain decoding would have said, token by token
(Leviathan et al. 2022, arXiv 2211.17192, made simpler by random numbers that depend on a token's
position alone).
"""
