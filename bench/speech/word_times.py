"""Error of word timestamps, on synthetic speech whose word boundaries are known.

    python -m bench.speech.word_times DATA [--json OUT]

Separate words: synthesised one by one, trimmed to their audible samples, with 0.12, 0.25 and 0.5 s
of silence between. Sentences: durations that the voice itself predicts, from the frames of its
network without noise, where the frame of a phoneme is repeated for its duration; sentences whose
phonemes or transcript have another number of words are left out. Last, over DATA/speech: CPU time
of the timestamps relative to that of the transcript.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from audio.asr.hallucination_filter import words_of
from audio.asr.recognizer import Recognizer
from audio.frame import SPEECH_RATE, Samples, silence
from audio.resample import resample
from audio.text.normalize.english import normalize
from audio.tts.synthesizer import Synthesizer, pronounceable
from bench.harness.results import Result, add_json_option, report
from bench.harness.speech import installed_model, installed_recognizer, load_speech

Place = tuple[float, float]

_GAPS_S = (0.12, 0.25, 0.5)
_LEAD_S = 0.8
_AUDIBLE = 0.02
_WORDS = """apple window monday garden yellow seven river camera
table orange doctor summer purple eleven mountain paper
coffee friday chicken london music green teacher morning
fish sister house shop face six half voice"""
_SENTENCES = """Could you please tell me your name and your address?
I would like to book a table for two people on Friday evening.
My brother works in a small office near the old railway station.
Please send the letter to my home and not to the office.
It is a long way to the next village, so take some water with you.
Should I get a dog or a cat for my little sister?
Yes, I think that is a very good idea, thank you.
What time does the museum open on Sunday morning?
Turn left at the second corner and then go straight on.
The weather is fine today and we want to walk in the garden.
He left his coat in the car because the sun was shining.
We have been waiting for the bus for more than half an hour."""


def words_apart(voice: Synthesizer) -> Iterable[tuple[list[str], Samples, list[Place]]]:
    for line in _WORDS.splitlines():
        said = line.split()
        sounds = [at_16k(audible(voice.synthesize(word)), voice.sample_rate) for word in said]
        for gap_s in _GAPS_S:
            pieces, places, at_s = [silence(round(_LEAD_S * SPEECH_RATE))], [], _LEAD_S
            for sound in sounds:
                places.append((at_s, at_s + len(sound) / SPEECH_RATE))
                pieces += [sound, silence(round(gap_s * SPEECH_RATE))]
                at_s += len(sound) / SPEECH_RATE + gap_s
            yield said, np.concatenate(pieces), places


def sentences(voice: Synthesizer) -> Iterable[tuple[list[str], Samples, list[Place]]]:
    for text in _SENTENCES.splitlines():
        said = words_of(text)
        (phonemes,) = [
            one for one in voice._phonemes.phonemize(pronounceable(normalize(text))) if any(one)
        ]
        utterance = voice._open(phonemes, 1.0)
        places = places_of(voice, phonemes, utterance._frames[0])
        if len(places) == len(said):
            sound = at_16k(0.5 * utterance.decode_frames(utterance.num_frames), voice.sample_rate)
            lead, tail = silence(round(_LEAD_S * SPEECH_RATE)), silence(SPEECH_RATE // 2)
            moved = [(_LEAD_S + start_s, _LEAD_S + end_s) for start_s, end_s in places]
            yield said, np.concatenate((lead, sound, tail)), moved


def places_of(voice: Synthesizer, phonemes: list[str], frames: Samples) -> list[Place]:
    """Word boundaries in ``frames`` [channels, n]; [] where two phonemes have equal frames."""
    ids = voice._phonemes.phonemes_to_ids(phonemes)
    changes = np.flatnonzero((frames[:, 1:] != frames[:, :-1]).any(axis=0)) + 1
    edges_s = np.array([0, *changes, frames.shape[1]]) * voice._net.hop_len / voice.sample_rate
    if len(edges_s) != len(ids) + 1:
        return []
    known = voice._phonemes.config.phoneme_id_map
    silent = {known[char][0] for char in "_^$.,?!;:" if char in known}
    places: list[Place] = []
    is_inside = False
    for number, one in enumerate(ids):
        if one == known[" "][0]:
            is_inside = False
        elif one not in silent:
            start_s = places.pop()[0] if is_inside else edges_s[number]
            places.append((float(start_s), float(edges_s[number + 1])))
            is_inside = True
    return places


def errors(
    recognizer: Recognizer, speech: Iterable[tuple[list[str], Samples, list[Place]]]
) -> np.ndarray:
    """Errors of starts and ends in ms, [words, 2]; words transcribed wrongly are left out."""
    found = []
    for said, samples, places in speech:
        words = recognizer.align_words(recognizer.transcribe(samples, keep_encoder_output=True))
        if len(words) != len(said):
            continue
        for word, expected, (start_s, end_s) in zip(words, said, places, strict=True):
            if words_of(word.word) == [expected]:
                found.append((word.start_s - start_s, word.end_s - end_s))
    return np.array(found) * 1000


def add_errors(result: Result, name: str, errors_ms: np.ndarray) -> None:
    for edge, of in (("start", errors_ms[:, 0]), ("end", errors_ms[:, 1])):
        absolute = np.abs(of)
        cells = (np.median(absolute), np.percentile(absolute, 90), of.mean())
        result.add(f"{name}, {edge}", len(of), *(round(float(ms), 1) for ms in cells))


def audible(samples: Samples) -> Samples:
    loud = np.flatnonzero(np.abs(samples) > _AUDIBLE)
    return samples[loud[0] : loud[-1] + 1]


def at_16k(samples: Samples, rate: int) -> Samples:
    return resample(samples, rate, SPEECH_RATE)


def measure(data: Path) -> Result:
    """Errors of both kinds of synthetic speech; the relative cost as notes."""
    recognizer = installed_recognizer()
    recognizer.warm_up()
    voice = Synthesizer(installed_model("tts_model"), noise_scale=0.0, noise_w_scale=0.0)
    result = Result(("words", "n", "median error, ms", "90th percentile, ms", "mean, ms"))
    add_errors(result, "separate words", errors(recognizer, words_apart(voice)))
    add_errors(result, "sentences", errors(recognizer, sentences(voice)))
    shares = []
    for path in sorted((data / "speech").glob("*.flac")):
        samples = load_speech(path)
        times_s = [time.perf_counter()]
        transcript = recognizer.transcribe(samples, keep_encoder_output=True)
        times_s.append(time.perf_counter())
        recognizer.align_words(transcript)
        times_s.append(time.perf_counter())
        shares.append((times_s[2] - times_s[1]) / (times_s[1] - times_s[0]))
    result.notes = (
        f"Time of the timestamps / time of the transcript, {len(shares)} recordings: median "
        f"{np.median(shares):.2f}, highest {max(shares):.2f}."
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    add_json_option(parser)
    options = parser.parse_args()
    report(measure(options.data), options)


if __name__ == "__main__":
    main()
