"""TODO app/api/http."""
