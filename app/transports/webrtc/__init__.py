"""WebRTC calls: one audio track each way and one data channel, over aiortc's ICE, DTLS and SCTP."""
