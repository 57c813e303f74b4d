"""Who may do what: names with rights, and the tokens and certificates that prove a name."""

from genie.access.access import Access
from genie.access.principal import ADMIN, INSPECT, LOCK, RIGHTS, Principal

__all__ = ["ADMIN", "INSPECT", "LOCK", "RIGHTS", "Access", "Principal"]
