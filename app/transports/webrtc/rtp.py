"""RTP and RTCP (RFC 3550) of one audio stream each way, on a DTLS transport of aiortc.

aiortc's own receiver keeps 80 ms of audio back, loses 320 ms for one lost packet, and runs a thread
a call; its sender encodes in a pool. Both are objects that the transport calls, so ours take their
place: decoding and encoding a frame costs 0.1 to 0.3 ms, here and now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import zip_longest

from aiortc import RTCDtlsTransport
from aiortc.clock import current_ntp_time
from aiortc.rtcrtpparameters import (
    RTCRtpCodecParameters,
    RTCRtpReceiveParameters,
    RTCRtpSendParameters,
)
from aiortc.rtcrtpreceiver import StreamStatistics
from aiortc.rtp import (
    AnyRtcpPacket,
    RtcpByePacket,
    RtcpReceiverInfo,
    RtcpRrPacket,
    RtcpSdesPacket,
    RtcpSenderInfo,
    RtcpSourceInfo,
    RtcpSrPacket,
    RtpPacket,
)
from aiortc.utils import random16, random32

from app.clock import Clock
from app.transports.webrtc.jitter import RTP_RATE, Gap, Packet, Piece, ReceiveBuffer
from app.transports.webrtc.opus import DECODED_RATE, FRAME_S, OpusDecoder, OpusEncoder
from audio.frame import Samples

logger = logging.getLogger(__name__)

_FRAME_TICKS = round(FRAME_S * RTP_RATE)
_FRAME_NS = round(FRAME_S * 1e9)
# Later than this, the sender does not catch up packet by packet but goes on from now.
_MAX_BEHIND_NS = 200_000_000
_REPORT_EVERY_S = 1.0


class AudioReceiver:
    """Packets in, audio out: ``on_audio(samples, received_ns)`` with float32 mono at 48 kHz."""

    def __init__(
        self, payload_type: int, clock: Clock, on_audio: Callable[[Samples, int], None]
    ) -> None:
        self.payload_type = payload_type
        self.buffer = ReceiveBuffer()
        self.decoder = OpusDecoder()
        self.ssrc: int | None = None
        self._statistics = StreamStatistics(RTP_RATE)
        self._clock = clock
        self._on_audio = on_audio
        self._timer: asyncio.TimerHandle | None = None
        self._last_report = (0, 0)  # middle of the NTP time of the last sender report, when it came
        self._is_closed = False

    def register(self, transport: RTCDtlsTransport) -> None:
        """Take the packets of ``transport`` from now on."""
        transport._register_rtp_receiver(self, RTCRtpReceiveParameters(codecs=[self._codec()]))

    def close(self) -> None:
        """No more audio after this call."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def report(self) -> RtcpReceiverInfo | None:
        """What we tell the sender about its stream."""
        if self.ssrc is None or self._statistics.max_seq is None:
            return None
        lsr, came_ns = self._last_report
        delay_s = (self._clock.now_ns() - came_ns) / 1e9 if lsr else 0.0
        return RtcpReceiverInfo(
            ssrc=self.ssrc,
            fraction_lost=self._statistics.fraction_lost,
            packets_lost=self._statistics.packets_lost,
            highest_sequence=self._statistics.cycles + self._statistics.max_seq,
            jitter=self._statistics.jitter,
            lsr=lsr,
            dlsr=min(int(delay_s * 65_536), 0xFFFFFFFF),
        )

    # --- called by the transport ---

    async def _handle_rtp_packet(self, packet: RtpPacket, arrival_time_ms: int) -> None:
        if self._is_closed or packet.payload_type != self.payload_type:
            return
        now_ns = self._clock.now_ns()
        if packet.ssrc != self.ssrc:  # the first stream, or another one in its place
            self.ssrc = packet.ssrc
            self.buffer, self._statistics = ReceiveBuffer(), StreamStatistics(RTP_RATE)
        self._statistics.add(packet)
        self._deliver(
            self.buffer.push(
                Packet(packet.sequence_number, packet.timestamp, packet.payload, now_ns)
            )
        )

    async def _handle_rtcp_packet(self, packet: AnyRtcpPacket) -> None:
        if isinstance(packet, RtcpSrPacket):
            middle = (packet.sender_info.ntp_timestamp >> 16) & 0xFFFFFFFF
            self._last_report = (middle, self._clock.now_ns())

    def _handle_disconnect(self) -> None:
        self.close()

    # --- inside ---

    def _codec(self) -> RTCRtpCodecParameters:
        return RTCRtpCodecParameters(
            mimeType="audio/opus", clockRate=RTP_RATE, channels=2, payloadType=self.payload_type
        )

    def _deliver(self, pieces: list[Piece]) -> None:
        for piece, following in zip_longest(pieces, pieces[1:]):
            if isinstance(piece, Gap):
                # What comes next often repeats the last of what is missing.
                repeat = following.payload if isinstance(following, Packet) else b""
                self._on_audio(self._fill(piece, repeat), piece.arrived_ns)
            else:
                samples = self.decoder.decode(piece.payload)
                if len(samples):
                    self._on_audio(samples, piece.arrived_ns)
        self._watch()

    def _fill(self, gap: Gap, following: bytes) -> Samples:
        num_samples = gap.num_ticks * DECODED_RATE // RTP_RATE
        if gap.is_loss:
            return self.decoder.conceal(num_samples, following)
        return self.decoder.pause(num_samples)

    def _watch(self) -> None:
        """Be called when a packet has been waited for long enough, if no other one comes before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ns = self.buffer.deadline_ns
        if deadline_ns is not None and not self._is_closed:
            wait_s = max(0, deadline_ns - self._clock.now_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._deliver(self.buffer.poll(self._clock.now_ns()))


class AudioSender:
    """Frames out, one every 20 ms by the clock, each asked for when it is due."""

    def __init__(self, payload_type: int, ssrc: int, cname: str, clock: Clock) -> None:
        self.payload_type = payload_type
        self.cname = cname
        self.num_packets = 0
        self.num_skipped_frames = 0
        self._ssrc = ssrc  # by this name aiortc's transport looks for it
        self._clock = clock
        self._encoder = OpusEncoder()
        self._sequence_number = random16() >> 1
        self._timestamp = random32()
        self._num_octets = 0
        self._sent_at_ntp = 0

    async def run(self, transport: RTCDtlsTransport, next_frame: Callable[[], bytes]) -> None:
        """Send until cancelled, or until the transport is gone.

        A loop that comes late sends what is due at once; one that comes very late skips: the peer's
        clock has moved on too.
        """
        transport._register_rtp_sender(self, RTCRtpSendParameters())
        due_ns = self._clock.now_ns()
        try:
            while True:
                await self._send(transport, next_frame())
                due_ns += _FRAME_NS
                behind_ns = self._clock.now_ns() - due_ns
                if behind_ns > _MAX_BEHIND_NS:
                    num_frames = behind_ns // _FRAME_NS
                    self.num_skipped_frames += num_frames
                    self._timestamp += num_frames * _FRAME_TICKS
                    due_ns += num_frames * _FRAME_NS
                elif behind_ns < 0:
                    await self._clock.sleep(-behind_ns / 1e9)
        except ConnectionError:
            logger.debug("the transport is gone; nothing more is sent")
        finally:
            transport._unregister_rtp_sender(self)

    def report(self) -> RtcpSrPacket | None:
        """The sender report; None before the first packet."""
        if not self.num_packets:
            return None
        return RtcpSrPacket(
            ssrc=self._ssrc,
            sender_info=RtcpSenderInfo(
                ntp_timestamp=self._sent_at_ntp,
                rtp_timestamp=(self._timestamp - _FRAME_TICKS) & 0xFFFFFFFF,
                packet_count=self.num_packets & 0xFFFFFFFF,
                octet_count=self._num_octets & 0xFFFFFFFF,
            ),
        )

    async def _send(self, transport: RTCDtlsTransport, pcm: bytes) -> None:
        payload = self._encoder.encode(pcm)
        packet = RtpPacket(
            payload_type=self.payload_type,
            marker=1 if not self.num_packets else 0,
            sequence_number=self._sequence_number & 0xFFFF,
            timestamp=self._timestamp & 0xFFFFFFFF,
            ssrc=self._ssrc,
            payload=payload,
        )
        self._sequence_number += 1
        self._timestamp += _FRAME_TICKS
        self._sent_at_ntp = current_ntp_time()
        await transport._send_rtp(packet.serialize())
        self.num_packets += 1
        self._num_octets += len(payload)

    async def _handle_rtcp_packet(self, packet: AnyRtcpPacket) -> None:
        """Reports of the peer about our stream change nothing: there is nothing to adapt."""


async def report(
    transport: RTCDtlsTransport,
    clock: Clock,
    sender: AudioSender | None,
    receiver: AudioReceiver | None,
    ssrc: int,
    cname: str,
) -> None:
    """Send RTCP reports once a second until cancelled; says goodbye then."""
    source = RtcpSourceInfo(ssrc=ssrc, items=[(1, cname.encode())])
    try:
        while True:
            await clock.sleep(_REPORT_EVERY_S)
            info = receiver.report() if receiver else None
            sent = sender.report() if sender else None
            head: AnyRtcpPacket = sent or RtcpRrPacket(ssrc=ssrc)
            if info is not None:
                assert isinstance(head, RtcpSrPacket | RtcpRrPacket)
                head.reports.append(info)
            await transport._send_rtp(bytes(head) + bytes(RtcpSdesPacket(chunks=[source])))
    except ConnectionError:
        logger.debug("the transport is gone; no more reports")
    except asyncio.CancelledError:
        if transport.state == "connected":
            await transport._send_rtp(bytes(RtcpByePacket(sources=[ssrc])))
        raise
