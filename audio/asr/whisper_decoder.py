"""Whisper decoding with as much encoder context as the audio needs, instead of always 30 s.

faster-whisper pads every recording to 3,000 feature frames (30 s); the encoder's cost grows faster
than linearly with them (one thread, tiny.en int8: 1,000 frames 82 ms, 1,500 144 ms, 3,000 520 ms).
It accepts fewer. Padding is zeros in the feature domain, as in the library: fewer errors and loops
than from padding the audio with silence. Below 1,000 frames (10 s) the decoder often misses
the end and repeats itself (5 of 34 recordings at 800), so that is the minimum. Greedy search
without timestamps makes fewer errors and loops than beam search or timestamps do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer

from audio.asr.hallucination_filter import Decoding, PunctuationLogprobs
from audio.asr.turn_end_probe import pool_encoder_outputs
from audio.asr.word_timing import EncoderOutput, TokenSpan
from audio.errors import AbandonedError, AudioError, ModelError
from audio.frame import SPEECH_RATE, Samples
from audio.language import language_code

MAX_FRAMES = 3_000
FRAMES_PER_S = 100

_REQUIRED_FILES = ("model.bin", "config.json", "tokenizer.json")
_MAX_TOKENS_PER_S = 10
_SPARE_TOKENS = 16
# The filter over the attention is seven outputs (140 ms) wide.
_MIN_ALIGNED_FRAMES = 50
_TEMPERATURES = [0.0, 0.4, 0.8]
_MARKS = (".", "?", "!", ",", "...")
_MIN_PROBABILITY = 1e-9


class WhisperDecoder:
    """A faster-whisper model on the CPU. Thread-safe; runs one call at a time."""

    def __init__(self, model_dir: Path, num_threads: int) -> None:
        """Load ``model_dir`` in int8. Raises ModelError when it is not a complete model."""
        for name in _REQUIRED_FILES:
            # Without a tokenizer file the library would download one.
            if not (model_dir / name).is_file():
                raise ModelError(
                    f"{model_dir} is not a faster-whisper model: it has no {name} "
                    f"(expected {', '.join(_REQUIRED_FILES)})"
                )
        try:
            self._whisper = WhisperModel(
                str(model_dir),
                device="cpu",
                compute_type="int8",
                cpu_threads=num_threads,
                num_workers=1,
                local_files_only=True,
            )
        except Exception as error:  # tokenizers and CTranslate2 raise bare Exceptions of many kinds
            raise ModelError(f"cannot load the speech model {model_dir}: {error}") from error
        self.is_multilingual: bool = self._whisper.model.is_multilingual
        self._tokenizer_of = lru_cache(maxsize=8)(self._make_tokenizer)

    @property
    def languages(self) -> tuple[str, ...]:
        """Language codes that the model knows, sorted; ("en",) for an English-only model."""
        return tuple(sorted(self._whisper.supported_languages))

    def check_language(self, language: str | None) -> str | None:
        """The model's code for ``language`` ("en", "en-US", "DE", "english").

        None stays None (detect), except for English-only models.

        Raises AudioError for a language that the model does not know.
        """
        if language is None:
            return None if self.is_multilingual else "en"
        code = language_code(language)
        known = self._whisper.supported_languages
        if code not in known:
            names = "English only" if len(known) == 1 else f"{len(known)} languages"
            raise AudioError(
                f"the speech model does not know the language {language!r} (it knows {names})"
            )
        return code

    def features(self, samples: Samples) -> Samples:
        """Log-mel features float32 [num_mels, num_frames] of audio [n] at 16 kHz."""
        out: Samples = self._whisper.feature_extractor(samples)[:, :-1]
        return out

    def decode(
        self,
        features: Samples,
        num_frames: int,
        language: str | None,
        prompt: str | None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[Decoding, str]:
        """Greedy decoding over ``num_frames`` of context (even, at most 3,000), and the language.

        ``is_wanted`` is polled before each of the two long steps. Raises AbandonedError when it
        returns False, ModelError when the runtime fails.
        """
        content_s = min(features.shape[1], num_frames) / FRAMES_PER_S
        try:
            _check_wanted(is_wanted)
            encoder_output = self._encode(features, num_frames)
            encoded = encoder_output.outputs
            pooled = pool_encoder_outputs(np.asarray(encoded)[0], encoder_output.num_frames)
            _check_wanted(is_wanted)
            if language is None:
                language = str(self._whisper.model.detect_language(encoded)[0][0][0])[2:-2]
            tokenizer, suppressed = self._tokenizer_of(language)
            head = _prompt_tokens(tokenizer, prompt)
            max_tokens = min(224, int(content_s * _MAX_TOKENS_PER_S) + _SPARE_TOKENS)
            result = self._whisper.model.generate(
                encoded,
                [head],
                beam_size=1,
                max_length=len(head) + max_tokens,
                return_scores=True,
                return_no_speech_prob=True,
                return_logits_vocab=True,
                suppress_blank=True,
                suppress_tokens=suppressed,
            )[0]
        except RuntimeError as error:
            raise ModelError(f"speech recognition failed: {error}") from error
        tokens = result.sequences_ids[0]
        text = tokenizer.decode(tokens).strip()
        decoding = Decoding(
            text=text,
            num_tokens=len(tokens),
            # The score is the mean over the text tokens; the end token counts too.
            avg_logprob=result.scores[0] * len(tokens) / (len(tokens) + 1),
            no_speech_prob=result.no_speech_prob,
            compression_ratio=compression_ratio(text),
            encoder_frames=num_frames,
            was_capped=len(tokens) >= max_tokens,
            punctuation=_punctuation_logprobs(tokenizer, tokens, result.logits[0]),
            pooled_features=pooled,
            encoder_output=encoder_output,
        )
        return decoding, language

    def align(
        self, samples: Samples, encoder_output: EncoderOutput | None, text: str, language: str
    ) -> list[TokenSpan]:
        """Align the tokens of ``text`` to ``samples``, audio [n] at 16 kHz of at most 30 s.

        The spans joined give ``text``. ``encoder_output`` None: the audio is encoded again. Raises
        ModelError when the runtime fails.
        """
        tokenizer, _ = self._tokenizer_of(language)
        tokens = tokenizer.encode(" " + text)
        try:
            if encoder_output is None:
                encoder_output = self._encode(self.features(samples), MAX_FRAMES)
            num_frames = max(encoder_output.num_frames, _MIN_ALIGNED_FRAMES)
            (found,) = self._whisper.find_alignment(
                tokenizer, [tokens], encoder_output.outputs, num_frames
            )
        except RuntimeError as error:
            raise ModelError(f"the words could not be found in the sound: {error}") from error
        return [
            TokenSpan(word["word"], float(word["start"]), float(word["end"]), tuple(word["tokens"]))
            for word in found
        ]

    def _encode(self, features: Samples, num_frames: int) -> EncoderOutput:
        padded = np.zeros((features.shape[0], num_frames), dtype=np.float32)
        padded[:, : features.shape[1]] = features[:, :num_frames]
        return EncoderOutput(self._whisper.encode(padded), min(features.shape[1], num_frames))

    def beam_search(self, samples: Samples, language: str, prompt: str | None) -> Decoding:
        """faster-whisper's own decoding: 30 s of context, beam 5, fewer temperatures.

        Several times slower than ``decode``. Raises ModelError when the runtime fails.
        """
        duration_s = samples.size / SPEECH_RATE
        max_tokens = min(200, int(duration_s * _MAX_TOKENS_PER_S) + _SPARE_TOKENS)
        try:
            segments, _ = self._whisper.transcribe(
                samples,
                language=language,
                initial_prompt=prompt,
                condition_on_previous_text=False,
                temperature=_TEMPERATURES,
                max_new_tokens=max_tokens,
            )
            parts = list(segments)
        except RuntimeError as error:
            raise ModelError(f"speech recognition failed: {error}") from error
        text = "".join(part.text for part in parts).strip()
        num_tokens = sum(len(part.tokens) for part in parts)
        return Decoding(
            text=text,
            num_tokens=num_tokens,
            avg_logprob=_mean([p.avg_logprob for p in parts], [len(p.tokens) for p in parts]),
            no_speech_prob=max((part.no_speech_prob for part in parts), default=1.0),
            compression_ratio=compression_ratio(text),
            encoder_frames=MAX_FRAMES,
            was_capped=False,
        )

    def _make_tokenizer(self, language: str) -> tuple[Any, list[int]]:
        """The tokenizer for a language, and the tokens to suppress."""
        tokenizer = Tokenizer(
            self._whisper.hf_tokenizer, self.is_multilingual, task="transcribe", language=language
        )
        special = (
            tokenizer.transcribe,
            tokenizer.translate,
            tokenizer.sot,
            tokenizer.sot_prev,
            tokenizer.sot_lm,
            tokenizer.no_speech,
        )
        suppressed = {token for token in special if token is not None}
        return tokenizer, sorted(suppressed.union(tokenizer.non_speech_tokens))


def compression_ratio(text: str) -> float:
    """zlib compression ratio of the text, OpenAI's measure of repetition; 0 for no text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _prompt_tokens(tokenizer: Any, prompt: str | None) -> list[int]:
    """Decoder prompt: earlier text, then the start sequence without timestamps."""
    start = [*tokenizer.sot_sequence, tokenizer.no_timestamps]
    if not prompt or not prompt.strip():
        return start
    earlier = tokenizer.encode(" " + prompt.strip())[-223:]  # half of the text context, less one
    return [tokenizer.sot_prev, *earlier, *start]


def _punctuation_logprobs(
    tokenizer: Tokenizer, tokens: list[int], logits: list[Any]
) -> PunctuationLogprobs | None:
    """Punctuation at the step after the last word; ``logits``: float32 [vocab_size] per step.

    None without a word, or when the decoder was stopped before that step.
    """
    at = len(tokens)
    while at and not any(char.isalnum() for char in tokenizer.decode([tokens[at - 1]])):
        at -= 1
    if not 0 < at < len(logits):
        return None
    values = np.array(logits[at], dtype=np.float64)
    powers = np.exp(values - values.max())
    ids = [*(tokenizer.encode(mark)[0] for mark in _MARKS), tokenizer.eot]
    chances = np.maximum(powers[ids] / powers.sum(), _MIN_PROBABILITY)
    return PunctuationLogprobs(*np.log(chances).tolist())


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise AbandonedError("nobody waits for this transcript any more")


def _mean(values: list[float], weights: list[int]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0
