"""Who has the floor: a pure state machine, fed with events, answering with actions.

No I/O, no clock, no tasks: ``TurnTaking.feed(event)`` returns the actions that the session performs
now, in order.
The caller's side and the bot's side move independently (a caller may speak while the bot speaks),
and ``TurnTaking.phase`` names the six situations that a person would name::

    LISTENING -> CALLER_SPEAKING <-> MAYBE_FINISHED -> THINKING -> SPEAKING -> LISTENING
                        ^                                 |           |
                        +---------- INTERRUPTED <---------+-----------+
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from app.conversation.session_config import TurnDetection
from audio.endpointing import VoiceEnded, VoiceEvent, VoicePaused, VoiceResumed, VoiceStarted
from audio.frame import SPEECH_RATE


class CallerState(Enum):
    """What the caller is doing."""

    SILENT = "silent"
    SPEAKING = "speaking"
    MAYBE_FINISHED = "maybe_finished"


class AssistantState(Enum):
    """What the bot is doing. TRANSCRIBING: a reply is wanted as soon as the words are known."""

    IDLE = "idle"
    TRANSCRIBING = "transcribing"
    THINKING = "thinking"
    SPEAKING = "speaking"


class Phase(Enum):
    """The situation as a whole, for logs and for people."""

    LISTENING = "listening"
    CALLER_SPEAKING = "caller_speaking"
    MAYBE_FINISHED = "maybe_finished"
    THINKING = "thinking"
    SPEAKING = "speaking"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """The part of the session's configuration that decides who may do what."""

    create_response: bool = True
    interrupt_response: bool = True
    judge_interruptions: bool = False
    """A voice first only holds the answer; what was said decides whether it is stopped."""
    rejoin_turns: bool = False
    """Who goes on soon after the end of a turn had not finished it: both are one turn."""

    @classmethod
    def of(cls, detection: TurnDetection | None) -> TurnPolicy:
        """What the session's turn detection asks for; without one the defaults."""
        if detection is None:
            return cls()
        is_semantic = detection.kind == "semantic_vad"
        rejoins = is_semantic and detection.create_response and detection.interrupt_response
        return cls(detection.create_response, detection.interrupt_response, is_semantic, rejoins)


# --- events beside the endpointer's own (VoiceStarted, VoicePaused, VoiceResumed, VoiceEnded) ---


@dataclass(frozen=True, slots=True)
class AudioCommitted:
    """The client ended the turn by hand."""


@dataclass(frozen=True, slots=True)
class TranscriptReady:
    """The words of the turn committed last are known; ``has_words`` False: nothing was said."""

    has_words: bool


@dataclass(frozen=True, slots=True)
class ResponseRequested:
    """The client asks for a response. ``request`` says which; the dialog only carries it."""

    request: object = None


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The client asks to stop the response."""


@dataclass(frozen=True, slots=True)
class AudioStarted:
    """The first audible sample of the reply went out."""


@dataclass(frozen=True, slots=True)
class ResponseFinished:
    """The reply has been sent whole, or has failed."""


@dataclass(frozen=True, slots=True)
class InterruptionJudged:
    """What the caller says while the answer is held: is it meant to stop it?"""

    is_meant: bool


DialogEvent = (
    VoiceEvent
    | AudioCommitted
    | TranscriptReady
    | ResponseRequested
    | CancelRequested
    | AudioStarted
    | ResponseFinished
    | InterruptionJudged
)


# --- actions ---


@dataclass(frozen=True, slots=True)
class AnnounceSpeech:
    """Tell the client that the caller's voice began; ``start_sample`` includes the padding."""

    start_sample: int


@dataclass(frozen=True, slots=True)
class StopResponse:
    """Stop audio, LLM and TTS of the running response and cut history to what was heard."""

    reason: str


@dataclass(frozen=True, slots=True)
class PausePlayback:
    """Be silent, and keep the answer: it may go on where it stopped."""


@dataclass(frozen=True, slots=True)
class ResumePlayback:
    """It was no interruption: go on where the answer stopped."""


@dataclass(frozen=True, slots=True)
class DropSpeech:
    """What the caller said is no turn: forget it."""


@dataclass(frozen=True, slots=True)
class CutPlayback:
    """Cut history to what was heard of audio that still plays after its response was done."""


@dataclass(frozen=True, slots=True)
class TryTranscript:
    """The turn may be over: transcribe and prefill now, in hope."""

    last_voiced_sample: int


@dataclass(frozen=True, slots=True)
class DropTranscript:
    """The caller goes on: what was tried is void."""


