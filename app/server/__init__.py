"""The server process: lifecycle, routes, HTTP limits, start of the engines."""
