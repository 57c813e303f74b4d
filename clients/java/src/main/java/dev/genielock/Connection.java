package dev.genielock;

import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Optional;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Consumer;
import javax.net.ssl.SSLSocket;

/** One connection. A thread of its own makes the handshake; then the thread of {@link Dialer} reads it. */
final class Connection {
    private static final long DEFAULT_PING_INTERVAL = 2_000_000_000L;
    private static final long MIN_PING_INTERVAL = 100_000_000L; // a server could recommend a nanosecond
    private static final int LEASE_PARTS = 3; // how often the lease of the session is renewed while it lasts
    static final long MAX_ATTEMPT = 5_000_000_000L; // for a connection and its handshake
    private static final int READ_BUFFER = 64 << 10;
    private static final int MAX_INLINE = 16 << 10; // bytes without an answer: the sockets have room for them, and no write blocks
    private static final long NANOS_PER_MS = 1_000_000L;
    private static final long RESERVED_FOR = NANOS_PER_MS; // without a call; then the thread of the dialer reads
    private static final long MAX_CALLER_READ = 10 * NANOS_PER_MS; // then a caller stops reading; an interrupt does not end it before
    private static final int MIN_WRITE = 2 << 10; // bytes that are written while callers may add more: the server begins earlier
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

    private final Consumer<Connection> onClose;
    private final Socket stream = new Socket();
    private InputStream in;
    private OutputStream out;
    private byte[] buffer = new byte[READ_BUFFER];
    private int from; // of the first line that was not taken
    private int searched; // for the end of that line
    private int end;
    private volatile String lateness = "looking up, connecting, or a source of the token or of TLS, takes too long"; // the handshake
    private volatile boolean hasRead; // since the last step of the keepalive

    // The mutex of the session protects the rest.
    private Future<?> timer; // limits the time until the answer to the first ping, and then keeps the session alive
    private Call ping; // the last ping of the keepalive
    private long silence; // the steps since then without a message
    private final ByteArrayOutputStream output = new ByteArrayOutputStream(); // commands that were not taken
    boolean isWriting; // a thread has taken output, and has not written it yet
    private byte[] taken; // that output: only this thread uses it
    private boolean isReading; // by the thread of the dialer, or by a caller
    private boolean isDirect; // it is the only caller, which is going to read, too
    private boolean isReserved; // a call was answered a short time ago; the next caller may read its answer itself
    private boolean isWaking; // the reader wakes several callers, which add their next commands before these are written

    /** {@code onClose} is called once, when it is closed. */
    Connection(Session session, Config.Address address, Consumer<Connection> onClose) {
        this.session = session;
        this.address = address;
        this.onClose = onClose;
        try (var held = session.mutex.hold()) {
            setTimer(MAX_ATTEMPT);
        }
    }

    /** Opens the connection, and waits until the server accepts {@code hello}. */
    void handshake(InetSocketAddress endpoint) throws IOException {
        dial(endpoint);
        byte[] hello = session.hello();
        lateness = "no answer to hello";
        helloAt = session.clock.now();
        out.write(hello);
        var welcome = next();
        for (; !welcome.command().equals("welcome"); welcome = next()) {
            if (welcome.command().equals("error")) throw welcome.rejection();
        }
        String wanted = session.config.namespace();
        if (!wanted.isEmpty() && !welcome.text("namespace").equals(wanted)) {
            throw new IOException("the server serves the namespace '" + welcome.text("namespace") + "', not '" + wanted + "'");
        }
        isResumed = welcome.isTrue("resumed");
        long interval = Wire.nanos(welcome.number("pingInterval"));
        pingInterval = Math.max(interval > 0 ? interval : DEFAULT_PING_INTERVAL, MIN_PING_INTERVAL);
        pingInterval = Math.min(pingInterval, session.config.sessionTimeout() / LEASE_PARTS);
    }

    private void dial(InetSocketAddress endpoint) throws IOException {
        stream.setTcpNoDelay(true);
        stream.setKeepAlive(true);
        stream.connect(endpoint); // the timer closes the socket
        Socket socket = stream;
        if (address.isSecure()) {
            var factory = session.config.sslContext().get().getSocketFactory();
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
            timer.cancel(false);
            session.outputChanged.signalAll();
        }
        onClose.accept(this);
    }

    /** Handles the messages of the server until the connection ends, except while a caller reads. */
    void read() throws InterruptedException {
        while (awaitTurn()) readOnce(0);
    }

    /**
     * Waits until the thread of the dialer must read: a call waits for its answer, or no caller has read for some time, and no caller
     * reads. Returns false if the connection is closed.
     */
    private boolean awaitTurn() throws InterruptedException {
        try (var held = session.mutex.hold()) {
            while (isReading || failure.get() == null && (isDirect || isReserved && !session.hasCalls())) {
                isReserved = isReading;
                session.readerChanged.awaitNanos(RESERVED_FOR);
            }
            if (failure.get() != null) return false;
            isReading = true;
            return true;
        }
    }

