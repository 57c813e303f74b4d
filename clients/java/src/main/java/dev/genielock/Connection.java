package dev.genielock;

import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Optional;
import java.util.concurrent.atomic.AtomicReference;
import javax.net.ssl.SSLSocket;

/** One connection. A thread of its own makes the handshake; then the thread of {@link Dialer} reads it. */
final class Connection {
    private static final long DEFAULT_PING_INTERVAL = 2_000_000_000L;
    private static final int LEASE_PARTS = 3; // how often the lease of the session is renewed while it lasts
    private static final long MAX_ATTEMPT = 5_000_000_000L; // for a connection and its handshake
    private static final int READ_BUFFER = 64 << 10;
    private static final int MAX_INLINE = 4 << 10; // bytes of a command that its caller writes to the connection
    private static final int MAX_UNSENT = 1 << 20; // bytes that may wait for the writer; new calls wait beyond it

    // A server hangs if it is silent for so long after a ping. That is measured in steps: before the last one, a client that was
    // suspended has read.
    private static final long MAX_SILENCE = 3_000_000_000L;
    private static final long SILENT_STEP = MAX_SILENCE / 3;

    final Session session;
    final Config.Address address;
    final AtomicReference<Throwable> failure = new AtomicReference<>(); // why it is closed; null: it is open
    boolean isResumed; // the server knew the session
    boolean isAlone; // no other attempt may have sent `hello` without an answer
    long helloAt;
    long pingInterval = DEFAULT_PING_INTERVAL;

    private final Socket stream = new Socket();
    private InputStream in;
    private OutputStream out;
    private byte[] buffer = new byte[READ_BUFFER];
    private int from; // of the first line that was not taken
    private int searched; // for the end of that line
    private int end;
    private volatile boolean hasRead; // since the last step of the keepalive

    // The mutex of the session protects the rest.
    private Clock.Timer timer; // limits the time until the answer to the first ping, and then keeps the session alive
    private Call ping; // the last ping of the keepalive
    private long silence; // the steps since then without a message
    private ByteArrayOutputStream output = new ByteArrayOutputStream(); // commands for the writer
    private boolean isWriting; // the writer has taken output, and has not written it yet
    private boolean isWaking; // the reader wakes callers, which add their next commands before the writer begins

    Connection(Session session, Config.Address address) {
        this.session = session;
        this.address = address;
        try (var held = session.mutex.hold()) {
            setTimer(MAX_ATTEMPT);
        }
    }

    /** Opens the connection, and waits until the server accepts {@code hello}. */
    void handshake(InetSocketAddress endpoint) throws IOException, Json.InvalidException {
        dial(endpoint);
        byte[] hello = session.hello();
        helloAt = session.clock.now();
        out.write(hello);
        for (;;) {
            var message = next();
            if (message.command.equals("error")) throw message.rejection();
            if (message.command.equals("welcome")) {
                onWelcome(message);
                return;
            }
        }
    }

    private void onWelcome(Wire.Message message) throws IOException {
        String wanted = session.config.namespace;
        if (!wanted.isEmpty() && !message.text("namespace").equals(wanted)) {
            throw new IOException("the server serves the namespace '" + message.text("namespace") + "', not '" + wanted + "'");
        }
        isResumed = message.isTrue("resumed");
        long interval = Wire.nanos(message.number("pingInterval"));
        pingInterval = Math.min(interval > 0 ? interval : DEFAULT_PING_INTERVAL, session.config.sessionTimeout / LEASE_PARTS);
    }

    private void dial(InetSocketAddress endpoint) throws IOException {
        stream.setTcpNoDelay(true);
        stream.setKeepAlive(true);
        stream.connect(endpoint); // the timer closes the socket
        Socket socket = stream;
        if (address.isSecure()) {
            var factory = session.config.sslContext.get().getSocketFactory();
            var secure = (SSLSocket) factory.createSocket(stream, address.host(), address.port(), true);
            var parameters = secure.getSSLParameters();
            parameters.setEndpointIdentificationAlgorithm("HTTPS");
            secure.setSSLParameters(parameters);
            secure.startHandshake();
            socket = secure;
        }
        in = socket.getInputStream();
        out = socket.getOutputStream();
    }

    /** Closes the connection, unless it was closed before. Its reader handles the end. */
    void close(Throwable cause) {
        if (!failure.compareAndSet(null, cause)) return;
        try {
            stream.close();
        } catch (IOException e) {
            cause.addSuppressed(e); // the socket is closed nevertheless
        }
        try (var held = session.mutex.hold()) {
            timer.cancel();
            session.outputChanged.signalAll();
        }
    }

