"""What ``/v1/audio`` cannot do: languages that nobody knows, texts without anything to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from audio.frame import Samples
from tests.support.fakes import ScriptedRecognizer, ToneSynthesizer
from tests.unit.app.api.test_audio_api import metric, serving, speak, transcribe
from tests.unit.app.api.test_chat_api import error_of


async def test_a_file_of_a_language_that_is_not_known(tmp_path: Path) -> None:
    recognizer = ScriptedRecognizer(*["Hola."] * 4)
    recognizer.languages = ("en", "es", "pt")
    async with serving(tmp_path, recognizer) as client:
        for language in ("es", "pt-BR", "pt_BR", "English"):
            assert (await transcribe(client, language=language)).status_code == 200
        assert recognizer.told == ["es", "pt", "pt", "en"]
        for language in ("xx", "spanish", "  "):
            response = await transcribe(client, language=language)
            error = error_of(response)
            assert response.status_code == 400, language
            assert (error["code"], error["param"]) == ("unsupported_value", "language")
            assert error["message"].endswith("knows en, es, pt.")


@pytest.mark.parametrize("text", ["---", "\n \t", "..."])
@pytest.mark.parametrize("wanted", ["wav", "opus", "pcm"])
async def test_a_text_without_anything_to_say(tmp_path: Path, text: str, wanted: str) -> None:
    class Wordless(ToneSynthesizer):
        def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
            return super().synthesize(text.replace(".", ""), speed=speed)

    async with serving(tmp_path, voice=Wordless()) as client:
        response = await speak(client, input=text, response_format=wanted)
        assert response.status_code == 400, response.headers
        error = error_of(response)
        assert (error["code"], error["param"]) == ("invalid_value", "input")
        assert "nothing" in error["message"]
        assert await metric(client, "parley_texts_spoken_total") == 0
        assert (await speak(client, input=f"{text} Hello.")).status_code == 200
