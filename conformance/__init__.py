"""The conformance kit of Genie's wire protocol: cases for clients and servers in any language. See README.md.

Needs Python 3.11 and the standard library only.
"""
