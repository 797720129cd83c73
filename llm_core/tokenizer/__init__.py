"""Text to token ids and back."""

from llm_core.tokenizer.detokenizer import Detokenizer
from llm_core.tokenizer.hf_tokenizer import token_text, tokenizer_from_json
from llm_core.tokenizer.tokenizer import CONTROL, USER_DEFINED, Tokenizer

__all__ = [
    "CONTROL",
    "Detokenizer",
    "Tokenizer",
    "USER_DEFINED",
    "token_text",
    "tokenizer_from_json",
]
