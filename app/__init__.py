"""Parley: a self-hosted real-time voice assistant backend.

This package is all that touches a network, a caller, or an operator. Start reading at
``conversation/session.py``: one caller's whole life.
"""

__version__ = "0.1.0"
