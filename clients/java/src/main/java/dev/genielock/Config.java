package dev.genielock;

import java.io.IOException;
import java.lang.System.Logger.Level;
import java.net.InetAddress;
import java.net.UnknownHostException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import java.util.function.Supplier;
import java.util.regex.Pattern;
import javax.net.ssl.SSLContext;

/** What a {@link GenieClient.Builder} and the environment say. */
final class Config {
    private static final String DEFAULT_HOST = "127.0.0.1";
    private static final String DEFAULT_PORT = "7077";
    private static final String PLAIN_PREFIX = "genie://";
    private static final String TLS_PREFIX = "genies://";
    private static final String SERVICE_LINK_PREFIX = "tcp://";
    private static final int MAX_PORT = 65_535;
    private static final int MAX_NOTE = 256;
    private static final Pattern HOST_PORT = Pattern.compile("(?:\\[([^\\[\\]/]+)\\]|([^\\[\\]/:]+))(?::(\\d{1,5}))?/?");
    private static final AtomicBoolean HAS_WARNED_OF_SERVICE_LINK = new AtomicBoolean();

    final Map<String, String> environment;
    final System.Logger logger;
    final List<Address> addresses;
    final Supplier<SSLContext> sslContext;
    final Supplier<String> token;
    final String namespace;
    final Duration connectTimeout;
    final long sessionTimeout; // ns
    final long responseTimeout; // ns
    final boolean isLazy;
    final String note; // of requests without a note of their own
    final LockOptions defaults;
    final Consumer<ConnectionEvent> onEvent;
    final Clock clock;

    /** The address of a server. */
    record Address(String host, int port, boolean isSecure) {
        @Override
        public String toString() { return (host.indexOf(':') < 0 ? host : "[" + host + "]") + ":" + port; }
    }

    Config(GenieClient.Builder builder, Clock clock) {
        environment = builder.environment;
        this.clock = clock;
        logger = builder.logger.orElseGet(() -> System.getLogger("dev.genielock"));
        namespace = builder.namespace.orElse(environment.getOrDefault("GENIE_NAMESPACE", ""));
        connectTimeout = checked("connectTimeout", builder.connectTimeout);
        sessionTimeout = checked("sessionTimeout", builder.sessionTimeout).toNanos();
        responseTimeout = checked("responseTimeout", builder.responseTimeout).toNanos();
        isLazy = builder.isLazy;
        onEvent = builder.onEvent;
        note = builder.defaults.hasNote() ? builder.defaults.note() : defaultNote(environment);
        defaults = LockOptions.DEFAULTS.overriddenBy(builder.defaults).note("");
        token = oneAtATime("token", builder.token.orElseGet(() -> () -> tokenOf(environment)));
        sslContext = oneAtATime("sslContext", builder.sslContext.orElseGet(() -> () -> Tls.context(environment)));
        String list = builder.addresses.isEmpty() ? environment.getOrDefault("GENIE_HOST", "") : String.join(",", builder.addresses);
        boolean isSecure = builder.sslContext.isPresent() || list.contains(TLS_PREFIX);
        addresses = new ArrayList<>();
        for (String text : list.isBlank() ? new String[] {DEFAULT_HOST} : list.strip().split("[, ]+")) {
            if (!text.isEmpty()) addresses.add(parseAddress(text, isSecure));
        }
        // What each connection reads again is checked here, so that a wrong setting is no error of a connection.
        token.get();
        if (isSecure) sslContext.get();
    }

    /**
     * Lets a source be called by one thread at a time. If it does not return, each attempt to connect fails when its time is over, and
     * the next attempts do not leave ever more threads behind.
     */
    private static <T> Supplier<T> oneAtATime(String name, Supplier<T> source) {
        var isCalled = new Semaphore(1);
        return () -> {
            boolean isFree = false;
            try {
                isFree = isCalled.tryAcquire() || isCalled.tryAcquire(Connection.MAX_ATTEMPT, TimeUnit.NANOSECONDS);
                if (isFree) return source.get();
            } catch (InterruptedException e) {
                Thread.currentThread().interrupt();
            } finally {
                if (isFree) isCalled.release();
            }
            throw new IllegalStateException("the source of " + name + " does not return");
        };
    }

