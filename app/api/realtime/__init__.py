"""The Realtime API: connections, client and server events, WebRTC calls, client secrets."""
