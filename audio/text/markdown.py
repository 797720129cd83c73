"""Markdown out of a stream of text deltas: what remains is fit to be shown and to be spoken.

Language models answer in Markdown and no voice should read its marks. The stripper is a scanner
that is driven one character at a time, so the output cannot depend on where the deltas were cut.
It holds back text only while a mark is ambiguous: a run of asterisks waits for its next character,
a bracket for the end of its link, white space for the word behind it.

The rules follow CommonMark 0.31 where a stream permits (flanking rules of emphasis, fences, code
spans, links); what CommonMark decides by looking ahead over a paragraph is decided here from the
characters at hand.
"""

from __future__ import annotations

from collections.abc import Callable

from audio.text import markdown_rules as rules

_NO_SPACE_BEFORE = ".,;:!?)]}"
_ESCAPABLE = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_MAX_STRUCK_LEN = 200

# What a rule answers when it cannot decide before more text has come.
_WAIT = -1
_PASS = 0


class SpokenText:
    """Strips Markdown, emoji and code blocks from a stream of text deltas.

    Emphasis, heading marks, bullets, quote marks, rules, table bars, code ticks, HTML tags and
    citation marks such as ``[1]`` go; link texts stay and their targets go; fenced code blocks and
    struck-out text go with their content. Numbered lists keep their numbers. ``snake_case``,
    ``5 < 10``, ``2 * 3``, prices, addresses and URLs stay as they are.

    ``feed`` and ``flush`` give pieces whose concatenation depends only on the concatenation of the
    deltas. One object serves one text; after ``flush`` it is ready for the next.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._held = ""
        self._out: list[str] = []
        self._last = ""  # last emitted character, "" at the beginning
        self._space = ""  # white space that is decided but not yet emitted
        self._dropped = False  # something was left out since the last emitted character
        self._at_line_start = True
        self._open_stars = 0
        self._open_underscores = 0
        self._code_ticks = 0  # length of the run that opened the code span, 0 outside
        self._fence = ""  # the run that opened the fenced block, "" outside
        self._in_table_row = False
        self._word = ""  # what was emitted since the last white space
        self._final = False

    def feed(self, delta: str) -> str:
        """The text that has become certain with ``delta``."""
        for char in delta:
            if char == "\r":
                continue
            self._held += char
            self._drain()
        return self._take()

    def flush(self) -> str:
        """The rest of the text. Marks that were never completed are judged as they stand."""
        self._final = True
        self._drain()
        if not self._dropped:
            self._emit_space()
        rest = self._take()
        self._reset()
        return rest

    # --- output -------------------------------------------------------------------------------

    def _take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _emit_space(self) -> None:
        if self._space:
            self._out.append(self._space)
            self._last = self._space[-1]
            self._space = ""
            self._word = ""

    def _emit(self, text: str) -> None:
        """Emits characters that are not white space."""
        if self._dropped and text[0] in _NO_SPACE_BEFORE and "\n" not in self._space:
            self._space = ""
        self._emit_space()
        self._dropped = False
        self._at_line_start = False
        self._out.append(text)
        self._last = text[-1]
        self._word += text

    def _add_space(self, char: str) -> None:
        if char == "\n":
            if self._space.endswith("\n\n"):
                return
            self._space = self._space.rstrip(" \t") + "\n"
            if self._space.endswith("\n\n"):
                self._open_stars = self._open_underscores = self._code_ticks = 0
            self._at_line_start = True
            self._in_table_row = False
        elif self._dropped and (self._space or not self._last):
            pass  # the space on the other side of what was left out is enough
        else:
            self._space += char
        if not self._last and not self._word:
            self._space = ""  # nothing has been said yet

    # --- scanning -----------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._held:
            num_taken = self._step()
            if num_taken == _WAIT:
                return
            self._held = self._held[num_taken:]

    def _step(self) -> int:
        """Handles the front of the held text; the number of characters taken, or _WAIT."""
        if self._fence:
            return self._step_fence()
        char = self._held[0]
        if self._code_ticks and char != "`":
            return self._literal(char)
        if self._at_line_start:
            taken = self._step_line_start()
            if taken != _PASS:
                return taken
        rule = self._RULES.get(char)
        if rule is not None:
            return rule(self)
        return self._literal(char)

    def _literal(self, char: str) -> int:
        if char in " \t\n":
            self._add_space(char)
        elif rules.is_emoji(char) or (char == "\u200d" and self._dropped):
            self._dropped = True
            if self._last and not self._space:
                self._space = " "
        elif char == "|" and self._in_table_row:
            self._table_bar()
        else:
            self._emit(char)
        return 1

    def _run_len(self, char: str) -> int:
        """Length of the run at the front, or _WAIT when it may go on."""
        num = len(self._held) - len(self._held.lstrip(char))
        may_grow = num == len(self._held) and num < rules.MAX_HELD_LEN and not self._final
        return _WAIT if may_grow else num

    def _prev(self) -> str:
        """The character before the front, as the eye sees it: a space after white space."""
        return " " if self._space or not self._last else self._last

    # --- whole lines --------------------------------------------------------------------------

    def _step_line_start(self) -> int:
        held = self._held
        if held[0] in " \t":
            return 1  # indentation
        if held[0] == "\n":
            return _PASS
        end = held.find("\n")
        line = held if end < 0 else held[:end]
        may_grow = end < 0 and not self._final and len(line) < rules.MAX_HELD_LEN

        if held[0] in "`~":
            taken = self._open_fence(may_grow)
            if taken != _PASS:
                return taken
        if held[0] in "*-_=":
            if may_grow and rules.RULE_PREFIX.fullmatch(line):
                return _WAIT
            if rules.RULE.fullmatch(line):
                self._dropped = True
                return len(line)
        if held[0] in "-*+•◦▪‣":
            if may_grow and rules.BULLET_PREFIX.fullmatch(line):
                return _WAIT
            bullet = rules.BULLET.match(line)
            if bullet or line in "-*+•":
                return bullet.end() if bullet else 1
        if held[0] == "#":
            if may_grow and rules.HEADING_PREFIX.fullmatch(line):
                return _WAIT
            heading = rules.HEADING.match(line)
            if heading or not line.strip("#"):
                return heading.end() if heading else len(line)
        if held[0] == ">":
            if may_grow and len(line) == 1:
                return _WAIT
            quote = rules.QUOTE.match(line)
            if quote and (quote.end() == 2 or len(line) == 1):
                return quote.end()
        if held[0] == "|":
            if may_grow and rules.TABLE_RULE_PREFIX.fullmatch(line):
                return _WAIT
            if "-" in line and rules.TABLE_RULE_PREFIX.fullmatch(line):
                self._dropped = True
                return len(line)
            self._in_table_row = True
            self._at_line_start = False
            return 1
        if held[0] == "[":
            if may_grow and rules.LINK_DEFINITION_PREFIX.fullmatch(line):
                return _WAIT
            if rules.LINK_DEFINITION.fullmatch(line):
                self._dropped = True
                return len(line)
        return _PASS

    def _open_fence(self, may_grow: bool) -> int:
        match = rules.FENCE.match(self._held) if "\n" in self._held else None
        if match:
            self._fence = match.group(1)
            self._dropped = True
            return match.end() - 1  # the newline stays: closing needs the start of a line
        mark = self._held[0]
        run = len(self._held) - len(self._held.lstrip(mark))
        rest = self._held[run:]
        if may_grow and (not rest or (run >= 3 and mark not in rest)):
            return _WAIT
        if run >= 3 and not may_grow and "`" not in rest:
            return len(self._held)  # a fence whose block never came
        return _PASS

    def _step_fence(self) -> int:
        """Inside a fenced block: waits for a line that closes it and drops everything else."""
        held = self._held
        end = held.find("\n", 1)
        if end < 0 and not self._final:
            return _WAIT
        line = held[1:] if end < 0 else held[1:end]
        bare = line.lstrip()
        after = bare.lstrip(self._fence[0])
        if len(bare) - len(after) >= len(self._fence) and (not after or after[0].isspace()):
            self._fence = ""
            self._at_line_start = True
            return 1 + len(line) - len(after.lstrip())  # models do put text behind the ticks
        return len(held) if end < 0 else end

    def _table_bar(self) -> None:
        """A bar between two cells becomes a comma; the bar at the end of the row goes."""
        rest = self._held[1:].lstrip(" \t")
        if not rest or rest.startswith("\n") or "\n" in self._space or not self._last:
            return
        self._space = ""
        if self._last not in ".,;:!?":
            self._emit(",")
        self._space = " "
        self._dropped = True

    def _on_bar(self) -> int:
        if self._in_table_row and not self._held[1:].strip(" \t") and not self._final:
            return _WAIT
        return self._literal("|")

    # --- inline marks -------------------------------------------------------------------------

    def _on_star(self) -> int:
        run = self._run_len("*")
        if run == _WAIT:
            return _WAIT
        prev = self._prev()
        following = self._held[run] if run < len(self._held) else " "
        if prev.isspace() and following.isspace():
            is_mark = run > 1 and not self._last.isdigit()
        elif prev.isdigit() and following.isdigit():
            is_mark = False
        elif run == 1 and prev.isalnum() and following.isalnum() and not self._open_stars:
            taken = self._intraword_star()
            if taken != _PASS:
                return taken
            is_mark = False
        elif prev.isspace() or (not prev.isalnum() and not following.isspace()):
            is_mark = True
            closes = self._open_stars > 0 and not prev.isspace() and prev in ".,;:!?)\"'"
            self._open_stars = max(0, self._open_stars - run) if closes else self._open_stars + run
        else:
            is_mark = run > 1 or self._open_stars > 0
            if self._open_stars:
                self._open_stars = max(0, self._open_stars - run)
            elif is_mark and following.isalnum():
                self._open_stars = run
        if is_mark:
            self._note_mark()
        else:
            self._emit("*" * run)
        return run

    def _intraword_star(self) -> int:
        """``un*frigging*real`` is emphasis, ``width*height`` is a product: the word decides."""
        for index, char in enumerate(self._held[1:], start=1):
            if char == "*":
                if index > 2:
                    self._open_stars = 1
                    self._note_mark()
                    return 1
                return _PASS
            if not char.isalpha():
                return _PASS
        return _PASS if self._final else _WAIT

    def _on_underscore(self) -> int:
        if "://" in self._word or (self._last and self._last in "/\\@" and not self._space):
            return self._literal("_")
        run = self._run_len("_")
        if run == _WAIT:
            return _WAIT
        prev = self._prev()
        following = self._held[run] if run < len(self._held) else " "
        opens = not following.isspace() and not prev.isalnum() and prev != "_"
        closes = self._open_underscores > 0 and not prev.isspace() and not following.isalnum()
        if closes:
            self._open_underscores = max(0, self._open_underscores - run)
        elif opens:
            self._open_underscores += run
        if opens or closes:
            self._note_mark()
        else:
            self._emit("_" * run)
        return run

    def _note_mark(self) -> None:
        self._at_line_start = False

    def _on_tilde(self) -> int:
        run = self._run_len("~")
        if run == _WAIT:
            return _WAIT
        if run != 2:
            self._emit("~" * run)
            return run
        body = self._held[2:]
        close = body.find("~~")
        if close < 0 and "\n" not in body and len(body) < _MAX_STRUCK_LEN and not self._final:
            return _WAIT
        if close > 0 and "\n" not in body[:close] and close < _MAX_STRUCK_LEN:
            self._dropped = True
            self._at_line_start = False
            return close + 4
        self._note_mark()
        return 2

    def _on_tick(self) -> int:
        run = self._run_len("`")
        if run == _WAIT:
            return _WAIT
        if self._code_ticks:
            if run == self._code_ticks:
                self._code_ticks = 0
            else:
                self._emit("`" * run)
            return run
        if run >= 3:
            # Behind other text on its line: a code span if it closes there, else a sloppy fence.
            rest = self._held[run:]
            newline, close = rest.find("\n"), rest.find("`")
            if newline < 0 and close < 0 and not self._final:
                return _WAIT
            if newline >= 0 and (close < 0 or newline < close):
                self._fence = "`" * run
                self._dropped = True
                return run + newline
        self._code_ticks = run
        self._note_mark()
        return run

    def _on_backslash(self) -> int:
        if len(self._held) < 2:
            if self._final:
                self._emit("\\")
                return 1
            return _WAIT
        if self._held[1] in _ESCAPABLE:
            self._emit(self._held[1])
            return 2
        self._emit("\\")
        return 1

    def _on_bang(self) -> int:
        if len(self._held) < 2 and not self._final:
            return _WAIT
        if self._held[1:2] == "[":
            return 1  # an image: its description is read like the text of a link
        self._emit("!")
        return 1

    def _on_bracket(self) -> int:
        held = self._held
        may_grow = not self._final and len(held) < rules.MAX_HELD_LEN
        citation = rules.CITATION.match(held)
        if citation and held[citation.end() : citation.end() + 1] != "(":
            if len(held) == citation.end() and not self._final:
                return _WAIT
            self._dropped = True
            return citation.end()
        link = rules.find_link(held, may_grow)
        if link is None:
            return _WAIT
        if link.num_taken:
            self._replace_front(link.num_taken, link.text)
            return 0
        self._emit("[")
        return 1

    def _replace_front(self, num_taken: int, text: str) -> None:
        """Puts ``text`` in the place of what was taken, to be scanned like any other text."""
        self._held = text + self._held[num_taken:]

    def _on_source_bracket(self) -> int:
        close = self._held.find("】")
        if close < 0 and not self._final and len(self._held) < rules.MAX_HELD_LEN:
            return _WAIT
        if close < 0:
            self._emit(self._held[0])
            return 1
        self._dropped = True
        return close + 1

    def _on_less(self) -> int:
        held = self._held
        may_grow = not self._final and len(held) < rules.MAX_HELD_LEN
        link = rules.AUTOLINK.match(held)
        if link:
            self._replace_front(link.end(), link.group(1))
            return 0
        tag = rules.HTML_TAG.match(held)
        if tag and rules.is_html_tag_name(tag.group(1)):
            self._dropped = True
            if tag.group(1).lower() in ("br", "p", "li", "hr", "tr"):
                self._add_space("\n")
            return tag.end()
        if may_grow and rules.may_become_tag(held):
            return _WAIT
        self._emit("<")
        return 1

    def _on_ampersand(self) -> int:
        for entity, char in rules.ENTITIES.items():
            if self._held.startswith(entity):
                self._replace_front(len(entity), "")
                if char == " ":
                    self._add_space(" ")
                else:
                    self._emit(char)
                return 0
            if entity.startswith(self._held) and not self._final:
                return _WAIT
        self._emit("&")
        return 1

    _RULES: dict[str, Callable[[SpokenText], int]] = {
        "*": _on_star,
        "_": _on_underscore,
        "~": _on_tilde,
        "`": _on_tick,
        "\\": _on_backslash,
        "!": _on_bang,
        "[": _on_bracket,
        "【": _on_source_bracket,
        "<": _on_less,
        "&": _on_ampersand,
        "|": _on_bar,
    }


def strip_markdown(text: str) -> str:
    """``text`` as a whole without its Markdown; see SpokenText."""
    stripper = SpokenText()
    return stripper.feed(text) + stripper.flush()