    private static Duration checked(String name, Duration timeout) {
        if (timeout.compareTo(Duration.ofMillis(1)) < 0 || timeout.compareTo(LockOptions.NO_TIMEOUT) > 0) {
            throw new IllegalArgumentException(name + " must be between 1 ms and " + LockOptions.NO_TIMEOUT + ", not " + timeout);
        }
        return timeout;
    }

    /** Parses an address. {@code isSecure} is that of an address without a prefix. */
    Address parseAddress(String text, boolean isSecure) {
        boolean usesTls = text.startsWith(TLS_PREFIX) || isSecure && !text.startsWith(PLAIN_PREFIX);
        String hostPort = text.replaceFirst("^genies?://", "");
        var match = HOST_PORT.matcher(hostPort);
        if (match.matches()) {
            String host = match.group(1) == null ? match.group(2) : match.group(1);
            String port = match.group(3) == null ? portOfEnvironment() : match.group(3);
            int number = port.matches("\\d{1,5}") ? Integer.parseInt(port) : 0;
            if (number >= 1 && number <= MAX_PORT) return new Address(host, number, usesTls);
        }
        throw new IllegalArgumentException(
                "'" + text + "': an address is HOST, HOST:PORT or [IPv6]:PORT, with a port from 1 to " + MAX_PORT);
    }

    /** Parses the leader that a server names. It has no prefix: a server must not turn TLS off, because the token would be sent. */
    Address parseLeader(String text, boolean isSecure) {
        if (text.contains("/")) throw new IllegalArgumentException("'" + text + "': a leader is HOST:PORT or [IPv6]:PORT");
        return parseAddress(text, isSecure);
    }

    /**
     * Returns the port of addresses without a port. Kubernetes sets {@code GENIE_PORT} to {@code tcp://…} beside a Service with the
     * name genie: that is not meant for clients.
     */
    private String portOfEnvironment() {
        String port = environment.getOrDefault("GENIE_PORT", DEFAULT_PORT);
        if (!port.startsWith(SERVICE_LINK_PREFIX)) return port.isEmpty() ? DEFAULT_PORT : port;
        if (HAS_WARNED_OF_SERVICE_LINK.compareAndSet(false, true)) {
            logger.log(Level.WARNING, "GENIE_PORT is ignored, because it is a service link of Kubernetes: {0}", port);
        }
        return DEFAULT_PORT;
    }

    private static String tokenOf(Map<String, String> environment) {
        String token = environment.getOrDefault("GENIE_TOKEN", "");
        String path = environment.getOrDefault("GENIE_TOKEN_FILE", "");
        if (!token.isEmpty() || path.isEmpty()) return token;
        String text;
        try {
            text = Files.readString(Path.of(path)).strip();
        } catch (IOException e) {
            throw new IllegalArgumentException("GENIE_TOKEN_FILE: " + path + " cannot be read", e);
        }
        if (text.isEmpty() || text.split("\\s+").length != 1) {
            throw new IllegalArgumentException("GENIE_TOKEN_FILE: " + path + " must contain one word, the token");
        }
        return text;
    }

    /** Returns {@code PROGRAM PID@HOST}, or nothing if that is no valid note. */
    private static String defaultNote(Map<String, String> environment) {
        String command = System.getProperty("sun.java.command", "java").split(" ", 2)[0];
        String program = command.substring(Math.max(command.lastIndexOf('/'), command.lastIndexOf('\\')) + 1);
        String note = program + " " + ProcessHandle.current().pid() + "@" + hostName(environment);
        return note.length() > MAX_NOTE || note.chars().anyMatch(Character::isISOControl) ? "" : note;
    }

    private static String hostName(Map<String, String> environment) {
        return Optional.ofNullable(environment.get("HOSTNAME")).orElseGet(() -> {
            try {
                return InetAddress.getLocalHost().getHostName();
            } catch (UnknownHostException e) {
                return "localhost"; // the machine has no name
            }
        });
    }
}
