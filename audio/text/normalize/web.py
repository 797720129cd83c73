"""E-mail addresses, URLs, host names, file names and paths, said part by part."""

from __future__ import annotations

import re
from re import Match

from audio.text.normalize.numbers import cardinal, digits
from audio.text.word_set import word_set

_TLDS = word_set(
    "com org net edu gov mil int info biz io ai app dev me tv co uk ca de fr es nl eu ch jp cn au "
    "nz br ru se dk fi pl ie kr xyz site online tech shop store blog cloud gg ly fm cc"
)
_SPOKEN_TLDS = word_set(
    "com org net gov mil info biz app dev co xyz site online tech shop store blog cloud int"
)
# Endings that are read as words; any other is spelled.
_SPOKEN_EXTENSIONS = word_set(
    "bin conf config doc env java json kotlin lock log mov rust swift tar text toml yaml zip gif "
    "bat bash"
)
_EXTENSIONS = word_set(
    "txt md py pyc js jsx ts tsx json yaml yml toml csv tsv xml html htm css scss pdf doc docx "
    "xls xlsx ppt pptx png jpg jpeg gif svg webp mp3 mp4 wav flac ogg mov avi mkv zip tar gz bz2 "
    "xz 7z rar exe dll so sh bash bat ps1 c h cc cpp hpp cs go rs rb php java kt swift sql db log "
    "conf cfg ini env lock bin iso dmg deb rpm apk ipynb tex bak onnx gguf"
)
_HOST = rf"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+(?:{'|'.join(sorted(_TLDS))})"
_EMAIL = re.compile(
    r"(?<![\w.+-])(?:mailto:)?([\w.+-]+)@((?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})(?![\w-])"
)
_URL = re.compile(r"(?i)\b(?:https?|ftp|wss?)://([^\s<>\"'|]+)|\bwww\.([^\s<>\"'|]+)")
_BARE_HOST = re.compile(rf"(?<![\w@./-])({_HOST})(?::(\d{{2,5}}))?(/[^\s<>\"'|]*)?(?![\w-])")
_PATH = re.compile(
    r"(?<![\w/.:~])(~/[\w./-]*\w/?|\.{1,2}/[\w./-]*\w/?|/[A-Za-z_][\w.-]*(?:/[\w.-]+)*/?"
    r"|[A-Za-z]:\\(?:[\w.-]+\\)*(?:[\w.-]*\w)?|[\w-]+(?:/[\w.-]+)*/[\w-]+\.[A-Za-z]\w{0,4}(?!\w))"
)
_FILE = re.compile(
    rf"(?<![\w/.@])([\w-]+(?:\.[\w-]+)*)\.({'|'.join(sorted(_EXTENSIONS))})(?![\w-]|\.\w)"
)
_DOTFILE = re.compile(r"(?<![\w./])\.([a-z][\w-]+)\b")
_VOWEL = re.compile(r"[aeiouyAEIOUY]")
_TRAILING = ".,;:!?)]}'\"…*_"
_SIGNS = {
    ".": "dot", "-": "dash", "_": "underscore", "/": "slash", "\\": "backslash", ":": "colon",
    "~": "tilde", "+": "plus", "@": "at", "#": "hash", "=": "equals", "&": "and", "%": "percent",
}  # fmt: skip
_PIECES = re.compile(r"[A-Za-z]+|\d+|[^\w\s]|_")


def spell(text: str) -> str:
    """``API`` is "A P I": letters one by one, in capitals so that they are read as letters."""
    return " ".join(text.upper())


def _piece(piece: str) -> str:
    if piece.isdigit():
        return digits(piece) if len(piece) > 2 or piece[0] == "0" else cardinal(int(piece))
    if not piece.isalpha():
        return _SIGNS.get(piece, "")
    if len(piece) == 1 or (len(piece) <= 5 and not _VOWEL.search(piece)):
        return spell(piece)
    return spell(piece) if piece.isupper() and len(piece) <= 4 else piece


def say_parts(text: str) -> str:
    """``jo_smith-2`` is "jo underscore smith dash two"."""
    return " ".join(filter(None, map(_piece, _PIECES.findall(text))))


def _say_host(host: str) -> str:
    labels = host.split(".")
    words = []
    for index, label in enumerate(labels):
        is_ending = index and (index == len(labels) - 1 or len(label) <= 3)
        if is_ending and label.isalpha():
            words.append(label if label.lower() in _SPOKEN_TLDS else spell(label))
        else:
            words.append(say_parts(label))
    return " dot ".join(words)


def _say_email(match: Match[str]) -> str:
    return f"{say_parts(match[1])} at {_say_host(match[2])}"


def _say_extension(name: str) -> str:
    if name.lower() in _SPOKEN_EXTENSIONS:
        return name.lower()
    return say_parts(" ".join(name.upper()) if name.isalpha() else " ".join(name))


def _say_segment(segment: str) -> str:
    stem, dot, extension = segment.rpartition(".")
    if dot and extension.lower() in _EXTENSIONS:
        return f"{say_parts(stem)} dot {_say_extension(extension)}"
    return say_parts(segment)


def say_path(path: str) -> str:
    """``~/notes/todo.txt`` is "tilde slash notes slash todo dot T X T"."""
    separator = "\\" if "\\" in path else "/"
    sign = f" {_SIGNS[separator]} "
    words = sign.join(_say_segment(part) for part in path.split(separator))
    return " ".join(words.split())


def _say_address(address: str) -> str:
    """Host and path. Query and fragment mean nothing to a listener and are left out."""
    host, _, path = re.split(r"[?#]", address, maxsplit=1)[0].partition("/")
    host = host.rpartition("@")[2]
    if host.lower().startswith("www."):
        host = host[4:]
    name, _, port = host.partition(":")
    words = _say_host(name)
    if port:
        words += f" colon {digits(port)}"
    path = path.rstrip("/")
    return f"{words} slash {say_path(path)}" if path else words


def _split_trailing(address: str) -> tuple[str, str]:
    bare = address.rstrip(_TRAILING)
    if address[len(bare) : len(bare) + 1] == ")" and "(" in bare:
        bare += ")"
    return bare, address[len(bare) :]


def _say_url(match: Match[str]) -> str:
    address, trailing = _split_trailing(match[1] or match[2])
    return _say_address(address) + trailing


def _say_bare_host(match: Match[str]) -> str:
    address, trailing = _split_trailing(match[0])
    if address.lower() in ("a.me", "i.am"):
        return match[0]
    return _say_address(address) + trailing


def expand_addresses(text: str) -> str:
    """``text`` with every address that a machine would read in spoken words."""
    if "@" in text:
        text = _EMAIL.sub(_say_email, text)
    if "." in text:
        text = _URL.sub(_say_url, text)
        text = _BARE_HOST.sub(_say_bare_host, text)
    elif "://" in text:
        text = _URL.sub(_say_url, text)
    if "/" in text or "\\" in text:
        text = _PATH.sub(lambda m: say_path(m[0]), text)
    if "." in text:
        text = _FILE.sub(lambda m: f"{say_parts(m[1])} dot {_say_extension(m[2])}", text)
        text = _DOTFILE.sub(lambda m: f"dot {say_parts(m[1])}", text)
    return text
