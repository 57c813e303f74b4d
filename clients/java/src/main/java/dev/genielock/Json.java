package dev.genielock;

import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
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

    private static final int MAX_LONG_DIGITS = 18;
    private static final Pattern NUMBER = Pattern.compile("-?(0|[1-9]\\d*)(\\.\\d+)?([eE][+-]?\\d+)?");

    private final byte[] text;
    private final int end;
    private int at;

    private Json(byte[] text, int from, int end) {
        this.text = text;
        this.at = from;
        this.end = end;
    }

    /** The text is not JSON in UTF-8, or exceeds a bound. */
    static final class InvalidException extends Exception {
        private static final long serialVersionUID = 1L;

        InvalidException(String message) { super(message); }
    }

    /** Decodes one value; nothing but whitespace follows it. */
    static Object decode(byte[] text, int from, int end) throws InvalidException {
        var json = new Json(text, from, end);
        Object value = json.value(0);
        json.skipSpace();
        if (json.at < end) throw json.invalid("the end");
        return value;
    }

    private InvalidException invalid(String expected) {
        return new InvalidException("expected " + expected + " at byte " + at);
    }

    private void skipSpace() {
        while (at < end && (text[at] == ' ' || text[at] == '\t' || text[at] == '\r' || text[at] == '\n')) at++;
    }

    private int peek() { return at < end ? text[at] : -1; }

    private Object value(int depth) throws InvalidException {
        skipSpace();
        return switch (peek()) {
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
        for (int i = 0; i < word.length(); i++, at++) {
            if (peek() != word.charAt(i)) throw invalid(word);
        }
        return value;
    }

    private Map<String, Object> object(int depth) throws InvalidException {
        enter(depth);
        var object = new HashMap<String, Object>();
        if (closes('}')) return object;
        do {
            skipSpace();
            if (peek() != '"') throw invalid("a key");
            String key = string();
            skipSpace();
            if (peek() != ':') throw invalid("a colon");
            at++;
            object.put(key, value(depth + 1));
        } while (continues('}'));
        return object;
    }

    private List<Object> list(int depth) throws InvalidException {
        enter(depth);
        var list = new ArrayList<Object>();
        if (closes(']')) return list;
        do {
            list.add(value(depth + 1));
        } while (continues(']'));
        return list;
    }

    private void enter(int depth) throws InvalidException {
        at++;
        if (depth >= MAX_DEPTH) throw invalid("at most " + MAX_DEPTH + " levels");
    }

    private boolean closes(char bracket) {
        skipSpace();
        if (peek() != bracket) return false;
        at++;
        return true;
    }

    private boolean continues(char bracket) throws InvalidException {
        if (closes(bracket)) return false;
        if (peek() != ',') throw invalid("a comma or " + bracket);
        at++;
        return true;
    }

    private Object number() throws InvalidException {
        int start = at;
        boolean isNegative = peek() == '-';
        at += isNegative ? 1 : 0;
        long value = 0;
        for (int c = peek(); c >= '0' && c <= '9'; c = peek()) {
            value = value * 10 + c - '0'; // what overflows is decoded again
            at++;
        }
        int digits = at - start - (isNegative ? 1 : 0);
        boolean isCanonical = digits > 0 && (digits == 1 || text[at - digits] != '0');
        boolean isInteger = peek() != '.' && peek() != 'e' && peek() != 'E';
        if (isCanonical && isInteger && digits <= MAX_LONG_DIGITS) return isNegative ? -value : value;
        while (at < end && "+-.eE0123456789".indexOf(text[at]) >= 0) at++;
        String number = new String(text, start, at - start, StandardCharsets.ISO_8859_1);
        if (number.length() > MAX_NUMBER || !NUMBER.matcher(number).matches()) throw invalid("a value");
        if (!isInteger) return Double.valueOf(number);
        var big = new BigInteger(number);
        return big.bitLength() < Long.SIZE ? (Object) big.longValue() : big;
    }

    private String string() throws InvalidException {
        int start = ++at;
        boolean isAscii = true;
        for (; at < end; at++) {
            byte b = text[at];
            if (b == '"') {
                String string = isAscii ? new String(text, start, at - start, StandardCharsets.ISO_8859_1) : utf8(start);
                at++;
                return string;
            }
            if (b == '\\') return escaped(start);
            if (b >= 0 && b < ' ') throw invalid("no control character");
            isAscii &= b >= 0;
        }
        throw invalid("a quotation mark");
    }

    private String utf8(int start) throws InvalidException {
        try {
            return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(text, start, at - start)).toString();
        } catch (CharacterCodingException e) {
            throw invalid("UTF-8");
        }
    }

    /** Decodes a string with escapes. {@code at} is at the first of them. */
    private String escaped(int start) throws InvalidException {
        var string = new StringBuilder(utf8(start));
        int plain = at;
        for (; at < end; at++) {
            byte b = text[at];
            if (b != '"' && b != '\\') {
                if (b >= 0 && b < ' ') throw invalid("no control character");
                continue;
            }
            string.append(utf8(plain));
            at++;
            if (b == '"') return string.toString();
            string.append(escape());
            plain = at + 1;
        }
        throw invalid("a quotation mark");
    }

    private char escape() throws InvalidException {
        return switch (peek()) {
            case '"', '\\', '/' -> (char) text[at];
            case 'b' -> '\b';
            case 'f' -> '\f';
            case 'n' -> '\n';
            case 'r' -> '\r';
            case 't' -> '\t';
            case 'u' -> unicode();
            default -> throw invalid("an escape");
        };
    }

    private char unicode() throws InvalidException {
        int unit = 0;
        for (int i = 0; i < 4; i++) {
            at++;
            int digit = Character.digit(peek(), 16);
            if (digit < 0) throw invalid("a hexadecimal digit");
            unit = unit * 16 + digit;
        }
        return (char) unit;
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
