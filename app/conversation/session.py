"""One caller: the listening loop, the items, and when to answer.

A session is driven from outside by its public methods (one at a time, in the order of the client's
events) and tells everything that happens through its sink. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio

from app.clock import Clock, MonotonicClock
from app.conversation import turn_taking as floor
from app.conversation.events import (
    IdleTimedOut,
    InputCleared,
    InputCommitted,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemTruncated,
    Sink,
    SpeechStarted,
    SpeechStopped,
    TranscriptionDelta,
    TranscriptionFailed,
)
from app.conversation.history import History
from app.conversation.idle_timeout import PROMPT, IdleTimeout
from app.conversation.ids import new_id
from app.conversation.input.audio_input import RATE
from app.conversation.input.barge_in import in_tail_grace, is_confident
from app.conversation.input.merge_turns import mergeable_items
from app.conversation.input.streaming_transcriber import FinalTranscript
from app.conversation.input.user_turn import CommittedTurn, UserTurn
from app.conversation.input.word_timestamps import WordTimestamps
from app.conversation.response.eager import EagerGeneration, warm
from app.conversation.response.manager import ResponseManager
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.response.spec import ResponseRequest, no_active_response, response_is_active
from app.conversation.response.tool_constraints import prepare_guides
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.tasks import Tasks
from app.errors import ClientError
from app.observe import TurnTrace
from audio.endpointing import VoiceEnded, semantic
from llm_core import ChatMessage

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
        self._services = services.for_conversation(self.id)
        self._sink = sink
        self._clock = clock or MonotonicClock()
        self._tasks = Tasks(self.id)
        self._hearing = UserTurn(self._services, config, self._clock)
        self._dialog = floor.TurnTaking(floor.TurnPolicy())
        self._floor = asyncio.Lock()  # one event and its actions at a time
        self._history = History()
        self._ahead = EagerGeneration()
        self._word_times = WordTimestamps(
            self._services.recognition, sink, self._clock, self._tasks
        )
        self._responses = ResponseManager(
            self.id,
            self._services,
            config,
            sink,
            self._clock,
            self._tasks,
            history=self._history,
            hearing=self._hearing,
            ahead=self._ahead,
            dialog=self._dialog,
            word_times=self._word_times,
            perform=self._perform_in_turn,
        )
        self._idle = IdleTimeout()
        self._last_audio_ns = 0
        self._num_commits = 0
        self._heard: TurnTrace | None = None  # of the spoken turn that is not answered yet
        self._follow(config)

    # --- lifecycle ---

    async def run(self) -> None:
        """Watch for audio that stops coming in mid-speech, and for silence. Until cancelled."""
        if self.config.instructions != self._services.settings.instructions:
            self._read_ahead()  # those of the settings are known since the first call
        while True:
            await self._clock.sleep(_STALL_S / 4)
            now_ns = self._clock.now_ns()
            quiet_s = (now_ns - self._last_audio_ns) / 1e9
            if self._dialog.caller is not floor.CallerState.SILENT and quiet_s > _STALL_S:
                await self._end_speech()
            is_quiet = self.is_idle and self._responses.last is not None
            if self._idle.is_due(self.config.turn_detection, now_ns, is_quiet=is_quiet):
                await self._speak_up(now_ns - self._idle.since_ns)

    async def _speak_up(self, silence_ns: int) -> None:
        """Nobody spoke for too long: the silence becomes an item, and is answered."""
        item, end_ms = self._hearing.commit_silence(silence_ns / 1e6)
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
        await self._responses.close()
        await self._ahead.close()

    async def prepare_tools(self, config: SessionConfig, param: str) -> None:
        """Ready the engine for the tools of ``config``, which may come into force next. Raises
        ClientError, naming ``param``, when those of the client cannot be followed."""
        services = self._services
        await prepare_guides(services.engine, services.tools, config, param)

    async def update(self, config: SessionConfig) -> None:
        """Follow a changed configuration from now on. A running response keeps the old one."""
        old, self.config = self.config, config
        self._responses.follow(config)
        if old.listening != config.listening:
            async with self._floor:
                self._hearing.audio_input.configure(config)
                await self._forget_speech()
        self._follow(config)
        if old.reading != config.reading:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Long instructions take seconds to read: the next turn need not wait for that, nor for
        those that were read before and are not wanted any more."""
        is_free = self._ahead.is_idle or self._dialog.caller is floor.CallerState.SILENT
        if self._responses.running is None and is_free:
            self._ahead.do(warm(self._services.engine, self.config, self._responses.prompt()))

    # --- the caller's audio ---

    async def append_audio(self, payload: bytes, received_ns: int) -> None:
        """Take audio in the session's input format. Raises ClientError."""
        listener, responses = self._hearing.audio_input, self._responses
        for samples in listener.decode(payload):
            self._last_audio_ns = self._clock.now_ns()
            for event in listener.process_audio(samples, received_ns):
                self._dialog.lingers = in_tail_grace(responses.last, responses.running)
                await self._feed(event)
            if self._dialog.caller is floor.CallerState.SPEAKING:
                await self._follow_words()
            if self._dialog.is_held and is_confident(self._hearing.turn_s, responses.running):
                await self._feed(floor.InterruptionJudged(is_meant=True))
            speaking = self._dialog.caller is not floor.CallerState.SILENT
            if speaking and self._hearing.turn_s > self._services.settings.max_turn_s:
                await self._end_speech()
            await asyncio.sleep(0)  # a long append must not hold up the other callers

    async def _follow_words(self) -> None:
        """Tell the words that have become certain, and let the model read them."""
        self._hearing.update_partial()
        new = self._hearing.take_stable_text()
        if new and self._dialog.is_held and self._hearing.is_barge_in(self._responses.last):
            await self._feed(floor.InterruptionJudged(is_meant=True))
        if new and self.config.transcribe:
            await self._sink(TranscriptionDelta(self._hearing.item_id, new))
        if self._ahead.is_idle and (words := self._hearing.take_prefill_text()):
            said = [*self._responses.prompt(), ChatMessage("user", words)]
            self._ahead.do(warm(self._services.engine, self.config, said))

    async def commit_audio(self) -> None:
        """The client ends the turn by hand. Raises ClientError when there is nothing to commit."""
        self._hearing.check_commit()
        await self._feed(floor.AudioCommitted())

    async def clear_audio(self) -> None:
        """Throw the buffered audio away."""
        async with self._floor:
            self._hearing.audio_input.clear()
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
        return (
            self._dialog.caller is floor.CallerState.SILENT
            and not self._dialog.has_response
            and not self._responses.is_playing
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

    async def truncate_item(
        self, item_id: str, content_index: int, audio_end_ms: int, *, may_extend: bool = True
    ) -> None:
        """Cut a spoken answer to what was heard, as in ``History.truncate``. Raises ClientError."""
        self._history.truncate(item_id, content_index, audio_end_ms, may_extend=may_extend)
        await self._sink(ItemTruncated(item_id, content_index, audio_end_ms))

    # --- responses ---

    async def create_response(self, request: ResponseRequest | None = None) -> None:
        """Answer what was said so far. Raises ClientError while a response is active."""
        if self._dialog.has_response or self._responses.running is not None:
            raise response_is_active()
        # A turn whose words were known before the client asked has waited for the client, not for
        # us: the time since then is nobody's latency.
        self._heard = None
        await self._feed(floor.ResponseRequested(request or ResponseRequest()))

    async def cancel_response(self, response_id: str | None = None) -> None:
        """Stop the active response. Raises ClientError when there is none, or another one."""
        running = self._responses.running
        if running is not None:
            is_active = response_id in (None, running.response.id)
        else:  # one that waits for the words of its turn has no id yet
            is_active = response_id is None and self._dialog.has_response
        if not is_active:
            raise no_active_response(response_id)
        await self._feed(floor.CancelRequested())

    # --- the floor ---

    async def _feed(self, event: floor.DialogEvent) -> None:
        async with self._floor:
            await self._perform_all(self._dialog.feed(event))

    async def _perform_in_turn(self, actions: list[floor.Action]) -> None:
        async with self._floor:
            await self._perform_all(actions)

    async def _perform_all(self, actions: list[floor.Action]) -> None:
        for action in actions:
            await self._perform(action)

    async def _perform(self, action: floor.Action) -> None:
        match action:
            case floor.AnnounceSpeech():
                await self._announce(action.start_sample)
            case floor.StopResponse():
                await self._responses.stop(action.reason)
            case floor.PausePlayback():
                await self._responses.hold()
            case floor.ResumePlayback():
                self._responses.release()
            case floor.DropSpeech():
                await self._drop_speech()
            case floor.CutPlayback():
                await self._responses.cut_playback()
            case floor.TryTranscript():
                early = self._hearing.start_early_transcript(action.last_voiced_sample)
                self._ahead.do(self._answer_early(early, action.last_voiced_sample))
            case floor.DropTranscript():
                self._hearing.discard_early_transcript()
                await self._ahead.discard()
            case floor.MergeTurns():
                await self._rejoin()
            case floor.CommitTurn():
                await self._commit(action.heard_end)
            case floor.StartResponse():
                assert action.request is None or isinstance(action.request, ResponseRequest)
                await self._start_response(action.request or ResponseRequest())

    async def _announce(self, start_sample: int) -> None:
        await self._ahead.discard()
        self._idle.caller_spoke()
        start_ms = self._hearing.begin_turn(start_sample)
        await self._sink(SpeechStarted(self._hearing.item_id, start_ms))
        # While the caller speaks the engine has time to read what it has not read yet.
        self._ahead.do(warm(self._services.engine, self.config, self._responses.prompt()))

    async def _drop_speech(self) -> None:
        """It was no turn ("mhm"): the client hears that the voice is gone, and that is all."""
        end_ms = self._hearing.discard_turn()
        await self._ahead.discard()
        await self._sink(SpeechStopped(self._hearing.item_id, end_ms))

    async def _rejoin(self) -> None:
        """The caller goes on with the turn that was taken for over: it and its answer vanish."""
        answer = self._responses.last
        ids = mergeable_items(self._history, self._hearing.last, answer)
        if ids and answer is not None and answer is self._responses.running:
            answer.response.is_withdrawn = True
        await self._responses.stop("turn_detected")
        if ids:
            self._num_commits += 1  # nobody waits for the words of the first half any more
            self._heard = None
            self._history.withdraw(ids)
            self._hearing.merge_with_last()
            self._word_times.discard(ids)
            for item_id in ids:
                await self._sink(ItemDeleted(item_id))

    async def _commit(self, heard_end: VoiceEnded | None) -> None:
        heard = self._hearing.commit_turn(heard_end, self.id)
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

    async def _settle(self, heard: CommittedTurn, commit: int) -> None:
        answer: asyncio.Future[ResponsePipeline | None] = asyncio.get_running_loop().create_future()
        if error := await heard.await_transcript(self._clock):
            self._services.traces.add(heard.trace.to_dict())
            await self._sink(TranscriptionFailed(heard.item.id, error.code, error.message))
        elif self.config.transcribe:
            if self.config.word_timestamps:
                self._word_times.start(heard, answer)
            for event in heard.transcript_events():
                await self._sink(event)
        # Of turns in quick succession only the last one is answered (with all that was said).
        if commit == self._num_commits:
            self._heard = heard.trace
            await self._feed(floor.TranscriptReady(has_words=bool(heard.item.content[0].text)))
            if not self._dialog.has_response:
                await self._ahead.discard()
        answer.set_result(self._responses.running)

    async def _start_response(self, request: ResponseRequest) -> None:
        if (
            self._responses.running is not None
            or self._dialog.bot is not floor.AssistantState.THINKING
        ):
            return  # the floor was lost while this was on its way
        heard, self._heard = self._heard, None
        await self._responses.start(request, heard)

    # --- ahead of certainty ---

    async def _answer_early(self, early: asyncio.Task[FinalTranscript], last_voiced: int) -> None:
        """The voice pauses: if there are words, begin to answer them; nobody hears it yet."""
        start = self._hearing.start_sample
        heard = (await asyncio.shield(early)).transcript
        if self._dialog.is_held and self._dialog.caller is floor.CallerState.MAYBE_FINISHED:
            is_meant = self._hearing.is_barge_in(self._responses.last, heard.text)
            await self._feed(floor.InterruptionJudged(is_meant))
        if self._dialog.caller is not floor.CallerState.MAYBE_FINISHED:
            return
        if self._hearing.start_sample < start:  # the words were only the second half of a turn
            early = self._hearing.start_early_transcript(last_voiced)
            heard = (await asyncio.shield(early)).transcript
        said = [*self._responses.prompt(), ChatMessage("user", heard.text)]
        answer = None
        if semantic.classify_completeness(heard.text) in semantic.FINISHED:
            # Most likely it is over: the answer need not wait for the judgement.
            answer = await self._begin_answer(said)
        if answer is not None:
            await answer.until_first_token()  # else the model would read the same words twice
        events, left_ms = await self._hearing.decide_endpointing_delay(said, last_voiced, heard)
        for event in events:
            await self._feed(event)
        if answer is not None:
            return
        if left_ms > _LONG_WAIT_MS:
            # Most likely the caller goes on: no work for nothing until the wait is nearly over.
            await self._clock.sleep((left_ms - _LONG_WAIT_MS) / 1000)
        if not heard.text:
            return
        answer = await self._begin_answer(said)
        if answer is None and self._dialog.caller is floor.CallerState.MAYBE_FINISHED:
            await warm(self._services.engine, self.config, said)

    async def _begin_answer(self, said: list[ChatMessage]) -> ResponsePipeline | None:
        """Hold an answer to ``said``, if it may be wanted and there is time for it."""
        async with self._floor:
            # The caller may have gone on, or finished, in the meantime.
            if self._dialog.caller is not floor.CallerState.MAYBE_FINISHED:
                return None
            wanted = self._services.settings.eager_reply and self._dialog.will_answer
            if not wanted or not self._services.load.may_speculate():
                return None
            answer = self._responses.make(ResponseRequest(), said)
            await self._ahead.hold(answer)
            return answer

    # --- helpers ---

    def _follow(self, config: SessionConfig) -> None:
        self._dialog.rules = floor.TurnPolicy.of(config.turn_detection)
        self._hearing.configure(config)

    async def _forget_speech(self) -> None:
        actions = self._dialog.forget_caller()
        self._hearing.discard()
        await self._ahead.discard()
        await self._perform_all(actions)

    async def _end_speech(self) -> None:
        """End the turn though no silence was heard: audio stopped coming, or it is too long."""
        await self._feed(self._hearing.force_end())
