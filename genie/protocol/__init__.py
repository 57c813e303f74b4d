"""The wire protocol without I/O: decodes lines of JSON into typed commands and messages, and encodes them."""
