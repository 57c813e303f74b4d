"""Clients and servers of the wire protocol, proxies, certificates and clocks."""