    /** Handles the messages of the server until the connection ends, those of one read together. */
    void read() throws IOException, Json.InvalidException {
        for (;;) {
            var messages = new ArrayList<Wire.Message>();
            messages.add(next());
            try {
                for (var more = buffered(); more.isPresent(); more = buffered()) messages.add(more.get());
            } finally {
                session.receive(this, messages);
            }
        }
    }

    /** Returns the next message. */
    private Wire.Message next() throws IOException, Json.InvalidException {
        for (;;) {
            Optional<Wire.Message> message = buffered();
            if (message.isPresent()) return message.get();
            fill();
        }
    }

    /** Returns the next message that was read completely. */
    private Optional<Wire.Message> buffered() throws Json.InvalidException {
        for (; searched < end; searched++) {
            if (buffer[searched] == '\n') {
                int start = from;
                from = searched + 1;
                var message = isBlank(start, searched) ? Optional.<Wire.Message>empty() : Wire.Message.decode(buffer, start, searched);
                if (message.isPresent()) {
                    searched = from;
                    return message;
                }
            }
        }
        return Optional.empty();
    }

    private boolean isBlank(int start, int stop) { return start == stop || stop - start == 1 && buffer[start] == '\r'; }

    /** Reads more bytes. The first unread byte is at 0 then. */
    private void fill() throws IOException {
        System.arraycopy(buffer, from, buffer, 0, end - from);
        end -= from;
        searched -= from;
        from = 0;
        if (end == Wire.MAX_MESSAGE) {
            throw new IOException("the server sent a line of more than " + Wire.MAX_MESSAGE + " bytes");
        }
        if (end == buffer.length) buffer = Arrays.copyOf(buffer, Math.min(2 * end, Wire.MAX_MESSAGE));
        int n = in.read(buffer, end, buffer.length - end);
        if (n < 0) throw new EOFException("the server has closed the connection");
        end += n;
        hasRead = true;
    }

    // The rest is called with the mutex of the session locked, except writeOutput.

    void setTimer(long delay) {
        if (timer != null) timer.cancel();
        timer = session.clock.schedule(this::onTimer, Math.max(delay, 0));
    }

    /**
     * Ends a handshake that takes too long. Later it renews the lease of the session with pings if the client expects messages, and
     * gives up a server that does not answer them.
     */
    private void onTimer() {
        try (var held = session.mutex.hold()) {
            if (failure.get() != null) return;
            if (session.connection != this) {
                close(new IOException("no answer to hello"));
                return;
            }
            if (hasRead) {
                hasRead = false;
                silence = 0;
            }
            long step = Math.min(pingInterval, SILENT_STEP);
            long next = pingInterval;
            if (ping != null && session.isOpen(ping)) {
                silence += step;
                if (silence >= MAX_SILENCE) {
                    close(new IOException("the server does not answer"));
                    return;
                }
                next = step;
            } else if (session.expectsMessages()) {
                long sinceRenewal = session.clock.now() - session.leaseFrom;
                if (sinceRenewal < pingInterval) {
                    next = pingInterval - sinceRenewal;
                } else {
                    ping = session.sendBackground("ping");
                    silence = 0;
                    next = step;
                }
            }
            setTimer(next);
        }
    }

    /** Begins or ends the waking of callers by the reader. */
    void setWaking(boolean isBegin) {
        isWaking = isBegin;
        if (!isBegin && output.size() > 0) session.outputChanged.signalAll();
    }

    boolean isFull() { return output.size() > MAX_UNSENT && failure.get() == null; }

    /** Sends a line. {@code isOnly}: the server has answered all earlier commands. */
    void send(byte[] line, boolean isOnly) {
        if (isOnly && output.size() == 0 && !isWriting && line.length <= MAX_INLINE) {
            // This saves a switch of threads. It does not block: the server has answered, so it has read, all earlier commands.
            try {
                out.write(line);
            } catch (IOException e) {
                close(e);
            }
            return;
        }
        if (output.size() == 0 && !isWaking) session.outputChanged.signalAll();
        output.writeBytes(line);
    }

    /** Writes the output until the connection ends. */
    void writeOutput() {
        while (failure.get() == null) {
            byte[] taken = takeOutput();
            try {
                out.write(taken);
            } catch (IOException e) {
                close(e);
            }
            try (var held = session.mutex.hold()) {
                isWriting = false;
            }
        }
    }

    private byte[] takeOutput() {
        try (var held = session.mutex.hold()) {
            while ((output.size() == 0 || isWaking) && failure.get() == null) session.outputChanged.awaitUninterruptibly();
        }
        try (var held = session.mutex.hold()) {
            byte[] taken = output.toByteArray();
            output.reset();
            isWriting = true;
            session.outputTaken.signalAll();
            return taken;
        }
    }
}
