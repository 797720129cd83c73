"""Parley: a self-hosted real-time voice assistant backend.

This package is all that touches a network, a caller, or an operator. Start reading at
``server.py`` (what runs) or ``conversation/session.py`` (one caller).
"""

__version__ = "0.1.0"