    /**
     * Handles the next messages, those of one read together, or the end of the connection. The turn to read ends with them, or after a
     * timeout; 0: without one.
     */
    private void readOnce(int timeoutMs) {
        var messages = new ArrayList<Wire.Message>();
        Throwable end = null;
        try {
            stream.setSoTimeout(timeoutMs);
            messages.add(next());
            for (var more = buffered(); more.isPresent(); more = buffered()) messages.add(more.get());
        } catch (SocketTimeoutException e) {
            // the thread of the dialer reads the answer
        } catch (IOException | RuntimeException | Error e) {
            end = e;
        }
        session.receive(this, messages, end);
    }

    /**
     * Writes the output in the thread of a caller, and reads the answer if no other call waits for one: this saves switches of threads.
     * A caller does not read if a timeout may end the read within a record of TLS, or if its interrupt would close the socket, as that
     * of a virtual thread. If the write blocks although few bytes have no answer, the keepalive closes the connection.
     */
    void exchange(long end) {
        Thread caller = Thread.currentThread();
        try {
            write();
            boolean mayRead = !address.isSecure() && !caller.isInterrupted() && !caller.getThreadGroup().getName().equals("VirtualThreads");
            if (endWriting(mayRead)) readOnce((int) Math.max(1, Math.min(end - System.nanoTime(), MAX_CALLER_READ) / NANOS_PER_MS));
        } catch (RuntimeException | Error e) {
            close(e);
        }
    }

    /** Writes what was taken. After a failure, the reader finds the end of the connection, but first the last messages of the server. */
    private void write() {
        try {
            out.write(taken);
        } catch (IOException e) {
            // the reader closes the connection
        }
    }

    /** Ends a write, and returns whether its thread reads next. */
    private boolean endWriting(boolean mayRead) {
        try (var held = session.mutex.hold()) {
            isWriting = false;
            takes(false);
            boolean reads = isDirect && mayRead && !isReading;
            if (isDirect && !reads) session.readerChanged.signalAll();
            isDirect = false;
            isReading |= reads;
            return reads;
        }
    }

    /** Returns the next message. */
    private Wire.Message next() throws IOException {
        Optional<Wire.Message> message;
        for (message = buffered(); message.isEmpty(); message = buffered()) fill();
        return message.get();
    }

    /** Returns the next message that was read completely. */
    private Optional<Wire.Message> buffered() throws IOException {
        Optional<Wire.Message> message = Optional.empty();
        while (message.isEmpty() && searched < end) {
            if (buffer[searched++] == '\n') {
                int start = from;
                from = searched;
                message = Wire.Message.decode(buffer, start, searched - 1);
            }
        }
        return message;
    }

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

    /** Ends the waking of callers, and writes what they have added. */
    void endWaking() {
        try (var held = session.mutex.hold()) {
            isWaking = false;
            if (!takes(true)) return;
        }
        write();
        endWriting(false);
    }

    // The rest is called with the mutex of the session locked, except writeOutput.

    void setTimer(long delay) {
        if (timer != null) timer.cancel(false);
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
                close(new IOException(lateness));
                return;
            }
            long step = Math.min(pingInterval, SILENT_STEP);
            long sinceRenewal = session.clock.now() - session.leaseFrom;
            if (ping != null && session.isOpen(ping)) {
                silence = (hasRead ? 0 : silence) + step;
                hasRead = false;
                setTimer(step);
                if (silence >= MAX_SILENCE) close(new IOException("the server does not answer"));
            } else if (session.expectsMessages() && sinceRenewal >= pingInterval) {
                ping = session.sendBackground("ping", null);
                silence = 0;
                hasRead = false;
                setTimer(step);
            } else {
                setTimer(session.expectsMessages() ? pingInterval - sinceRenewal : pingInterval);
            }
        }
    }

    /** Ends a turn to read. The thread that has read wakes a number of callers next. */
    void endTurn(int woken) {
        isReading = false;
        isReserved = woken > 0 && !address.isSecure(); // a caller that is answered may make the next call, and read its answer
        isWaking = woken > 1;
        if (session.hasCalls() || failure.get() != null) session.readerChanged.signalAll();
    }

    boolean isFull() { return output.size() > MAX_UNSENT && failure.get() == null; }

    /** Sends the line of a call. {@code isOnly}: the server has answered all earlier commands. */
    void send(Call call, boolean isOnly) {
        output.writeBytes(call.line);
        if (takes(call.isForeground)) {
            call.direct = this;
            isDirect = isOnly;
        }
        if (!isReading && !isDirect) session.readerChanged.signalAll();
    }

    private boolean isReady() { return !isWriting && output.size() > 0 && (!isWaking || output.size() >= MIN_WRITE); }

    /** Returns whether this thread must write the output next, which was taken. If it may not write, or might block, the writer writes. */
    private boolean takes(boolean mayWrite) {
        boolean takes = isReady() && mayWrite && session.openBytes <= MAX_INLINE;
        if (takes) {
            take();
        } else if (isReady()) {
            session.outputChanged.signalAll();
        }
        return takes;
    }

    private void take() {
        taken = output.toByteArray();
        output.reset();
        isWriting = true;
        session.outputTaken.signalAll();
    }

    /** Writes the output that no other thread writes, until the connection ends. */
    void writeOutput() {
        while (awaitOutput()) {
            write();
            endWriting(false);
        }
    }

    private boolean awaitOutput() {
        try (var held = session.mutex.hold()) {
            while (!isReady() && failure.get() == null) session.outputChanged.awaitUninterruptibly();
            if (failure.get() != null) return false;
            take();
            return true;
        }
    }
}
