"""The admin port: metrics, health checks, a JSON API and a web page for operators, by HTTP."""

from genie.admin.http import AdminServer

__all__ = ["AdminServer"]
