"""Callers of the voice benchmark who say recordings: which, in what order, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

from app.cli.main import EXIT_FAILED, EXIT_USAGE, main
from app.errors import ParleyError
from bench.voice import callers
from bench.voice.recordings import MAX_S, Recordings
from tests.support.fakes import EnergyVad
from tests.support.phone_caller import phone_server

RATE = 16_000
VAD: Any = EnergyVad()


def record(path: Path, seconds: float = 0.4, level: float = 0.3) -> None:
    """A tone, which is a voice to the stand-in for the detector, and some silence behind it."""
    at = np.arange(round(seconds * RATE)) / RATE
    tone = level * np.sin(2 * np.pi * 220 * at)
    sf.write(path, np.concatenate((tone, np.zeros(RATE // 10))), RATE)


def names(hand: list[Any]) -> list[str]:
    return [said.audio.path.name for said in hand]


def test_all_are_said_before_one_is_said_again_and_the_same_on_every_run(tmp_path: Path) -> None:
    suffixes = ("wav", "flac", "OGG")
    files = {f"{number}.{suffixes[number % 3]}" for number in range(6)}
    for name in files:
        record(tmp_path / name)
    (tmp_path / "notes.md").write_text("no recording")
    hands = [names(hand) for hand in Recordings(tmp_path, VAD).distribute(3, 6)]
    assert all(set(hand) == files for hand in hands)
    assert len({tuple(hand) for hand in hands}) == 3, "each caller has an order of their own"
    assert [names(hand) for hand in Recordings(tmp_path, VAD).distribute(3, 6)] == hands
    dealt = [names(hand) for hand in Recordings(tmp_path, VAD).distribute(3, 2)]
    assert {name for hand in dealt for name in hand} == files
    cycled = names(Recordings(tmp_path, VAD).distribute(1, 15)[0])
    assert set(cycled[:6]) == set(cycled[6:12]) == files and len(cycled) == 15


def test_only_what_is_said_is_read(tmp_path: Path) -> None:
    for number in range(9):
        record(tmp_path / f"{number}.wav")
    recordings = Recordings(tmp_path, VAD)
    recordings.distribute(2, 2)
    assert recordings.to_dict() == {"said": 4, "transcripts": 0, "left_out": {}}


def test_the_words_are_known_where_they_are_written_beside(tmp_path: Path) -> None:
    for name in ("known.wav", "unknown.wav"):
        record(tmp_path / name)
    (tmp_path / "known.txt").write_text("\ufeffGrüß Gott.\n", encoding="utf-8")
    recordings = Recordings(tmp_path, VAD)
    said = {said.audio.path.stem: said for said in recordings.distribute(1, 2)[0]}
    assert {name: u.text for name, u in said.items()} == {"known": "Grüß Gott.", "unknown": None}
    assert all(u.num_turns == 1 for u in said.values())
    assert recordings.to_dict()["transcripts"] == 1


def spoil(folder: Path) -> dict[str, str]:
    """Files that cannot be said, and what is said of each."""
    record(folder / "long.flac", MAX_S + 0.5)
    record(folder / "silent.wav", level=0.0)
    record(folder / "blank.wav")
    (folder / "blank.txt").write_text(" \n")
    record(folder / "latin.wav")
    (folder / "latin.txt").write_bytes("Gr\xfc\xdf Gott".encode("latin-1"))
    (folder / "broken.ogg").write_bytes(b"OggS and then nothing")
    (folder / "nothing.wav").write_bytes(b"")
    (folder / "folder.wav").mkdir()
    record(folder / "cut.wav", 3.0)
    (folder / "cut.wav").write_bytes((folder / "cut.wav").read_bytes()[:20_000])
    return {
        "long.flac": "30.6 s long: expected at most 30 s",
        "silent.wav": "no voice",
        "blank.wav": "blank.txt is empty",
        "latin.wav": "latin.txt is not text in UTF-8",
        "broken.ogg": "expected a WAV, FLAC or Ogg file",
        "nothing.wav": "empty file",
        "folder.wav": "Is a directory",
        "cut.wav": "truncated",
    }


def test_what_cannot_be_said_is_left_out_and_named(tmp_path: Path) -> None:
    reasons = spoil(tmp_path)
    record(tmp_path / "good.wav")
    recordings = Recordings(tmp_path, VAD)
    assert names(recordings.distribute(1, 3)[0]) == ["good.wav"] * 3
    assert recordings.left_out.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in recordings.left_out[name], recordings.left_out[name]
        assert str(tmp_path) in recordings.left_out[name]


def test_a_folder_without_a_recording_that_can_be_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParleyError, match=r"there are no recordings in .*\.wav, \.flac, \.ogg"):
        Recordings(tmp_path, VAD).distribute(1, 1)
    with pytest.raises(ParleyError, match="cannot read the directory"):
        Recordings(tmp_path / "gone", VAD).distribute(1, 1)
    spoil(tmp_path)
    with pytest.raises(
        ParleyError, match=r"(?s)one turn each, up to 30 s.*broken.*and 3 more"
    ) as told:
        Recordings(tmp_path, VAD).distribute(1, 1)
    assert "blank.txt is empty" in told.value.message


async def test_callers_say_them_through_audiosocket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "VadModel", EnergyVad)
    folder, web = tmp_path / "calls", tmp_path / "web"
    for place in (folder, web):
        place.mkdir()
    record(folder / "hello.wav")
    (folder / "hello.txt").write_text("Hello there?")
    notes: list[str] = []
    async with phone_server(web, "Yes.") as server:
        options = callers.VoiceOptions(
            turns=1,
            url=server.url,
            provider="audiosocket",
            audiosocket_port=server.port,
            speech=folder,
        )
        figures = await callers.run_async(options, notes.append)
    assert figures["turns"] == figures["v2v_ms"]["n"] == figures["gap_in_recording_ms"]["n"] == 1
    assert figures["missed_turns"] == figures["failed_replies"] == 0
    assert figures["wer"] == 0.5, "the stand-in hears 'Hello?'"
    assert not {"barge_in_ms", "missed_barge_ins"} & figures.keys()
    assert figures["recordings"] == {"said": 1, "transcripts": 1, "left_out": {}}
    parts = sum(part["p95_answer"] for part in figures["waited_for_ms"].values())
    assert parts == pytest.approx(figures["v2v_ms"]["p95"], abs=0.3)
    assert any("hello.wav" in note and "Hello?" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--url", "http://127.0.0.1:1"], EXIT_FAILED, "cannot reach"),
        (["--url", "http://127.0.0.1:1", "--provider", "audiosocket"], EXIT_USAGE, "needs --audio"),
        (["--speech", "nowhere"], EXIT_USAGE, "nowhere"),
        (["--provider", "nobody"], EXIT_USAGE, "audiosocket"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(
    arguments: list[str],
    code: int,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(callers, "VadModel", EnergyVad)
    record(tmp_path / "hello.wav")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "voice", "--speech", str(tmp_path), *arguments])
    assert ended.value.code == code
    told = capsys.readouterr().err
    assert complaint in told and "Traceback" not in told
