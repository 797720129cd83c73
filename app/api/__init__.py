"""What clients speak: Realtime events, calls, chat, files of sound, traces and metrics."""
