"""TODO app/access."""

from app.access.auth import (
    REALTIME_SUBPROTOCOL,
    AuthenticationError,
    Gatekeeper,
    Grant,
    HostError,
    OriginError,
    peer_of,
)
from app.access.client_secrets import TooManySecretsError
from app.access.connections import Connections
from app.access.rate_limits import Pacer, RateLimitedError, RateLimits, RateState

__all__ = [
    "AuthenticationError",
    "Connections",
    "Gatekeeper",
    "Grant",
    "HostError",
    "OriginError",
    "Pacer",
    "REALTIME_SUBPROTOCOL",
    "RateLimitedError",
    "RateLimits",
    "RateState",
    "TooManySecretsError",
    "peer_of",
]
