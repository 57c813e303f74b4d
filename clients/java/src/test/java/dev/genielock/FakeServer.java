package dev.genielock;

import java.io.BufferedInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;

/** A scripted server: a test accepts its connections, reads commands and sends messages. */
final class FakeServer implements AutoCloseable {
    private static final int LIMIT_MS = 20_000;

    private final ServerSocket socket;

    FakeServer() throws IOException {
        socket = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
        socket.setSoTimeout(LIMIT_MS);
    }

    String address() {
        return "127.0.0.1:" + socket.getLocalPort();
    }

    Peer accept() throws IOException {
        return new Peer(socket.accept());
    }

    /** Accepts a connection, and makes the handshake. */
    Peer handshake(boolean isResumed, String... state) throws Exception {
        Peer peer = accept();
        peer.expect("hello");
        peer.expect("ping");
        peer.send("welcome", "{\"protocol\":1,\"namespace\":\"genie\",\"pingInterval\":2000,\"quiet\":true,\"ref\":\"hello\","
                + "\"resumed\":" + isResumed + "}");
        for (String line : state) {
            peer.sendLine(line);
        }
        peer.send("pong", "{\"ref\":\"resume\"}");
        return peer;
    }

    @Override
    public void close() throws IOException {
        socket.close();
    }

    /** A connection. */
    static final class Peer implements AutoCloseable {
        private final Socket socket;
        private final InputStream in;

        private Peer(Socket socket) throws IOException {
            this.socket = socket;
            socket.setSoTimeout(LIMIT_MS);
            socket.setTcpNoDelay(true); // a line is on its way before the connection is reset
            in = new BufferedInputStream(socket.getInputStream());
        }

        /** Reads the next command, whose name must be this one, and returns its payload. */
        Map<?, ?> expect(String command) throws IOException {
            var line = new java.io.ByteArrayOutputStream();
            for (int b = in.read(); b != '\n'; b = in.read()) {
                if (b < 0) {
                    throw new IOException("the client has closed the connection, in place of " + command);
                }
                line.write(b);
            }
            Map<?, ?> message = (Map<?, ?>) Json.decode(line.toByteArray(), 0, line.size());
            if (!message.get("command").equals(command)) {
                throw new IOException("expected " + command + ", not " + line.toString(StandardCharsets.UTF_8));
            }
            return (Map<?, ?>) message.get("payload");
        }

        void send(String command, String payload) throws IOException {
            sendLine("{\"command\":\"" + command + "\",\"payload\":" + payload + "}");
        }

        void sendLine(String line) throws IOException {
            socket.getOutputStream().write((line + "\n").getBytes(StandardCharsets.UTF_8));
        }

        /** Sends a message with these fields, given as names and values. */
        void answer(String command, Object... fields) throws IOException {
            var payload = new LinkedHashMap<String, Object>();
            for (int i = 0; i < fields.length; i += 2) {
                payload.put((String) fields[i], fields[i + 1]);
            }
            var text = new StringBuilder();
            Json.encode(payload, text);
            send(command, text.toString());
        }

        /** Expects a request, and grants it. */
        Map<?, ?> grant(long id) throws Exception {
            Map<?, ?> request = expect("request");
            answer("locked", "id", id, "fence", id + 1, "ref", request.get("ref"));
            return request;
        }

        /** Returns whether the client has closed the connection, after the bytes that it has sent. */
        boolean awaitEnd() throws IOException {
            while (in.read() >= 0) {
                continue;
            }
            return true;
        }

        /** Closes the connection with a reset: the next write of the client fails. */
        void reset() throws IOException {
            socket.setSoLinger(true, 0);
            socket.close();
        }

        @Override
        public void close() throws IOException {
            socket.close();
        }
    }
}
