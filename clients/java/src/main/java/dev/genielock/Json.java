package dev.genielock;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Pattern;

/**
 * The part of JSON that the protocol needs. Values are {@code Map}, {@code List}, {@code String}, {@code Long},
 * {@code BigInteger}, {@code Double}, {@code Boolean} and {@code null}.
 */
final class Json {
    /** The nesting depth of a message; the protocol needs 6. */
    private static final int MAX_DEPTH = 32;

    /** Characters of a number. The time to convert a number grows with the square of its length. */
    private static final int MAX_NUMBER = 400;

    private static final char REPLACEMENT = 0xfffd;
    private static final char END = 0; // beyond the text, and invalid in it
    private static final int MAX_LONG_DIGITS = 18;
    private static final Pattern NUMBER = Pattern.compile("-?(0|[1-9]\\d*)(\\.\\d+)?([eE][+-]?\\d+)?");

    private final String text;
    private int at;

    private Json(String text) { this.text = text; }

    /** The text is not JSON in UTF-8, or exceeds a bound. */
    static final class InvalidException extends IOException {
        private static final long serialVersionUID = 1L;

        InvalidException(String message) { super(message); }
    }

    /** Decodes one value; nothing but whitespace follows it. */
    static Object decode(byte[] bytes, int from, int end) throws InvalidException {
        var text = new String(bytes, from, end - from, StandardCharsets.UTF_8);
        if (text.indexOf(REPLACEMENT) >= 0) { // it may stand for bytes that are not UTF-8
            byte[] again = text.getBytes(StandardCharsets.UTF_8);
            if (!Arrays.equals(again, 0, again.length, bytes, from, end)) throw new InvalidException("expected UTF-8");
        }
        var json = new Json(text);
        Object value = json.value(0);
        json.next();
        if (json.at < text.length()) throw json.invalid("the end");
        return value;
    }

    private InvalidException invalid(String expected) {
        return new InvalidException("expected " + expected + " at character " + at);
    }

    private char peek() { return at < text.length() ? text.charAt(at) : END; }

    /** Skips whitespace, and returns the next character, which is not taken. */
    private char next() {
        while (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') at++;
        return peek();
    }

    /** Takes the next character if it is this one. */
    private boolean takes(char expected) {
        if (next() != expected) return false;
        at++;
        return true;
    }

    private Object value(int depth) throws InvalidException {
        return switch (next()) {
            case '{' -> object(depth);
            case '[' -> list(depth);
            case '"' -> string();
            case 't' -> literal("true", Boolean.TRUE);
            case 'f' -> literal("false", Boolean.FALSE);
            case 'n' -> literal("null", null);
            default -> number();
        };
    }

    private Object literal(String word, Object value) throws InvalidException {
        if (!text.startsWith(word, at)) throw invalid(word);
        at += word.length();
        return value;
    }

    private Map<String, Object> object(int depth) throws InvalidException {
        enter(depth);
        var object = new HashMap<String, Object>();
        if (takes('}')) return object;
        do {
            if (next() != '"') throw invalid("a key");
            String key = string();
            if (!takes(':')) throw invalid("a colon");
            object.put(key, value(depth + 1));
        } while (takes(','));
        if (!takes('}')) throw invalid("a comma or }");
        return object;
    }

    private List<Object> list(int depth) throws InvalidException {
        enter(depth);
        var list = new ArrayList<Object>();
        if (takes(']')) return list;
        do {
            list.add(value(depth + 1));
        } while (takes(','));
        if (!takes(']')) throw invalid("a comma or ]");
        return list;
    }

    private void enter(int depth) throws InvalidException {
        at++;
        if (depth >= MAX_DEPTH) throw invalid("at most " + MAX_DEPTH + " levels");
    }

    private Object number() throws InvalidException {
        int start = at;
        while ("+-.eE0123456789".indexOf(peek()) >= 0) at++;
        int length = at - start;
        if (length <= MAX_LONG_DIGITS && isCanonical(start)) return Long.parseLong(text, start, at, 10);
        String number = text.substring(start, at);
        if (length > MAX_NUMBER || !NUMBER.matcher(number).matches()) throw invalid("a value");
        if (!number.matches("-?\\d+")) return Double.valueOf(number);
        var big = new BigInteger(number);
        return big.bitLength() < Long.SIZE ? (Object) big.longValue() : big;
    }

    /** Returns whether the number that ends at {@code at} has digits only, and no leading zero. */
    private boolean isCanonical(int start) {
        for (int i = start; i < at; i++) {
            if (text.charAt(i) < '0' || text.charAt(i) > '9') return false;
        }
        return at == start + 1 || at > start && text.charAt(start) != '0';
    }

    private String string() throws InvalidException {
        int plain = ++at; // where the characters begin that were not copied
        StringBuilder unescaped = null; // until the first escape
        for (;; at++) {
            char c = peek();
            if (c == '"') {
                String rest = text.substring(plain, at++);
                return unescaped == null ? rest : unescaped.append(rest).toString();
            }
            if (c < ' ') throw invalid("a quotation mark, and no control character");
            if (c == '\\') {
                unescaped = unescaped == null ? new StringBuilder() : unescaped;
                unescaped.append(text, plain, at++).append(escape());
                plain = at + 1;
            }
        }
    }

    private char escape() throws InvalidException {
        int index = "\"\\/bfnrt".indexOf(peek());
        if (index >= 0) return "\"\\/\b\f\n\r\t".charAt(index);
        if (peek() != 'u') throw invalid("an escape");
        String digits = text.substring(at + 1, Math.min(at + 5, text.length()));
        if (!digits.matches("[0-9a-fA-F]{4}")) throw invalid("four hexadecimal digits");
        at += 4;
        return (char) Integer.parseInt(digits, 16);
    }

    /** Encodes a value of the protocol: no fraction is lost, and no text is changed. */
    static void encode(Object value, StringBuilder out) {
        if (value instanceof String string) {
            encode(string, out);
        } else if (value instanceof Map<?, ?> map) {
            String separator = "{";
            for (var entry : map.entrySet()) {
                out.append(separator);
                encode((String) entry.getKey(), out);
                out.append(':');
                encode(entry.getValue(), out);
                separator = ",";
            }
            out.append(map.isEmpty() ? "{}" : "}");
        } else if (value instanceof List<?> list) {
            String separator = "[";
            for (Object item : list) {
                out.append(separator);
                encode(item, out);
                separator = ",";
            }
            out.append(list.isEmpty() ? "[]" : "]");
        } else if (value instanceof Double number && number == Math.rint(number) && Math.abs(number) < 1e15) {
            out.append(number.longValue());
        } else {
            out.append(value); // Long, Integer, BigInteger, Boolean, null, and a Double with a fraction
        }
    }

    private static void encode(String string, StringBuilder out) {
        out.append('"');
        for (int i = 0; i < string.length(); i++) {
            char c = string.charAt(i);
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < ' ') {
                out.append("\\u00").append(Character.forDigit(c >> 4, 16)).append(Character.forDigit(c & 15, 16));
            } else if (Character.isSurrogate(c)) {
                if (Character.isLowSurrogate(c) || i + 1 == string.length() || !Character.isLowSurrogate(string.charAt(i + 1))) {
                    throw RejectedException.badRequest("a text is not valid Unicode: there is half of a surrogate pair");
                }
                out.append(c).append(string.charAt(++i));
            } else {
                out.append(c);
            }
        }
        out.append('"');
    }
}