@dataclass(frozen=True, slots=True)
class MergeTurns:
    """The caller goes on with the turn that was taken for over: stop and withdraw what answers it,
    and go on with it. Should something forbid that, stop the response as ``turn_detected``."""


@dataclass(frozen=True, slots=True)
class CommitTurn:
    """The turn is over: make it an item and get its words.

    ``heard_end``: how the end was heard; None when the client committed by hand.
    """

    heard_end: VoiceEnded | None


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Answer now. ``request`` is what the client asked for; None when the turn itself asks."""

    request: object = None


Action = (
    AnnounceSpeech
    | StopResponse
    | PausePlayback
    | ResumePlayback
    | DropSpeech
    | CutPlayback
    | TryTranscript
    | DropTranscript
    | MergeTurns
    | CommitTurn
    | StartResponse
)


# Who speaks again so soon after falling silent goes on: nobody reacts to an answer before half a
# second of it was heard.
_REJOIN_SAMPLES = SPEECH_RATE * 1_200 // 1000
# A source of noise must not keep a turn from ever being answered.
_MAX_REJOINS = 2


class Words(Enum):
    """What is known of the turn committed last. No turn yet counts as KNOWN."""

    PENDING = "pending"
    NONE = "none"
    KNOWN = "known"


class TurnTaking:
    """The state machine of one conversation."""

    def __init__(self, rules: TurnPolicy) -> None:
        self.rules = rules
        self.caller = CallerState.SILENT
        self.bot = AssistantState.IDLE
        self._words = Words.KNOWN
        self._interrupted = False
        self.is_held = False
        """An answer is held until it is known whether the caller means to stop it."""
        self.lingers = False
        """The last answer is sent whole and still sounds: a murmur over it is no turn. Whoever
        feeds a ``VoiceStarted`` says so."""
        # The client asked for the coming response itself, so it comes even without words.
        self._asked: ResponseRequested | None = None
        # A turn ended while a response was running that it must not interrupt: answer it next.
        self._reply_next = False
        # A reply was stopped before a word of it was heard. If what stopped it turns out to be
        # no speech (a clap, a cough), the caller is still owed that reply.
        self._owes_reply = False
        # Where the voice of the turn that is being answered ended; None: nobody can go on with it.
        self._ended_at: int | None = None
        self._num_rejoins = 0
        self._goes_on = False  # the voice that holds the answer goes on with that turn

    @property
    def phase(self) -> Phase:
        """The situation as a whole."""
        if self.caller is CallerState.MAYBE_FINISHED:
            return Phase.MAYBE_FINISHED
        if self.caller is CallerState.SPEAKING:
            return Phase.INTERRUPTED if self._interrupted else Phase.CALLER_SPEAKING
        if self.bot is AssistantState.SPEAKING:
            return Phase.SPEAKING
        return Phase.LISTENING if self.bot is AssistantState.IDLE else Phase.THINKING

    @property
    def has_response(self) -> bool:
        """A response is running, or will as soon as the transcript is there."""
        return self.bot is not AssistantState.IDLE

    @property
    def will_answer(self) -> bool:
        """If the turn ended now, and had words, a response would start at once."""
        return self.bot is AssistantState.IDLE and self.rules.create_response

    def feed(self, event: DialogEvent) -> list[Action]:
        """Move on and say what to do. Events that mean nothing now are ignored."""
        match event:
            case VoiceStarted():
                return self._on_voice_started(event)
            case VoicePaused() if self.caller is CallerState.SPEAKING:
                self.caller = CallerState.MAYBE_FINISHED
                return [TryTranscript(event.last_voiced_sample)]
            case VoiceResumed() if self.caller is CallerState.MAYBE_FINISHED:
                self.caller = CallerState.SPEAKING
                return [DropTranscript()]
            case InterruptionJudged() if self.is_held:
                return self._on_judged(event)
            case VoiceEnded() if self.caller is not CallerState.SILENT:
                stop = self._stop_held()
                return [*stop, *self._commit(event, respond=self.rules.create_response)]
            case AudioCommitted():
                return [*self._stop_held(), *self._commit(None, respond=False)]
            case TranscriptReady():
                self._words = Words.KNOWN if event.has_words else Words.NONE
                return self._on_transcript()
            case ResponseRequested() if self.bot is AssistantState.IDLE:
                self._asked = event
                self._ended_at = None
                return self._respond()
            case CancelRequested() if self.has_response:
                self._owes_reply = False
                return self._stop("client_cancelled")
            case AudioStarted() if self.bot is AssistantState.THINKING:
                self.bot = AssistantState.SPEAKING
                self._owes_reply = False
                return []
            case ResponseFinished() if self.bot in (
                AssistantState.THINKING,
                AssistantState.SPEAKING,
            ):
                self.bot = AssistantState.IDLE
                self.is_held = False
                return self._respond() if self._reply_next else []
            case _:
                return []

    def forget_caller(self) -> list[Action]:
        """The caller's audio was thrown away: nobody is speaking, as far as we know."""
        self.caller = CallerState.SILENT
        self._interrupted = False
        was_held, self.is_held = self.is_held, False
        return [ResumePlayback()] if was_held else []

    def _on_voice_started(self, event: VoiceStarted) -> list[Action]:
        self.caller = CallerState.SPEAKING
        announce = AnnounceSpeech(event.start_sample)
        self._goes_on = self._may_go_on(event.onset_sample)
        if not self._goes_on:
            self._num_rejoins = 0
        if not self.rules.interrupt_response:
            return [announce]
        if self._goes_on and self.bot is not AssistantState.SPEAKING:
            return [*self._rejoin(), announce]
        if self.bot is AssistantState.IDLE and self.lingers and self.rules.judge_interruptions:
            self.is_held = self._interrupted = True
            return [announce]  # what is left sounds on, until the words are known
        if self.bot is AssistantState.IDLE:
            return [announce, CutPlayback()]
        self._owes_reply = self.bot is not AssistantState.SPEAKING
        self._interrupted = True
        if self.rules.judge_interruptions and self.bot is AssistantState.SPEAKING:
            self.is_held = True
            return [announce, PausePlayback()]
        return [announce, *self._stop("turn_detected")]

    def _on_judged(self, event: InterruptionJudged) -> list[Action]:
        if event.is_meant:
            return self._stop_held()
        self.is_held = self._interrupted = self._goes_on = False
        self.caller = CallerState.SILENT
        return [DropSpeech(), ResumePlayback()]

    def _stop_held(self) -> list[Action]:
        if not self.is_held:
            return []
        if self._goes_on:
            return self._rejoin()
        if self.bot is AssistantState.IDLE:
            self.is_held = False
            return [CutPlayback()]
        return self._stop("turn_detected")

    def _may_go_on(self, onset_sample: int) -> bool:
        return (
            self.rules.rejoin_turns
            and self._ended_at is not None
            and onset_sample - self._ended_at <= _REJOIN_SAMPLES
            and self._num_rejoins < _MAX_REJOINS
        )

    def _rejoin(self) -> list[Action]:
        self._stop("turn_detected")
        self._goes_on = self._interrupted = self._owes_reply = False
        self._ended_at = None
        self._num_rejoins += 1
        return [MergeTurns()]

    def _stop(self, reason: str) -> list[Action]:
        self.is_held = False
        # While only a transcript is awaited there is nothing running yet that could be stopped.
        running = self.bot in (AssistantState.THINKING, AssistantState.SPEAKING)
        self.bot = AssistantState.IDLE
        self._asked, self._reply_next = None, False
        return [StopResponse(reason)] if running else []

    def _commit(self, heard_end: VoiceEnded | None, *, respond: bool) -> list[Action]:
        self._ended_at = heard_end.last_voiced_sample if heard_end and respond else None
        self.caller = CallerState.SILENT
        self._interrupted = False
        self._words = Words.PENDING
        if respond and self.bot is AssistantState.IDLE:
            self.bot = AssistantState.TRANSCRIBING
        elif respond and self.bot is not AssistantState.TRANSCRIBING:
            self._reply_next = True
        return [CommitTurn(heard_end)]

    def _on_transcript(self) -> list[Action]:
        silent = self._words is Words.NONE
        if (
            silent
            and self._owes_reply
            and self.bot is AssistantState.IDLE
            and self.caller is CallerState.SILENT
        ):
            self.bot = AssistantState.TRANSCRIBING
        return self._respond() if self.bot is AssistantState.TRANSCRIBING else []

    def _respond(self) -> list[Action]:
        """Answer the last turn: now, when its words are known, or not at all if it has none."""
        self._reply_next = False
        if self._words is Words.PENDING:
            self.bot = AssistantState.TRANSCRIBING
            return []
        asked, self._asked = self._asked, None
        wanted = self._words is Words.KNOWN or asked is not None or self._owes_reply
        self._owes_reply = False
        self.bot = AssistantState.THINKING if wanted else AssistantState.IDLE
        return [StartResponse(asked.request if asked else None)] if wanted else []
