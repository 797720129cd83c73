"""Phone calls over HTTP and WebSocket: webhooks, authentication, one call."""
