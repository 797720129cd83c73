"""What a phone provider sends: right messages in any order, and wrong ones of every kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from app.clients.phone_providers import PEERS, Mark, Message, Order, new_call_id
from audio.codecs import encode
from tests.support.fuzz_events import EventMaker


class PhoneMaker:
    """Messages of one stream of ``provider``. Marks that came are given back, some twice."""

    def __init__(self, provider: str, rng: random.Random) -> None:
        self.provider = provider
        self.rng = rng
        self.peer = PEERS[provider](new_call_id(provider), "")
        self._marks: list[Message] = []
        self._number = 0
        self._values = EventMaker(rng)

    def take(self, message: Message) -> None:
        """What the server has sent. Raises PeerError when it is not what the provider takes."""
        order: Order = self.peer.read(message)
        if isinstance(order, Mark):
            self._marks = [*self._marks[-20:], order.reply]

    def messages(self) -> list[Message]:
        """The next ones to send."""
        kind = self.rng.random()
        if kind < 0.08:
            return [self._sendable(self.rng.randbytes(self.rng.randrange(700)))]
        if kind < 0.16:
            return [self._sendable(json.dumps(self._values.value(4)))]
        right = self._right()
        return [self._spoiled(m) for m in right] if kind < 0.5 else right

    def _right(self) -> list[Message]:
        peer, rng = self.peer, self.rng
        choices: list[Callable[[], list[Message]]] = [
            peer.hello,
            lambda: [self._sound(0.3) for _ in range(rng.randrange(1, 30))],
            lambda: [self._sound(0.0) for _ in range(rng.randrange(1, 40))],
            lambda: [peer.key(rng.choice("0123456789*#"))],
            lambda: [m for m in [peer.goodbye()] if m is not None and rng.random() < 0.2],
            lambda: rng.sample(self._marks, min(len(self._marks), 2)),
        ]
        return rng.choice(choices)()

    def _sound(self, level: float) -> Message:
        size = self.peer.format.rate * self.peer.frame_ms // 1000
        wave = np.sin(np.arange(size) * 0.2).astype(np.float32) * np.float32(level)
        self._number += self.rng.choice((1, 1, 1, 1, 0, 2, -3, 1_000_000))
        return self.peer.audio(encode(wave, self.peer.format), max(0, self._number))

    def _spoiled(self, message: Message) -> Message:
        if isinstance(message, str):
            event: dict[str, Any] = json.loads(message)
            self._values.spoil(event)
            return json.dumps(event)
        at = self.rng.randrange(len(message) + 1)
        how = self.rng.random()
        if how < 0.4:
            return message[:at]
        if how < 0.7:
            return message[:at] + self.rng.randbytes(self.rng.randrange(4)) + message[at + 1 :]
        return message + self.rng.randbytes(self.rng.randrange(1, 40))

    def _sendable(self, message: Message) -> Message:
        """AudioSocket has no text."""
        if self.provider == "audiosocket" and isinstance(message, str):
            return message.encode("utf-8", "replace")
        return message
