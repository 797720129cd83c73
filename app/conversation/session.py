"""One caller: the listening loop, the items, and the turn that is being answered.

A session is driven from outside by its public methods (one at a time, in the order of the client's
events) and tells everything that happens through its sink. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from app.clock import Clock, MonotonicClock
from app.conversation import dialog as floor
from app.conversation.ahead import Ahead, warm
from app.conversation.events import (
    IdleTimedOut,
    InputCleared,
    InputCommitted,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemTruncated,
    Part,
    PlaybackCut,
    ResponseDone,
    Sink,
    SpeechStarted,
    SpeechStopped,
    TranscriptionCompleted,
    TranscriptionDelta,
    TranscriptionFailed,
    TurnTraced,
)
from app.conversation.hearing import HeardTurn, Hearing, untold
from app.conversation.history import History
from app.conversation.idle import PROMPT, IdleWatch
from app.conversation.ids import new_id
from app.conversation.interruptions import is_sure, lingers
from app.conversation.listener import RATE
from app.conversation.rejoin import withdrawable
from app.conversation.requests import ResponseRequest, no_active_response, response_is_active
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.tasks import Tasks
from app.conversation.transcriber import Settled
from app.conversation.turn import Turn
from app.conversation.upkeep import tend
from app.errors import ClientError
from app.logging_setup import turn_fields, turn_id
from app.observe.trace import TurnTrace
from audio import turn_end
from audio.endpoint import VoiceEnded
from llm_core import ChatMessage

log = logging.getLogger(__name__)

# No audio for so long while the caller is speaking: the network is gone, the turn is over.
_STALL_S = 1.5
# An answer is begun so long before the pause would end the turn: about what it takes to make.
_LONG_WAIT_MS = 500


class Session:
    """One conversation. See the module's docstring for how it is driven."""

    def __init__(
        self,
        services: Services,
        config: SessionConfig,
        sink: Sink,
        clock: Clock | None = None,
    ) -> None:
        self.id = new_id("sess")
        self.config = config
        self._services = services = services.for_conversation(self.id)
        self._sink = sink
        self._clock = clock or MonotonicClock()
        self._hearing = Hearing(services, config, self._clock)
        self._dialog = floor.Dialog(floor.Rules())
        self._history = History()
        self._floor = asyncio.Lock()  # one event and its actions at a time
        self._turn: Turn | None = None  # the running one
        self._turn_task: asyncio.Task[None]
        self._last_turn: Turn | None = None
        self._tasks = Tasks(self.id)
        self._ahead, self._idle = Ahead(), IdleWatch()
        self._num_commits = self._last_audio_ns = 0
        self._heard: TurnTrace | None = None  # of the spoken turn that is not answered yet
        self._follow(config)

    # --- lifecycle ---

    async def run(self) -> None:
        """Watch for audio that stops coming in mid-speech, and for silence. Until cancelled."""
        while True:
            await self._clock.sleep(_STALL_S / 4)
            now_ns = self._clock.now_ns()
            quiet_s = (now_ns - self._last_audio_ns) / 1e9
            if self._dialog.caller is not floor.Caller.SILENT and quiet_s > _STALL_S:
                await self._end_speech()
            is_quiet = self.is_idle and self._last_turn is not None
            if self._idle.is_due(self.config.turn_detection, now_ns, is_quiet=is_quiet):
                await self._speak_up(now_ns - self._idle.since_ns)

    async def _speak_up(self, silence_ns: int) -> None:
        """Nobody spoke for too long: the silence becomes an item, and is answered."""
        item, end_ms = self._hearing.take_silence(silence_ns / 1e6)
        previous = self._history.append_own(item)
        start_ms = max(0, end_ms - silence_ns // 1_000_000)
        await self._sink(IdleTimedOut(item.id, start_ms, end_ms))
        await self._tell_committed(item, previous)
        prompt = f"{self.config.instructions}\n{PROMPT}".strip()
        self._heard = None
        await self._feed(floor.ResponseRequested(ResponseRequest(instructions=prompt)))

    async def close(self) -> None:
        """Stop everything that runs for this caller; returns when nothing is left."""
        self._hearing.close()
        await self._tasks.close()
        if self._turn is not None:  # its task may have been cancelled before its first step
            await self._turn.discard()
            if self._turn.trace.end_if_open(self._clock.now_ns()):
                self._services.traces.add(self._turn.trace.to_dict())
        await self._ahead.close()

    async def update(self, config: SessionConfig) -> None:
        """Follow a changed configuration from now on. A running response keeps the old one."""
        old, self.config = self.config, config
        if old.listening != config.listening:
            async with self._floor:
                self._hearing.listener.configure(config)
                await self._forget_speech()
        self._follow(config)

    # --- the caller's audio ---

    async def append_audio(self, payload: bytes, received_ns: int) -> None:
        """Take audio in the session's input format. Raises ClientError."""
        listener = self._hearing.listener
        for samples in listener.decode(payload):
            self._last_audio_ns = self._clock.now_ns()
            for event in listener.feed(samples, received_ns):
                self._dialog.lingers = lingers(self._last_turn, self._turn)
                await self._feed(event)
            if self._dialog.caller is floor.Caller.SPEAKING:
                await self._follow_words()
            if self._dialog.is_held and is_sure(self._hearing.turn_s, self._turn):
                await self._feed(floor.InterruptionJudged(is_meant=True))
            speaking = self._dialog.caller is not floor.Caller.SILENT
            if speaking and self._hearing.turn_s > self._services.settings.max_turn_s:
                await self._end_speech()
            await asyncio.sleep(0)  # a long append must not hold up the other callers

    async def _follow_words(self) -> None:
        """Tell the words that have become certain, and let the model read them."""
        self._hearing.follow_words()
        new = self._hearing.take_stable()
        if new and self._dialog.is_held and self._hearing.means_to_stop(self._last_turn):
            await self._feed(floor.InterruptionJudged(is_meant=True))
        if new and self.config.transcribe:
            await self._sink(TranscriptionDelta(self._hearing.item_id, new))
        if self._ahead.is_idle and (words := self._hearing.take_prompt()):
            said = [*self._prompt(), ChatMessage("user", words)]
            self._ahead.do(warm(self._services.engine, self.config, said))

    async def commit_audio(self) -> None:
        """The client ends the turn by hand. Raises ClientError when there is nothing to commit."""
        self._hearing.check_commit()
        await self._feed(floor.AudioCommitted())

    async def clear_audio(self) -> None:
        """Throw the buffered audio away."""
        async with self._floor:
            self._hearing.listener.forget()
            await self._forget_speech()
        await self._sink(InputCleared())

    # --- items ---

    async def add_item(self, item: Item, previous_item_id: str | None = None) -> None:
        """Insert a message. Raises ClientError."""
        if item.id == self._hearing.item_id:
            raise ClientError(
                f"the id {item.id!r} belongs to the caller's turn in progress",
                code="item_create_duplicate_item_id",
                param="item.id",
            )
        previous = self._history.add(item, previous_item_id)
        self._heard = None
        await self._sink(ItemAdded(item, previous))
        await self._sink(ItemDone(item, previous))

    @property
    def is_idle(self) -> bool:
        """Nobody speaks, nothing is being answered, and what was said has been heard."""
        is_heard = self._last_turn is None or not self._last_turn.is_playing
        return (
            self._dialog.caller is floor.Caller.SILENT
            and not self._dialog.has_response
            and is_heard
        )

    @property
    def history(self) -> History:
        """All items."""
        return self._history

    def get_item(self, item_id: str) -> Item:
        """Raises ClientError when there is no such item."""
        return self._history.get(item_id)

    async def delete_item(self, item_id: str) -> None:
        """Raises ClientError when there is no such item."""
        self._history.delete(item_id)
        await self._sink(ItemDeleted(item_id))

    async def truncate_item(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Cut a spoken answer to what the client says was heard. Raises ClientError."""
        self._history.truncate(item_id, content_index, audio_end_ms)
        await self._sink(ItemTruncated(item_id, content_index, audio_end_ms))

    # --- responses ---

    async def create_response(self, request: ResponseRequest | None = None) -> None:
        """Answer what was said so far. Raises ClientError while a response is active."""
        if self._dialog.has_response or self._turn is not None:
            raise response_is_active()
        # A turn whose words were known before the client asked has waited for the client, not for
        # us: the time since then is nobody's latency.
        self._heard = None
        await self._feed(floor.ResponseRequested(request or ResponseRequest()))

    async def cancel_response(self, response_id: str | None = None) -> None:
        """Stop the active response. Raises ClientError when there is none, or another one."""
        turn = self._turn
        active = turn is not None and response_id in (None, turn.response.id)
        if not active and not (self._dialog.has_response and turn is None and response_id is None):
            raise no_active_response(response_id)
        await self._feed(floor.CancelRequested())

    # --- the floor ---

    async def _feed(self, event: floor.DialogEvent) -> None:
        async with self._floor:
            for action in self._dialog.feed(event):
                await self._perform(action)

    async def _perform(self, action: floor.Action) -> None:
        match action:
            case floor.AnnounceSpeech():
                await self._announce(action.start_sample)
            case floor.StopResponse():
                await self._stop_response(action.reason)
            case floor.HoldResponse():
                assert self._turn is not None, "an answer that sounds is running"
                if self._turn.hold():
                    await self._silence(may_go_on=True)
            case floor.ReleaseResponse():
                if self._turn is not None:
                    self._tasks.start(self._turn.release())
            case floor.DropSpeech():
                await self._drop_speech()
            case floor.CutPlayback():
                await self._cut_playback()
            case floor.TryTranscript():
                early = self._hearing.try_words(action.last_voiced_sample)
                self._ahead.do(self._answer_early(early, action.last_voiced_sample))
            case floor.DropTranscript():
                self._hearing.drop_words()
                await self._ahead.discard()
            case floor.RejoinTurn():
                await self._rejoin()
            case floor.CommitTurn():
                await self._commit(action.heard_end)
            case floor.StartResponse():
                assert action.request is None or isinstance(action.request, ResponseRequest)
                await self._start_response(action.request or ResponseRequest())

    async def _announce(self, start_sample: int) -> None:
        await self._ahead.discard()
        self._idle.caller_spoke()
        start_ms = self._hearing.begin(start_sample)
        await self._sink(SpeechStarted(self._hearing.item_id, start_ms))
        # While the caller speaks the engine has time to read what it has not read yet.
        self._ahead.do(warm(self._services.engine, self.config, self._prompt()))

    async def _drop_speech(self) -> None:
        """It was no turn ("mhm"): the client hears that the voice is gone, and that is all."""
        end_ms = self._hearing.drop_turn()
        await self._ahead.discard()
        await self._sink(SpeechStopped(self._hearing.item_id, end_ms))

    async def _stop_response(self, reason: str) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.stop(reason)
            await self._silence()
            await asyncio.wait([self._turn_task])
        else:
            await self._cut_playback()

    async def _rejoin(self) -> None:
        """The caller goes on with the turn that was taken for over: it and its answer vanish."""
        ids = withdrawable(self._history, self._hearing.last, self._turn or self._last_turn)
        if ids and self._turn is not None:
            self._turn.response.is_withdrawn = True
        await self._stop_response("turn_detected")
        if ids:
            self._num_commits += 1  # nobody waits for the words of the first half any more
            self._heard = None
            self._history.withdraw(ids)
            self._hearing.rejoin()
            for item_id in ids:
                await self._sink(ItemDeleted(item_id))

    async def _cut_playback(self) -> None:
        if self._last_turn is not None:  # it has just ended by itself, but may still sound
            self._last_turn.cut_to_heard()
            await self._silence()

    async def _silence(self, *, may_go_on: bool = False) -> None:
        self._hearing.note_silence()
        await self._sink(PlaybackCut(may_go_on))

    async def _commit(self, heard_end: VoiceEnded | None) -> None:
        heard = self._hearing.take(heard_end, self.id)
        self._num_commits += 1
        item = heard.item
        previous = self._history.append_own(item)
        for evicted in self._history.take_evicted():
            await self._sink(ItemDeleted(evicted))
        if heard_end:
            await self._sink(SpeechStopped(item.id, heard_end.last_voiced_sample * 1000 // RATE))
        await self._tell_committed(item, previous)
        self._tasks.start(self._settle(heard, self._num_commits))

    async def _tell_committed(self, item: Item, previous_id: str | None) -> None:
        await self._sink(InputCommitted(item.id, previous_id))
        await self._sink(ItemAdded(item, previous_id))
        await self._sink(ItemDone(item, previous_id))

    async def _settle(self, heard: HeardTurn, commit: int) -> None:
        item, trace = heard.item, heard.trace
        part = item.content[0]
        if error := await heard.settle(self._clock):
            self._services.traces.add(trace.to_dict())
            await self._sink(TranscriptionFailed(item.id, error.code, error.message))
        elif self.config.transcribe:
            await self._tell_transcript(item.id, part, heard.told)
        # Of turns in quick succession only the last one is answered (with all that was said).
        if commit == self._num_commits:
            self._heard = trace
            await self._feed(floor.TranscriptReady(bool(part.text)))
            if not self._dialog.has_response:
                await self._ahead.discard()

    async def _tell_transcript(self, item_id: str, part: Part, told: str) -> None:
        text = part.text or ""
        if rest := untold(told, text):
            await self._sink(TranscriptionDelta(item_id, rest))
        await self._sink(TranscriptionCompleted(item_id, text, part.audio_ms / 1000))

    async def _start_response(self, request: ResponseRequest) -> None:
        if self._turn is not None or self._dialog.bot is not floor.Bot.THINKING:
            return  # the floor was lost while this was on its way
        heard, self._heard = self._heard, None
        turn = None
        if request == ResponseRequest():
            turn = await self._ahead.take(self.config, self._prompt())
        else:
            await self._ahead.discard()
        turn = turn or self._make_turn(request)
        if heard is not None:
            turn.trace.join(heard)
        else:
            turn.trace.begin_typed(self._clock.now_ns())
            if self._services.settings.record:
                turn.trace.record()
        turn.trace.facts.update(self._ahead.take_wasted())
        turn.trace.facts["wasted_transcripts"] = self._hearing.take_num_dropped()
        turn.on_audio_started = partial(self._on_audio_started, turn)
        turn.on_sound = self._hearing.note_sound
        self._turn = self._last_turn = turn
        self._turn_task = self._tasks.start(self._run_turn(turn))

    def _make_turn(
        self, request: ResponseRequest, messages: list[ChatMessage] | None = None
    ) -> Turn:
        config = request.applied_to(self.config)
        if messages is None:
            messages = request.messages(self._history, config, self._services.tools)
        response = request.response(config)
        trace = TurnTrace(new_id("turn"), self.id, response.id)
        return Turn(
            self._services,
            self._clock,
            self._sink,
            self._history,
            config,
            messages,
            response,
            trace,
            prefilled=self._ahead.work,
        )

    async def _run_turn(self, turn: Turn) -> None:
        turn_id.set(turn.trace.turn_id)
        try:
            await turn.run()
        finally:
            # Also of a turn that the end of the call cuts short.
            traced = turn.trace.to_dict()
            self._services.traces.add(traced, turn.trace.audio)
        actions: list[floor.Action] = []
        # A stopped turn has given up the floor already; another one may have it by now. The floor
        # is free before the client hears of the end, so that it may ask again at once.
        if self._turn is turn:
            self._turn = None
            actions = self._dialog.feed(floor.ResponseFinished())
            if self._ahead.is_idle:
                self._ahead.do(tend(self._services, self.config, self._history))
        await self._sink(ResponseDone(turn.response))
        log.info("turn ended", extra=turn_fields(self._services.settings, traced))
        if self.config.send_traces:
            await self._sink(TurnTraced(traced))
        if actions:  # else whoever stopped this turn holds the floor and waits for us
            async with self._floor:
                for action in actions:
                    await self._perform(action)

    def _on_audio_started(self, turn: Turn) -> None:
        if self._turn is turn:
            self._dialog.feed(floor.AudioStarted())

    # --- ahead of certainty ---

    async def _answer_early(self, early: asyncio.Task[Settled], last_voiced: int) -> None:
        """The voice pauses: if there are words, begin to answer them; nobody hears it yet."""
        start = self._hearing.start_sample
        heard = (await asyncio.shield(early)).transcript
        if self._dialog.is_held and self._dialog.caller is floor.Caller.MAYBE_FINISHED:
            await self._feed(
                floor.InterruptionJudged(self._hearing.means_to_stop(self._last_turn, heard.text))
            )
        if self._dialog.caller is not floor.Caller.MAYBE_FINISHED:
            return
        if self._hearing.start_sample < start:  # the words were only the second half of a turn
            early = self._hearing.try_words(last_voiced)
            heard = (await asyncio.shield(early)).transcript
        said = [*self._prompt(), ChatMessage("user", words := heard.text)]
        # After a whole sentence most likely it is over: the answer need not wait for the judgement.
        is_whole = turn_end.judge(words) in turn_end.FINISHED
        answer = await self._begin_answer(said) if is_whole else None
        if answer is not None:
            await answer.until_first_token()  # else the model would read the same words twice
        events, left_ms = await self._hearing.judge_pause(said, last_voiced, heard)
        for event in events:
            await self._feed(event)
        if answer is None and left_ms > _LONG_WAIT_MS:
            # Most likely the caller goes on: no work for nothing until the wait is nearly over.
            await self._clock.sleep((left_ms - _LONG_WAIT_MS) / 1000)
        if answer is None and words:
            answer = await self._begin_answer(said)
            if answer is None and self._dialog.caller is floor.Caller.MAYBE_FINISHED:
                await warm(self._services.engine, self.config, said)

    async def _begin_answer(self, said: list[ChatMessage]) -> Turn | None:
        """Hold an answer to ``said``, if it may be wanted and there is time for it."""
        async with self._floor:
            # The caller may have gone on, or finished, in the meantime.
            if self._dialog.caller is not floor.Caller.MAYBE_FINISHED:
                return None
            wanted = self._services.settings.eager_reply and self._dialog.will_answer
            if not wanted or not self._services.load.may_speculate():
                return None
            answer = self._make_turn(ResponseRequest(), said)
            await self._ahead.hold(answer)
            return answer

    # --- helpers ---

    def _prompt(self) -> list[ChatMessage]:
        return ResponseRequest().messages(self._history, self.config, self._services.tools)

    def _follow(self, config: SessionConfig) -> None:
        self._dialog.rules = floor.Rules.of(config.turn_detection)
        self._hearing.follow(config)

    async def _forget_speech(self) -> None:
        actions = self._dialog.forget_caller()
        self._hearing.forget()
        await self._ahead.discard()
        for action in actions:
            await self._perform(action)

    async def _end_speech(self) -> None:
        """End the turn though no silence was heard: audio stopped coming, or it is too long."""
        await self._feed(self._hearing.end_now())
