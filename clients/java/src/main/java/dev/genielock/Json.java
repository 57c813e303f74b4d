package dev.genielock;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
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

    private static final int END = 0; // beyond the text, and invalid in it
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

    /** Decodes one value; nothing but whitespace follows it. It throws an exception if that is not JSON in UTF-8, or exceeds a bound. */
    static Object decode(byte[] text, int from, int end) throws IOException {
        var json = new Json(text, from, end);
        Object value = json.value(0);
        json.next();
        if (json.at < end) throw json.invalid("the end");
        return value;
    }

    private IOException invalid(String expected) { return new IOException("invalid JSON: expected " + expected + " at byte " + at); }

    private int peek() { return at < end ? text[at] : END; }

    /** Skips whitespace, and returns the next byte, which is not taken. */
    private int next() {
        while (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') at++;
        return peek();
    }

    /** Takes the next byte if it is this one. */
    private boolean takes(char expected) {
        if (next() != expected) return false;
        at++;
        return true;
    }

    private Object value(int depth) throws IOException {
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

    private Object literal(String word, Object value) throws IOException {
        for (int i = 0; i < word.length(); i++, at++) {
            if (peek() != word.charAt(i)) throw invalid(word);
        }
        return value;
    }

    private Map<String, Object> object(int depth) throws IOException {
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

    private List<Object> list(int depth) throws IOException {
        enter(depth);
        var list = new ArrayList<Object>();
        if (takes(']')) return list;
        do {
            list.add(value(depth + 1));
        } while (takes(','));
        if (!takes(']')) throw invalid("a comma or ]");
        return list;
    }

    private void enter(int depth) throws IOException {
        at++;
        if (depth >= MAX_DEPTH) throw invalid("at most " + MAX_DEPTH + " levels");
    }

    private Object number() throws IOException {
        int start = at;
        long value = 0; // of a number without a sign, a fraction and an exponent
        for (; peek() >= '0' && peek() <= '9' && at - start < MAX_LONG_DIGITS; at++) value = 10 * value + peek() - '0';
        int plainEnd = at;
        while ("+-.eE0123456789".indexOf(peek()) >= 0) at++;
        if (at == plainEnd && at > start && (text[start] != '0' || at == start + 1)) return value;
        String number = new String(text, start, at - start, StandardCharsets.ISO_8859_1);
        var match = NUMBER.matcher(number);
        if (number.length() > MAX_NUMBER || !match.matches()) throw invalid("a value");
        if (match.group(2) != null || match.group(3) != null) return Double.valueOf(number);
        var big = new BigInteger(number);
        return big.bitLength() < Long.SIZE ? (Object) big.longValue() : big;
    }

    private String string() throws IOException {
        int start = ++at;
        boolean isPlain = true; // ASCII without escapes
        for (; peek() != '"'; at++) {
            int c = peek();
            if (c >= 0 && c < ' ') throw invalid("a quotation mark, and no control character");
            isPlain &= c > 0 && c != '\\';
            if (c == '\\') at++;
        }
        int length = at++ - start;
        if (isPlain) return new String(text, start, length, StandardCharsets.ISO_8859_1);
        return unescaped(StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(text, start, length)).toString());
    }

    private String unescaped(String escaped) throws IOException {
        var out = new StringBuilder(escaped.length());
        for (int i = 0; i < escaped.length(); i++) {
            char c = escaped.charAt(i);
            if (c == '\\') {
                c = escaped.charAt(++i);
                int index = "\"\\/bfnrt".indexOf(c);
                if (index >= 0) {
                    c = "\"\\/\b\f\n\r\t".charAt(index);
                } else {
                    String digits = escaped.substring(i + 1, Math.min(i + 5, escaped.length()));
                    if (c != 'u' || !digits.matches("[0-9a-fA-F]{4}")) throw invalid("valid escapes");
                    c = (char) Integer.parseInt(digits, 16);
                    i += 4;
                }
            }
            out.append(c);
        }
        return out.toString();
    }

    /** Encodes a value of the protocol: no fraction is lost, and no text is changed. */
    static void encode(Object value, StringBuilder out) {
        if (value instanceof String string) {
            encode(string, out);
        } else if (value instanceof Map<?, ?> map) {
            out.append('{');
            map.forEach((key, item) -> {
                separate('{', out);
                encode((String) key, out);
                out.append(':');
                encode(item, out);
            });
            out.append('}');
        } else if (value instanceof List<?> list) {
            out.append('[');
            for (Object item : list) {
                separate('[', out);
                encode(item, out);
            }
            out.append(']');
        } else if (value instanceof Double number && number == Math.rint(number) && Math.abs(number) < 1e15) {
            out.append(number.longValue());
        } else {
            out.append(value); // Long, Integer, BigInteger, Boolean, null, and a Double with a fraction
        }
    }

    /** Appends a comma, unless the next item is the first one. */
    private static void separate(char begin, StringBuilder out) {
        if (out.charAt(out.length() - 1) != begin) out.append(',');
    }

    private static void encode(String string, StringBuilder out) {
        out.append('"');
        for (int i = 0; i < string.length(); i++) {
            char c = string.charAt(i);
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < ' ') {
                out.append(String.format("\\u%04x", (int) c));
            } else if (Character.isSurrogate(c)) {
                int point = string.codePointAt(i++);
                if (point == c) throw RejectedException.badRequest("a text is not valid Unicode: there is half of a surrogate pair");
                out.appendCodePoint(point);
            } else {
                out.append(c);
            }
        }
        out.append('"');
    }
}
