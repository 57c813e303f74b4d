"""The wire, without sockets: lines of JSON in, typed commands and messages out. Used by the server and the clients."""
