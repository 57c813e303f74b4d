"""For tests of Genie and of services that use it. Shipped, never imported by the server."""
