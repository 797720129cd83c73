"""Patterns and small pure functions behind audio.text.markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from audio.text.word_set import word_set

MAX_HELD_LEN = 400
"""A bracket or angle that has not closed within this many characters is taken literally."""

BULLET = re.compile(r"[-*+•◦▪‣][ \t]+(?:\[[ xX]\][ \t]+)?")
BULLET_PREFIX = re.compile(r"[-*+•◦▪‣](?:[ \t]+(?:\[(?:[ xX](?:\](?:[ \t]*))?)?)?)?")
HEADING = re.compile(r"#{1,6}[ \t]+")
HEADING_PREFIX = re.compile(r"#{1,6}[ \t]*")
QUOTE = re.compile(r">[ \t]?")
FENCE = re.compile(r"(`{3,}+|~{3,}+)([^`\n]*)\n")
RULE = re.compile(r"(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|={3,}[ \t]*")
RULE_PREFIX = re.compile(r"(?:\*[ \t]*)+|(?:-[ \t]*)+|(?:_[ \t]*)+|=+[ \t]*")
TABLE_RULE_PREFIX = re.compile(r"\|[ \t:|-]*")

CITATION = re.compile(r"\[\^?\d{1,3}(?:\s?[,–-]\s?\d{1,3})*\]|\[\^[\w-]{1,30}\]")
LINK_DEFINITION = re.compile(r"\[[^\]\n]+\]:[ \t]*\S.*")
LINK_DEFINITION_PREFIX = re.compile(r"\[[^\]\n]*(?:\](?::.*)?)?")
AUTOLINK = re.compile(r"<((?:https?|mailto|ftp):[^\s<>]+|[\w.+-]+@[\w-]+\.[\w.-]+)>")
_ATTRIBUTE = r"\s+[\w-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s<>\"']+)"
HTML_TAG = re.compile(rf"</?([a-zA-Z][a-zA-Z0-9]*)(?:{_ATTRIBUTE})*\s*/?>")
_TAG_NAME = re.compile(r"</?([a-zA-Z][a-zA-Z0-9]*)?")
_AUTOLINK_PREFIX = re.compile(r"<[\w.+-]+(?:[:@][^\s<>]*)?")

_HTML_TAG_NAMES = word_set(
    "a b big blockquote br center code dd del details div dl dt em font h1 h2 h3 h4 h5 h6 hr i "
    "img ins kbd li mark ol p pre q s small span strike strong sub summary sup table tbody td th "
    "thead tr tt u ul"
)

ENTITIES = {
    "&amp;": "&",
    "&lt;": "<",
    "&gt;": ">",
    "&quot;": '"',
    "&#39;": "'",
    "&apos;": "'",
    "&nbsp;": " ",
}

# Emoji and the dingbats that models use as decoration. Letters, digits, arrows in text and the
# signs that are read aloud (degree, copyright, currency, mathematics) are not among them.
_EMOJI = re.compile(
    "["
    "\U0001f000-\U0001faff"  # pictographs, flags, skin tones, symbols
    "\U000e0020-\U000e007f"  # tags in flag sequences
    "\u2600-\u27bf"  # miscellaneous symbols, dingbats
    "\u2b00-\u2bff"  # stars, heavy arrows
    "\u231a\u231b\u2328\u23cf\u23e9-\u23fa"  # watches, media controls
    "\u25a0-\u25ff"  # geometric shapes
    "\u2934\u2935\u3030\u303d\u3297\u3299"
    "\ufe0e\ufe0f\u20e3"  # variation selectors, keycap
    "]"
)


def is_emoji(char: str) -> bool:
    """Whether one code point is an emoji or a modifier that only emoji carry."""
    return char > "\u20e2" and _EMOJI.match(char) is not None


def strip_emoji(text: str) -> str:
    """``text`` with every emoji replaced by a space."""
    return _EMOJI.sub(" ", text).replace("\u200d", "") if not text.isascii() else text


def is_html_tag_name(name: str) -> bool:
    """Whether HTML knows a tag of this name: other words in angle brackets are text."""
    return name.lower() in _HTML_TAG_NAMES


def may_become_tag(held: str) -> bool:
    """Whether ``held``, which begins with ``<``, can still grow into an HTML tag or an autolink."""
    if held == "<" or (_AUTOLINK_PREFIX.fullmatch(held) and len(held) < 100):
        return True
    name = _TAG_NAME.match(held)
    if name is None or ">" in held or "<" in held[1:]:
        return False
    if name.end() == len(held):
        return len(held) < 14
    rest = held[name.end() :]
    return is_html_tag_name(name.group(1) or "") and (
        rest.isspace() or rest == "/" or re.match(r"\s+[\w-]+\s*(?:=|$)", rest) is not None
    )


@dataclass(frozen=True)
class Link:
    """``num_taken`` characters are a link that reads ``text``; 0 when it is no link."""

    num_taken: int
    text: str


NO_LINK = Link(0, "")


def find_link(held: str, may_grow: bool) -> Link | None:
    """The link ``[text](target)`` or ``[text][ref]`` at the front, NO_LINK, or None to wait."""
    close = _matching(held, 0, "[", "]") if "]" in held else None
    if close is None:
        return None if may_grow and "\n\n" not in held else NO_LINK
    text = held[1:close]
    following = held[close + 1 : close + 2]
    if not following:
        return None if may_grow else NO_LINK
    if following == "(":
        end = _matching(held, close + 1, "(", ")")
        if end is not None:
            return Link(end + 1, text)
        return None if may_grow and "\n" not in held[close:] else NO_LINK
    if following == "[":
        end = held.find("]", close + 2)
        if end >= 0:
            return Link(end + 1, text) if not held[close + 2 : end].isdigit() else NO_LINK
        return None if may_grow and "\n" not in held[close:] else NO_LINK
    return NO_LINK


def _matching(held: str, start: int, opening: str, closing: str) -> int | None:
    depth = 0
    for index in range(start, len(held)):
        if held[index] == opening:
            depth += 1
        elif held[index] == closing:
            depth -= 1
            if depth == 0:
                return index
    return None
