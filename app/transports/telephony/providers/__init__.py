"""One module per phone provider: its messages to and from ``PhoneProtocol``."""
