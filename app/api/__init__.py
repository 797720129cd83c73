"""What clients speak: the Realtime events, and the queries of the traces page."""
