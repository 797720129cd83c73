"""TODO app/transports/telephony/providers."""
