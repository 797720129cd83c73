"""API keys, client secrets, rate limits, and the open connections."""

from app.access.auth import (
    REALTIME_SUBPROTOCOL,
    AuthenticationError,
    Authenticator,
    HostError,
    OriginError,
    Principal,
    peer_of,
)
from app.access.client_secrets import TooManySecretsError
from app.access.connections import Connections
from app.access.rate_limits import RateLimitedError, RateLimiter, RateLimits, RateState

__all__ = [
    "AuthenticationError",
    "Connections",
    "Authenticator",
    "Principal",
    "HostError",
    "OriginError",
    "RateLimiter",
    "REALTIME_SUBPROTOCOL",
    "RateLimitedError",
    "RateLimits",
    "RateState",
    "TooManySecretsError",
    "peer_of",
]
