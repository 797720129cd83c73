"""The page in a real browser, against a scripted server: what a person sees, hears and does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.browser.conftest import PAGES, PHONE, OpenPage
from tests.browser.page_state import sound, until
from tests.support.scripted_realtime import RATE, Call, Script, scripted_server, tone, trace

pytestmark = pytest.mark.browser

COUNT_LATE = """import('/app.js').then(({page}) => {
  const post = page.player.post.bind(page.player);
  window.late = 0;
  page.player.post = (samples) => { window.late += samples.length; post(samples); };
})"""


async def received(call: Call, kind: str) -> dict[str, Any]:
    """The first event of this kind that the page has sent."""

    async def has_come() -> bool:
        return any(event["type"] == kind for event in call.received)

    await until(has_come)
    return next(event for event in call.received if event["type"] == kind)


def once_heard(samples: int, action: Callable[[Call], Awaitable[None]]) -> Script:
    """Does something once, when so much microphone audio has come in."""
    is_done = False

    async def script(call: Call, event: dict[str, Any]) -> None:
        nonlocal is_done
        if not is_done and call.num_audio_samples >= samples:
            is_done = True
            await action(call)

    return script


async def answer(call: Call) -> None:
    await call.send("input_audio_buffer.speech_started", item_id="item_1", audio_start_ms=0)
    await call.answer("What is the weather?", "It is sunny.", tone(0.5))


async def answer_typed(call: Call, event: dict[str, Any]) -> None:
    """Answers what was typed, in words alone when the page asked for that."""
    if event["type"] != "response.create":
        return
    call.num_items += 1
    response_id = f"resp_{call.num_items}"
    await call.begin_reply(response_id, "item_r")
    if call.received[0]["session"].get("output_modalities") == ["text"]:
        await call.send("response.output_text.delta", response_id=response_id, delta="In writing.")
    else:
        await call.say("Aloud.", tone(0.3), response_id, "item_r")
    await call.end_reply(response_id)
    await call.send_event(trace(response_id, voice_to_voice_ms=None))


async def test_a_spoken_question_gets_a_spoken_answer(open_page: OpenPage, question: Path) -> None:
    async with scripted_server(once_heard(RATE, answer), pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await expect(page.locator("#status")).to_have_text("Ready")
        await page.get_by_role("button", name="Start talking").click()
        await expect(page.locator(".message-you .message-text")).to_have_text(
            "What is the weather?"
        )
        await expect(page.locator(".message-parley .message-text")).to_have_text("It is sunny.")
        await expect(page.locator("#turn-number")).to_have_text("600")
        rows = page.locator("#stages tr")
        await expect(rows).to_have_count(7)
        await expect(rows.first).to_contain_text("End of turn")
        await expect(rows.first.locator(".ms")).to_have_text("310")
        await expect(page.locator(".message-parley .tag")).to_have_text("600 ms")

        async def all_was_played() -> bool:
            heard = await sound(page)
            return bool(heard["played"] >= 0.5 * heard["rate"] and not heard["playing"])

        await until(all_was_played)
        assert (await sound(page))["loudest"] == pytest.approx(0.3, abs=0.05)
        # The recording's voice has come through, at the rate of the wire.
        call = server.calls[0]

        async def voice_came() -> bool:
            return call.loud_samples > RATE // 4

        await until(voice_came)
        assert call.received[0]["session"]["parley"] == {"trace": True}

        await page.get_by_role("button", name="Stop talking").click()
        await expect(page.locator("#status")).to_have_text("Ready")
        sent = call.num_audio_samples
        assert sent > 0


async def test_the_microphone_stream_keeps_its_pace_when_muted(
    open_page: OpenPage, question: Path
) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await page.click("#start")
        await expect(page.locator("#status")).to_have_text("Listening")
        await page.get_by_role("button", name="Mute").click()
        await expect(page.locator("#status")).to_have_text("Muted")
        await expect(page.locator("#mute")).to_have_attribute("aria-pressed", "true")
        call = server.calls[0]
        loop = asyncio.get_running_loop()
        began, before = loop.time(), call.num_audio_samples

        async def much_has_come() -> bool:
            return call.num_audio_samples - before > 2 * RATE

        await until(much_has_come)
        assert loop.time() - began == pytest.approx(2.0, abs=0.6)


async def test_speaking_over_an_answer_stops_it(open_page: OpenPage, question: Path) -> None:
    interrupted = asyncio.Event()

    async def long_answer(call: Call) -> None:
        await call.hear("Tell me a story.", "item_1")
        await call.begin_reply("resp_1", "item_reply_1")
        await call.say("Once upon a time", tone(20), "resp_1", "item_reply_1")

    script = once_heard(RATE // 2, long_answer)

    async def talk(call: Call, event: dict[str, Any]) -> None:
        await script(call, event)
        if call.num_audio_samples >= RATE * 2 and not interrupted.is_set():
            interrupted.set()
            await call.send("input_audio_buffer.speech_started", item_id="item_2", audio_start_ms=0)
            # Already on its way: not to be heard any more.
            await call.say(" there was", tone(5), "resp_1", "item_reply_1")
            await call.end_reply("resp_1", "cancelled", status_details={"reason": "turn_detected"})

    async with scripted_server(talk, pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await page.click("#start")
        await expect(page.locator("#status")).to_have_text("Speaking")
        await page.evaluate(COUNT_LATE)
        call = server.calls[0]
        truncated = await received(call, "conversation.item.truncate")
        assert truncated["item_id"] == "item_reply_1"
        assert truncated["content_index"] == 0
        heard = await sound(page)
        assert not heard["playing"]
        heard_ms = heard["played"] * 1000 / heard["rate"]
        # What was heard is what was played, less what is still in the sound system.
        assert heard_ms - 400 < truncated["audio_end_ms"] <= heard_ms + 25
        assert 500 < truncated["audio_end_ms"] < 2500
        await expect(page.locator(".message-parley")).to_contain_text("interrupted")
        await expect(page.locator(".message-parley .message-text")).to_have_text("Once upon a time")
        await expect(page.locator("#status")).to_have_text("Hearing you")
        assert await page.evaluate("window.late") == 0, "what was cut is not played, nor its end"


async def test_typing_works_without_a_microphone(open_page: OpenPage) -> None:
    async with scripted_server(answer_typed, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        await page.click("#start")
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("The microphone is blocked")
        await expect(alert).to_contain_text("You can also type")
        await page.get_by_label("Message to Parley").fill("Hello <b>there</b>")
        await page.keyboard.press("Enter")
        await expect(page.locator(".message-you .message-text")).to_have_text("Hello <b>there</b>")
        await expect(page.locator(".message-parley .message-text")).to_have_text("Aloud.")
        await expect(page.locator("#turn-note")).to_have_text(
            "From your message to the first sound"
        )
        item = await received(server.calls[0], "conversation.item.create")
        content = [{"type": "input_text", "text": "Hello <b>there</b>"}]
        assert item["item"] == {"type": "message", "role": "user", "content": content}

        async def was_heard() -> bool:
            return bool((await sound(page))["loudest"] > 0.2)

        await until(was_heard)


async def test_a_machine_without_a_microphone(open_page: OpenPage) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=None, has_device=False)
        await page.click("#start")
        await expect(page.get_by_role("alert")).to_contain_text("There is no microphone")
        await expect(page.locator("#status")).to_have_text("Ready")


async def test_a_typed_message_stops_the_running_answer_first(open_page: OpenPage) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if event["type"] == "response.create" and not call.num_items:
            call.num_items = 1
            await call.begin_reply("resp_1", "item_r1")
            await call.say("A long story", tone(20), "resp_1", "item_r1")
        elif event["type"] == "response.cancel":
            await call.end_reply("resp_1", "cancelled")
        else:
            await answer_typed(call, event)

    async with scripted_server(script, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        await page.get_by_role("button", name="Why is the sky blue?").click()
        await expect(page.locator("#status")).to_have_text("Speaking")
        await page.fill("#message", "Shorter!")
        await page.keyboard.press("Enter")
        await expect(page.locator(".message-parley .message-text")).to_have_text(
            ["A long story", "Aloud."]
        )
        kinds = [event["type"] for event in server.calls[0].received[1:]]
        turn = ["conversation.item.create", "response.create"]
        assert kinds == [*turn, "conversation.item.truncate", "response.cancel", *turn]


async def test_escape_stops_an_answer(open_page: OpenPage) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if event["type"] == "response.create":
            await call.begin_reply("resp_1", "item_r1")
            await call.say("A long story", tone(20), "resp_1", "item_r1")
            await call.end_reply("resp_1")

    async with scripted_server(script, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        await page.fill("#message", "Tell me a story")
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_have_text("Speaking")
        await expect(page.locator("#interrupt")).to_have_attribute("aria-disabled", "false")
        await page.keyboard.press("Escape")
        await received(server.calls[0], "conversation.item.truncate")
        await expect(page.locator("#status")).to_have_text("Connected")
        await expect(page.locator(".message-parley")).to_contain_text("interrupted")


async def test_a_server_that_is_away_is_found_again(open_page: OpenPage, question: Path) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        port = int(server.url.rpartition(":")[2])
        await page.evaluate("import('/app.js').then(async ({page}) => Boolean(await page.audio))")
    await page.click("#start")
    await expect(page.get_by_role("alert")).to_contain_text("The server is away")
    await expect(page.locator("#status")).to_have_text("No connection")
    await expect(page.locator("#notice-countdown")).to_contain_text("Next attempt in")
    async with scripted_server(pages=PAGES, port=port):
        await page.get_by_role("button", name="Try now").click()
        await expect(page.locator("#status")).to_have_text("Listening")
        await expect(page.locator("#notice")).to_be_hidden()


async def test_a_line_that_breaks_is_mended(open_page: OpenPage, question: Path) -> None:
    async def hang_up(call: Call) -> None:
        await call.hear("Hello", "item_1")
        await call.begin_reply("resp_1", "item_reply_1")
        await call.say("Well", tone(10), "resp_1", "item_reply_1")
        await call.socket.close(1011, "out of breath")

    async with scripted_server(once_heard(RATE // 2, hang_up), pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await page.click("#start")
        await expect(page.get_by_role("alert")).to_contain_text("out of breath")
        await expect(page.locator("#log")).to_contain_text("does not remember")
        await expect(page.locator("#status")).to_have_text("Listening")
        assert not (await sound(page))["playing"]
        assert len(server.calls) == 2


async def test_a_key_is_asked_for(open_page: OpenPage) -> None:
    async with scripted_server(answer_typed, pages=PAGES, api_key="sesame") as server:
        page = await open_page(server.url, microphone=None)
        await page.fill("#message", "Hello")
        await page.keyboard.press("Enter")
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("This server asks for a key")
        key = page.get_by_label("API key")
        await expect(key).to_be_focused()
        await key.fill("wrong")
        await page.keyboard.press("Enter")
        await expect(alert).to_contain_text("does not accept this key")
        await key.fill("not a token")
        await page.keyboard.press("Enter")
        await expect(alert).to_contain_text("cannot contain spaces")
        await key.fill("sesame")
        await page.keyboard.press("Enter")
        # What was typed before is not lost.
        await expect(page.locator(".message-you .message-text")).to_have_text("Hello")
        await expect(page.locator(".message-parley .message-text")).to_have_text("Aloud.")
        await expect(page.locator("#notice")).to_be_hidden()


async def test_a_page_without_https_explains_and_can_be_read(open_page: OpenPage) -> None:
    async with scripted_server(answer_typed, pages=PAGES) as server:
        url = server.url.replace("127.0.0.1", "parley.test")
        page = await open_page(url, microphone=None)
        await page.click("#start")
        await expect(page.get_by_role("alert")).to_contain_text("only on https pages")
        await page.fill("#message", "Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator(".message-parley .message-text")).to_have_text("In writing.")
        # Nobody hears it, so a screen reader says it.
        await expect(page.locator("#announcer")).to_have_text("In writing.")


async def test_the_server_s_complaints_are_shown(open_page: OpenPage) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if event["type"] == "response.create":
            error = {"message": "The kitchen is on fire.", "event_id": event["event_id"]}
            await call.send("error", error=error)
            await call.begin_reply("resp_1", "item_r1")
            details = {"error": {"message": "no voice today"}}
            await call.end_reply("resp_1", "failed", status_details=details)

    async with scripted_server(script, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        await page.fill("#message", "Hello")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("The kitchen is on fire.")
        message = page.locator(".message-parley")
        await expect(message.locator(".problem-text")).to_have_text(
            "The answer was lost. Please ask again."
        )
        # What the server calls it is there for whoever looks for it.
        await expect(message.get_by_text("no voice today")).to_be_hidden()
        await message.get_by_text("Details").click()
        await expect(message.get_by_text("no voice today")).to_be_visible()
        await page.get_by_role("button", name="Close this message").click()
        await expect(page.locator("#notice")).to_be_hidden()
        await expect(page.get_by_label("Message to Parley")).to_be_focused()


async def test_noise_leaves_no_trace(open_page: OpenPage, question: Path) -> None:
    async def noise(call: Call) -> None:
        await call.send("input_audio_buffer.speech_started", item_id="item_1", audio_start_ms=0)
        await call.hear("", "item_1")
        await answer(call)

    async with scripted_server(once_heard(RATE // 4, noise), pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await page.click("#start")
        await expect(page.locator(".message-parley .message-text")).to_have_text("It is sunny.")
        await expect(page.locator(".message-you .message-text")).to_have_text(
            ["What is the weather?"]
        )


async def test_who_goes_on_has_said_one_thing(open_page: OpenPage, question: Path) -> None:
    async def go_on(call: Call) -> None:
        await call.send("input_audio_buffer.speech_started", item_id="half", audio_start_ms=0)
        await call.hear("What is the", "half")
        await call.begin_reply("early", "early_item")
        await call.say("The what?", tone(0.05), "early", "early_item")
        await call.end_reply("early", "cancelled")
        await call.send("conversation.item.deleted", item_id="half")
        await call.send("conversation.item.deleted", item_id="early_item")
        await answer(call)

    async with scripted_server(once_heard(RATE // 4, go_on), pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await page.click("#start")
        await expect(page.locator(".message-parley .message-text")).to_have_text(["It is sunny."])
        await expect(page.locator(".message-you .message-text")).to_have_text(
            ["What is the weather?"]
        )


async def test_the_page_works_with_the_keyboard_and_has_names(
    open_page: OpenPage, question: Path
) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=question)
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
        for name in ("Talk", "Traces"):
            await page.keyboard.press("Tab")
            await expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("button", name="Start talking")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_have_text("Listening")
        await expect(page.get_by_role("button", name="Stop talking")).to_be_focused()
        for role, name in (
            ("heading", "Last turn"),
            ("table", "Where the time of the last turn went, by stage"),
            ("log", "Conversation"),
            ("meter", "Microphone level"),
            ("meter", "Voice level"),
            ("textbox", "Message to Parley"),
        ):
            await expect(page.get_by_role(role, name=name)).to_be_visible()  # type: ignore[arg-type]


async def test_a_phone_has_room_for_it(open_page: OpenPage) -> None:
    async with scripted_server(answer_typed, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None, size=PHONE)
        await page.fill("#message", "a" * 300)
        await page.keyboard.press("Enter")
        await expect(page.locator(".message-parley")).to_be_visible()
        overflow = await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow == 0
        for name in ("Start talking", "Mute", "Stop answer", "Send"):
            box = await page.get_by_role("button", name=name).bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 40  # a finger's width


# -- samples -------------------------------------------------------------------------------------

RESAMPLED = """async ([inRate, outRate, hz, chunk]) => {
  const {StreamResampler} = await import('/pcm.js');
  const resampler = new StreamResampler(inRate, outRate);
  const sine = (rate, at) => Math.sin(2 * Math.PI * hz * at / rate);
  const input = Float32Array.from({length: inRate}, (_, at) => sine(inRate, at));
  const out = [];
  for (let at = 0; at < input.length; at += chunk) {
    out.push(...resampler.process(input.slice(at, at + chunk)));
  }
  out.push(...resampler.flush());
  let worst = 0, loudest = 0;
  for (let at = 200; at < outRate - 200; at++) {
    worst = Math.max(worst, Math.abs(out[at] - sine(outRate, at)));
    loudest = Math.max(loudest, Math.abs(out[at]));
  }
  return {length: out.length, worst, loudest};
}"""


@pytest.mark.parametrize(
    "in_rate, out_rate",
    [
        (48_000, 24_000),
        (44_100, 24_000),
        (24_000, 48_000),
        (24_000, 44_100),
        (16_000, 24_000),
        (24_000, 24_000),
    ],
)
async def test_other_rates(open_page: OpenPage, in_rate: int, out_rate: int) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        chunks = [await page.evaluate(RESAMPLED, [in_rate, out_rate, 1000, n]) for n in (128, 961)]
        for result in chunks:
            assert abs(result["length"] - out_rate) <= 1
            assert result["worst"] < 1e-3
        assert chunks[0] == chunks[1]
        if in_rate > out_rate:
            above = await page.evaluate(RESAMPLED, [in_rate, out_rate, 14_000, 960])
            assert above["loudest"] < 1e-3  # 14 kHz has no place in 24 kHz


PCM = """async () => {
  const {toPcm16, fromPcm16, toBase64, fromBase64, loudness} = await import('/pcm.js');
  const pcm = toPcm16(Float32Array.of(-2, -1, -0.5, 0, 0.5, 1, 2, NaN));
  return {
    pcm: [...pcm], floats: [...fromPcm16(pcm)], base64: toBase64(Int16Array.of(1, -2)),
    back: [...fromBase64('AQD+/w==')], odd: [...fromBase64('AQD+')],
    loudness: [0, 0.001, 1].map((level) => loudness(new Float32Array(100).fill(level))),
    long: fromBase64(toBase64(new Int16Array(50000).fill(7))).every((sample) => sample === 7),
  };
}"""


async def test_samples_and_their_forms(open_page: OpenPage) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        forms = await page.evaluate(PCM)
    assert forms["pcm"] == [-32768, -32768, -16384, 0, 16384, 32767, 32767, 0]
    assert forms["floats"][:3] == [-1, -1, -0.5]
    assert forms["base64"] == "AQD+/w=="
    assert forms["back"] == [1, -2]
    assert forms["odd"] == [1]
    assert forms["loudness"] == [0, pytest.approx(0, abs=0.01), 1]
    assert forms["long"]
