package dev.genielock;

import java.io.IOException;
import java.lang.System.Logger.Level;
import java.net.InetAddress;
import java.net.UnknownHostException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.function.Consumer;
import java.util.function.Supplier;
import java.util.regex.Pattern;
import javax.net.ssl.SSLContext;

/** What a {@link GenieClient.Builder} and the environment say. Times are in ns. {@code note}: of requests without a note of their own. */
record Config(System.Logger logger, List<Address> addresses, Supplier<SSLContext> sslContext, Supplier<String> token, String namespace,
        long connectTimeout, long sessionTimeout, long responseTimeout, boolean isLazy, String note, LockOptions defaults,
        Consumer<ConnectionEvent> onEvent, Clock clock) {
    private static final String DEFAULT_HOST = "127.0.0.1";
    private static final String DEFAULT_PORT = "7077";
    private static final String PLAIN_PREFIX = "genie://";
    private static final String TLS_PREFIX = "genies://";
    private static final String SERVICE_LINK_PREFIX = "tcp://";
    private static final int MAX_PORT = 65_535;
    private static final int MAX_NOTE = 256;
    static final int MAX_CALLS = 10; // of a source that run at once
    private static final Pattern HOST_PORT = Pattern.compile("(?:\\[([^\\[\\]/]+)\\]|([^\\[\\]/:]+))(?::(\\d{1,5}))?/?");

    /** The address of a server. */
    record Address(String host, int port, boolean isSecure) {
        /** Parses an address. {@code isSecure} is that of an address without a prefix. */
        static Address parse(String text, boolean isSecure, String defaultPort) {
            boolean usesTls = text.startsWith(TLS_PREFIX) || isSecure && !text.startsWith(PLAIN_PREFIX);
            var match = HOST_PORT.matcher(text.replaceFirst("^genies?://", ""));
            if (match.matches()) {
                String host = match.group(1) == null ? match.group(2) : match.group(1);
                String port = match.group(3) == null ? defaultPort : match.group(3);
                int number = port.matches("\\d{1,5}") ? Integer.parseInt(port) : 0;
                if (number >= 1 && number <= MAX_PORT) return new Address(host, number, usesTls);
            }
            throw new IllegalArgumentException(
                    "'" + text + "': an address is HOST, HOST:PORT or [IPv6]:PORT, with a port from 1 to " + MAX_PORT);
        }

        /** Parses the leader that a server names. It has no prefix: a server must not turn TLS off, because the token would be sent. */
        static Address parseLeader(String text, boolean isSecure) {
            if (text.contains("/")) throw new IllegalArgumentException("'" + text + "': a leader is HOST:PORT or [IPv6]:PORT");
            return parse(text, isSecure, "");
        }

        @Override
        public String toString() { return (host.indexOf(':') < 0 ? host : "[" + host + "]") + ":" + port; }
    }

    static Config of(GenieClient.Builder builder, Clock clock) {
        var environment = builder.environment;
        String given = builder.addresses.isEmpty() ? environment.getOrDefault("GENIE_HOST", "") : String.join(",", builder.addresses);
        String list = given.isBlank() ? DEFAULT_HOST : given.strip();
        boolean isSecure = builder.sslContext.isPresent() || list.contains(TLS_PREFIX);
        String port = port(environment, builder.logger);
        var config = new Config(builder.logger,
                Arrays.stream(list.split("[, ]+")).map(text -> Address.parse(text, isSecure, port)).toList(),
                limited("sslContext", builder.sslContext.orElse(() -> Tls.context(environment))),
                limited("token", builder.token), builder.namespace, builder.connectTimeout.toNanos(), builder.sessionTimeout.toNanos(),
                builder.responseTimeout.toNanos(), builder.isLazy,
                builder.defaults.hasNote() ? builder.defaults.note() : defaultNote(environment),
                builder.defaults.note(""), builder.onEvent, clock);
        // What each connection reads again is checked here, so that a wrong setting is no error of a connection.
        config.token.get();
        if (isSecure) config.sslContext.get();
        return config;
    }

    /**
     * Limits how many calls of a source run at once. If a source does not return, each attempt to connect fails when its time is over,
     * and leaves its thread behind.
     */
    static <T> Supplier<T> limited(String name, Supplier<T> source) {
        var calls = new Semaphore(MAX_CALLS);
        return () -> {
            if (!calls.tryAcquire()) throw new IllegalStateException("the source of " + name + " does not return");
            try {
                return source.get();
            } finally {
                calls.release();
            }
        };
    }

    /**
     * Returns the port of addresses without a port. Kubernetes sets {@code GENIE_PORT} to {@code tcp://…} beside a Service with the
     * name genie: that is not meant for clients.
     */
    private static String port(Map<String, String> environment, System.Logger logger) {
        String port = environment.getOrDefault("GENIE_PORT", "");
        boolean isServiceLink = port.startsWith(SERVICE_LINK_PREFIX);
        if (isServiceLink) {
            logger.log(Level.WARNING, "GENIE_PORT is ignored, because it is a service link of Kubernetes: {0}", port);
        }
        return isServiceLink || port.isEmpty() ? DEFAULT_PORT : port;
    }

    /** Returns the token of the environment. */
    static String token(Map<String, String> environment) {
        String token = environment.getOrDefault("GENIE_TOKEN", "");
        String path = environment.getOrDefault("GENIE_TOKEN_FILE", "");
        if (!token.isEmpty() || path.isEmpty()) return token;
        String text;
        try {
            text = Files.readString(Path.of(path)).strip();
        } catch (IOException e) {
            throw new IllegalArgumentException("GENIE_TOKEN_FILE: " + path + " cannot be read", e);
        }
        if (!text.matches("\\S+")) throw new IllegalArgumentException("GENIE_TOKEN_FILE: " + path + " must contain one word, the token");
        return text;
    }

    /** Returns {@code PROGRAM PID@HOST}, or nothing if that is no valid note. */
    private static String defaultNote(Map<String, String> environment) {
        String command = System.getProperty("sun.java.command", "java").split(" ", 2)[0];
        String program = command.substring(Math.max(command.lastIndexOf('/'), command.lastIndexOf('\\')) + 1);
        String host = environment.getOrDefault("HOSTNAME", "");
        try {
            host = host.isEmpty() ? InetAddress.getLocalHost().getHostName() : host;
        } catch (UnknownHostException e) {
            host = "localhost"; // the machine has no name
        }
        String note = program + " " + ProcessHandle.current().pid() + "@" + host;
        return note.length() > MAX_NOTE || note.chars().anyMatch(Character::isISOControl) ? "" : note;
    }
}
