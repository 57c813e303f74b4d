package dev.genielock;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.Function;
import java.util.regex.Pattern;

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

    /** A sum of weights: at most as many weights of 78 digits as a request may have names. */
    private static final Pattern SUM = Pattern.compile("\\d{1,100}");

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

    /** A message of the server, or an object in it, which has no command. A field of another type than expected counts as missing. */
    record Message(String command, Map<?, ?> fields) {
        /** Decodes a line. Returns nothing for a blank line, and for JSON that is no message, as a newer server may send. */
        static Optional<Message> decode(byte[] text, int from, int end) throws IOException {
            if (end == from || end == from + 1 && text[from] == '\r') return Optional.empty();
            if (Json.decode(text, from, end) instanceof Map<?, ?> object && object.get("command") instanceof String command
                    && object.get("payload") instanceof Map<?, ?> fields) {
                return Optional.of(new Message(command, fields));
            }
            return Optional.empty();
        }

        long id() { return integer("id"); }

        String text(String name) { return fields.get(name) instanceof String text ? text : ""; }

        /** Returns a text that may be missing. */
        private Optional<String> optional(String name) {
            return fields.get(name) instanceof String text ? Optional.of(text) : Optional.empty();
        }

        /** Returns an integer. One with more than 64 bits counts as missing, too: its last bits are another number. */
        long integer(String name) {
            return fields.get(name) instanceof Number number && !(number instanceof BigInteger) ? number.longValue() : 0;
        }

        private int count(String name) { return (int) integer(name); }

        double number(String name) { return fields.get(name) instanceof Number number ? number.doubleValue() : 0; }

        boolean isTrue(String name) { return Boolean.TRUE.equals(fields.get(name)); }

        /** Returns the time in ms until the end. */
        Optional<Double> expiresIn() {
            return fields.get("expiresIn") instanceof Number number ? Optional.of(number.doubleValue()) : Optional.empty();
        }

        private List<?> list(String name) { return fields.get(name) instanceof List<?> list ? list : List.of(); }

        List<String> texts(String name) { return list(name).stream().map(String::valueOf).toList(); }

        private <T> List<T> rows(String name, Function<Message, T> decode) {
            return list(name).stream().filter(Map.class::isInstance).map(row -> decode.apply(new Message("", (Map<?, ?>) row))).toList();
        }

        private BigInteger big(String name) {
            // A number with an exponent, such as 1e99999999, would be computed for minutes.
            String value = String.valueOf(fields.get(name));
            return SUM.matcher(value).matches() ? new BigInteger(value) : BigInteger.ZERO;
        }

        private Instant since() { return Instant.EPOCH.plus(Math.round(number("since") * 1e3), ChronoUnit.MICROS); }

        /** Returns the error that the server has sent. */
        RejectedException rejection() { return new RejectedException(text("code"), text("message"), text("leader")); }

        /** Returns the error for the end of a request. */
        GenieException notGranted() {
            String reason = text("reason");
            return switch (reason) {
                case "queue-timeout" -> new QueueTimeoutException(id(), duration(number("waited")), blockers(), count("blockersTotal"));
                case "deadlock" -> new DeadlockException(id(), texts("cycle"), rows("waits", Message::edge));
                case "insufficient" -> new InsufficientException(id(), big("free"), big("locked"));
                // Granted and timed out while there was no connection.
                case LockLostException.TRANSACTION_TIMEOUT -> new LockLostException(id(), reason);
                default -> new RequestEndedException(id(), reason);
            };
        }

        private List<Blocker> blockers() {
            return rows("blockers", row -> new Blocker(row.id(), row.text("resource"), row.text("mode"), row.count("units"),
                    row.count("of"), row.text("state"), row.since(), row.optional("transactionName"), row.optional("note"),
                    row.optional("traceparent")));
        }

        private DeadlockException.Wait edge() {
            return new DeadlockException.Wait(text("resource"), integer("waiter"), integer("holder"), count("units"), count("of"),
                    optional("note"), optional("traceparent"));
        }

        Inspection inspection() {
            return new Inspection(rows("holders", Message::request), count("holdersTotal"), rows("queue", Message::request),
                    count("queueTotal"));
        }

        private Inspection.Request request() {
            return new Inspection.Request(id(), texts("resources"), count("resourcesTotal"), number("priority"), since(),
                    expiresIn().map(Wire::duration), optional("transactionName"), optional("note"), optional("traceparent"),
                    integer("fence"), blockers(), count("blockersTotal"));
        }

        List<Change> held() { return rows("held", row -> row.change("locked")); }

        Change change() { return change(text("state")); }

        private Change change(String state) {
            return new Change(state, text("resource"), text("mode"), count("units"), count("of"), id(), optional("transactionName"), false);
        }
    }
}
