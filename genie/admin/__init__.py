"""The admin port: what operators and their tools see of a server, by HTTP."""

from genie.admin.http import Admin

__all__ = ["Admin"]
