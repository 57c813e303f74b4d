package dev.genielock;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** Starts real servers on free ports, for the tests, the benchmark and the example. */
public final class Servers {
    private static final long START_LIMIT_NS = TimeUnit.SECONDS.toNanos(60);
    private static final int POLL_MS = 10;

    private Servers() {}

    /** A server process. It can be killed and started again. */
    public static final class Server implements AutoCloseable {
        public final int port;
        private final ProcessBuilder builder;
        private final boolean isRedis;
        private Process process;

        private Server(int port, List<String> command, Map<String, String> settings, boolean isRedis) {
            this.port = port;
            this.isRedis = isRedis;
            builder = new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.INHERIT);
            builder.environment().keySet().removeIf(name -> name.startsWith("GENIE_"));
            builder.environment().putAll(settings);
        }

        public String address() {
            return "127.0.0.1:" + port;
        }

        /** Starts the process, and waits until it accepts connections. */
        public Server start() throws IOException, InterruptedException {
            process = builder.start();
            var output = new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8));
            if (isRedis) {
                awaitRedis();
            } else {
                awaitListening(output);
            }
            Dialer.newThread("output", () -> { // the process must never wait for a reader
                try {
                    while (output.readLine() != null) {
                        continue;
                    }
                } catch (IOException e) {
                    return; // the process has ended
                }
            }).start();
            return this;
        }

        private void awaitListening(BufferedReader output) throws IOException {
            for (String line = output.readLine(); line != null; line = output.readLine()) {
                if (line.contains("\"listening") || line.contains("listening ")) {
                    return;
                }
            }
            throw new IOException(builder.command() + " ended before it was listening");
        }

        private void awaitRedis() throws IOException, InterruptedException {
            long end = System.nanoTime() + START_LIMIT_NS;
            while (System.nanoTime() < end) {
                try (var socket = new Socket(InetAddress.getLoopbackAddress(), port)) {
                    socket.getOutputStream().write("PING\r\n".getBytes(StandardCharsets.US_ASCII));
                    if (new String(socket.getInputStream().readNBytes(5), StandardCharsets.US_ASCII).equals("+PONG")) {
                        return;
                    }
                } catch (IOException e) {
                    if (!process.isAlive()) {
                        throw e;
                    }
                }
                Thread.sleep(POLL_MS);
            }
            throw new IOException("Redis does not answer");
        }

        /** Suspends the process, or lets it continue. */
        public void signal(String name) throws IOException, InterruptedException {
            new ProcessBuilder("kill", "-" + name, Long.toString(process.pid())).start().waitFor();
        }

        /** Kills the process, if it runs. */
        public void kill() {
            if (process != null) {
                process.destroyForcibly();
                process.onExit().join();
                process = null;
            }
        }

        @Override
        public void close() {
            kill();
        }
    }

    /** Returns a Genie server that is not started yet. {@code GENIE_COMMAND} is its command; default: genie. */
    public static Server genie(Map<String, String> settings) throws IOException {
        int port = freePort();
        var all = new java.util.HashMap<String, String>();
        all.put("GENIE_PORT", Integer.toString(port));
        all.put("GENIE_ADMIN_PORT", "");
        all.putAll(settings);
        String command = System.getenv().getOrDefault("GENIE_COMMAND", "genie");
        return new Server(port, List.of(command, "serve"), all, false);
    }

    /** Returns a Redis server that is not started yet. Its data in the folder survive a kill. */
    public static Server redis(Path folder) throws IOException {
        int port = freePort();
        return new Server(port, List.of("redis-server", "--port", Integer.toString(port), "--bind", "127.0.0.1", "--dir",
                folder.toString(), "--save", "", "--appendonly", "yes", "--appendfsync", "no", "--loglevel", "warning"),
                Map.of(), true);
    }

    public static int freePort() throws IOException {
        try (var socket = new ServerSocket()) {
            socket.bind(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0));
            return socket.getLocalPort();
        }
    }
}
