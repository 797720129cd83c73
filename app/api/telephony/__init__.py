"""TODO app/api/telephony."""
