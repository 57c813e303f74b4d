package dev.genielock;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.Function;

/** The lines of the protocol. */
final class Wire {
    static final int PROTOCOL = 1;
    static final String CLIENT = "genie-java/1.0.0-rc.1";

    /** Bytes in a line that the server accepts. */
    static final int MAX_COMMAND = 1 << 20;

    /** Bytes in a line of the server, as the protocol advises. */
    static final int MAX_MESSAGE = 2 << 20;

    /** The greatest timeout. As a queue timeout: no limit. */
    static final double MAX_TIMEOUT_MS = Integer.MAX_VALUE;

    private static final double NANOS_PER_MS = 1e6;
    private static final long MICROS_PER_S = 1_000_000;

    private Wire() {}

    /** Returns the fields of a command, given as names and values. */
    static Map<String, Object> fields(Object... namesAndValues) {
        var fields = new LinkedHashMap<String, Object>();
        for (int i = 0; i < namesAndValues.length; i += 2) fields.put((String) namesAndValues[i], namesAndValues[i + 1]);
        return fields;
    }

    /** Returns the line of a command. */
    static byte[] encode(String command, Map<String, Object> fields) {
        var text = new StringBuilder(256).append("{\"command\":\"").append(command).append("\",\"payload\":");
        Json.encode(fields, text);
        byte[] line = text.append("}\n").toString().getBytes(StandardCharsets.UTF_8);
        if (line.length > MAX_COMMAND) {
            throw RejectedException.badRequest("a command must not have more than " + MAX_COMMAND + " bytes");
        }
        return line;
    }

    /** Returns a duration in milliseconds. One beyond the limit of the protocol becomes the limit. */
    static double ms(Duration duration) {
        double ms = duration.getSeconds() * 1e3 + duration.getNano() / NANOS_PER_MS;
        return Math.min(ms, MAX_TIMEOUT_MS);
    }

    static long nanos(double ms) { return Math.round(ms * NANOS_PER_MS); }

    static Duration duration(double ms) { return Duration.ofNanos(nanos(ms)); }

    /** A message of the server. A field of another type than expected counts as missing. */
    static final class Message {
        final String command;
        final Map<?, ?> fields;

        private Message(String command, Map<?, ?> fields) {
            this.command = command;
            this.fields = fields;
        }

        /** Decodes a line. Returns nothing for JSON that is no message, as a newer server may send. */
        static Optional<Message> decode(byte[] text, int from, int end) throws Json.InvalidException {
            if (Json.decode(text, from, end) instanceof Map<?, ?> object && object.get("command") instanceof String command
                    && object.get("payload") instanceof Map<?, ?> fields) {
                return Optional.of(new Message(command, fields));
            }
            return Optional.empty();
        }

        long id() { return Wire.integer(fields, "id"); }

        String text(String name) { return Wire.text(fields, name).orElse(""); }

        long integer(String name) { return Wire.integer(fields, name); }

        double number(String name) { return Wire.number(fields, name).orElse(0.0); }

        boolean isTrue(String name) { return Boolean.TRUE.equals(fields.get(name)); }

        Optional<Double> expiresIn() { return Wire.number(fields, "expiresIn"); }

        List<String> texts(String name) { return Wire.texts(fields, name); }

        /** Returns the error that the server has sent. */
        RejectedException rejection() { return new RejectedException(text("code"), text("message"), text("leader")); }

        /** Returns the error for the end of a request. */
        GenieException notGranted() {
            String reason = text("reason");
            return switch (reason) {
                case "queue-timeout" -> new QueueTimeoutException(id(), duration(number("waited")), blockers(fields),
                        (int) integer("blockersTotal"));
                case "deadlock" -> new DeadlockException(id(), texts("cycle"), rows(fields, "waits", Wire::edge));
                case "insufficient" -> new InsufficientException(id(), big("free"), big("locked"));
                // Granted and timed out while there was no connection.
                case LockLostException.TRANSACTION_TIMEOUT -> new LockLostException(id(), reason, Optional.empty());
                default -> new RequestEndedException(id(), reason);
            };
        }

        private BigInteger big(String name) {
            Object value = fields.get(name);
            try {
                return value == null ? BigInteger.ZERO : new BigDecimal(value.toString()).toBigInteger();
            } catch (NumberFormatException e) {
                return BigInteger.ZERO; // a field of another type counts as missing
            }
        }

        Inspection inspection() {
            return new Inspection(rows(fields, "holders", Wire::request), (int) integer("holdersTotal"),
                    rows(fields, "queue", Wire::request), (int) integer("queueTotal"));
        }

        List<Change> held() { return rows(fields, "held", row -> Wire.change(row, "locked")); }

        Change change() { return Wire.change(fields, text("state")); }
    }

    private static Optional<String> text(Map<?, ?> fields, String name) {
        return fields.get(name) instanceof String text ? Optional.of(text) : Optional.empty();
    }

    private static long integer(Map<?, ?> fields, String name) {
        return fields.get(name) instanceof Number number ? number.longValue() : 0;
    }

    private static Optional<Double> number(Map<?, ?> fields, String name) {
        return fields.get(name) instanceof Number number ? Optional.of(number.doubleValue()) : Optional.empty();
    }

    private static List<String> texts(Map<?, ?> fields, String name) {
        var texts = new ArrayList<String>();
        if (fields.get(name) instanceof List<?> list) {
            for (Object item : list) texts.add(String.valueOf(item));
        }
        return List.copyOf(texts);
    }

    private static <T> List<T> rows(Map<?, ?> fields, String name, Function<Map<?, ?>, T> decode) {
        var rows = new ArrayList<T>();
        if (fields.get(name) instanceof List<?> list) {
            for (Object item : list) {
                if (item instanceof Map<?, ?> row) rows.add(decode.apply(row));
            }
        }
        return List.copyOf(rows);
    }

    private static Instant since(Map<?, ?> row) {
        long micros = Math.round(number(row, "since").orElse(0.0) * 1e3);
        return Instant.ofEpochSecond(Math.floorDiv(micros, MICROS_PER_S), Math.floorMod(micros, MICROS_PER_S) * 1000);
    }

    private static List<Blocker> blockers(Map<?, ?> fields) {
        return rows(fields, "blockers", row -> new Blocker(integer(row, "id"), text(row, "resource").orElse(""),
                text(row, "mode").orElse(""), (int) integer(row, "units"), (int) integer(row, "of"),
                text(row, "state").orElse(""), since(row), text(row, "transactionName"), text(row, "note"),
                text(row, "traceparent")));
    }

    private static DeadlockException.Wait edge(Map<?, ?> row) {
        return new DeadlockException.Wait(text(row, "resource").orElse(""), integer(row, "waiter"), integer(row, "holder"),
                (int) integer(row, "units"), (int) integer(row, "of"), text(row, "note"), text(row, "traceparent"));
    }

    private static Inspection.Request request(Map<?, ?> row) {
        return new Inspection.Request(integer(row, "id"), texts(row, "resources"), (int) integer(row, "resourcesTotal"),
                number(row, "priority").orElse(0.0), since(row), number(row, "expiresIn").map(Wire::duration),
                text(row, "transactionName"), text(row, "note"), text(row, "traceparent"), integer(row, "fence"), blockers(row),
                (int) integer(row, "blockersTotal"));
    }

    private static Change change(Map<?, ?> row, String state) {
        return new Change(state, text(row, "resource").orElse(""), text(row, "mode").orElse(""), (int) integer(row, "units"),
                (int) integer(row, "of"), integer(row, "id"), text(row, "transactionName"), false);
    }
}
