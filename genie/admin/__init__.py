"""The admin port: what operators and their tools see of a server, by HTTP."""

from genie.admin.app import Admin

__all__ = ["Admin"]
