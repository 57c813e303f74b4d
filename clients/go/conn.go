package genie

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"time"
)

const (
	defaultPingInterval = 2 * time.Second
	minPingInterval     = 100 * time.Millisecond // a server could recommend a nanosecond
	leaseParts          = 3                      // how often the lease of the session is renewed while it lasts

	readBuffer   = 64 << 10
	maxInline    = 4 << 10 // bytes of a command that its caller writes to the connection
	maxUnsent    = 1 << 20 // bytes that may wait for the writer; new calls wait beyond it
	tcpKeepAlive = 5 * time.Second

	// A server hangs if it is silent for so long after a ping. That is measured in steps: before the last one, a client that
	// was suspended has read.
	maxSilence  = 3 * time.Second
	silentSteps = 3
)

// conn is one connection. A goroutine of its own makes the handshake; then the goroutine of Client.run reads it.
type conn struct {
	net.Conn
	client       *Client
	address      address
	lines        *bufio.Scanner
	err          error           // why the handshake has failed
	resumed      bool            // the server knew the session
	isAlone      bool            // no other attempt may have sent `hello` without an answer
	ctx          context.Context // ends with the connection; its cause is the reason
	close        context.CancelCauseFunc
	pingInterval time.Duration
	helloAt      time.Time
	hasRead      atomic.Bool   // something was read since the last step of the keepalive
	outputAdded  chan struct{} // with room for one value: there is output for the writer

	// Client.mu protects the rest.
	timer       *time.Timer   // limits the time until the answer to the first ping, and then keeps the session alive
	ping        *call         // the last ping of the keepalive
	silence     time.Duration // the steps since then without a message
	output      []byte        // commands for the writer
	outputTaken chan struct{} // closed, and replaced, when the output was taken
}

func (c *Client) newConn(a address) *conn {
	conn := &conn{client: c, address: a, pingInterval: defaultPingInterval}
	conn.outputAdded, conn.outputTaken = make(chan struct{}, 1), make(chan struct{})
	conn.ctx, conn.close = context.WithCancelCause(c.ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	conn.timer = time.AfterFunc(maxAttempt, conn.onTimer)
	return conn
}

// attempt makes the handshake. It also ends with the connection if the source of the token or of TLS does not return.
func (conn *conn) attempt(hostPort string) error {
	ended := make(chan error, 1)
	go func() { ended <- conn.handshake(hostPort) }()
	select {
	case err := <-ended:
		return err
	case <-conn.ctx.Done():
		return context.Cause(conn.ctx)
	}
}

// handshake opens the connection, and waits until the server accepts `hello`.
func (conn *conn) handshake(hostPort string) error {
	if err := conn.dial(hostPort); err != nil {
		return err
	}
	hello, err := conn.client.hello(conn.ctx)
	if err != nil {
		return err
	}
	conn.helloAt = time.Now()
	_ = conn.send(hello)
	for {
		m, err := conn.next()
		switch p := &m.Payload; {
		case err != nil:
			return err
		case m.Command == "error":
			return p.rejection()
		case m.Command == "welcome":
			if wanted := conn.client.config.Namespace; wanted != "" && p.Namespace != wanted {
				return fmt.Errorf("the server serves the namespace %q, not %q", p.Namespace, wanted)
			}
			conn.resumed = p.Resumed
			if interval := fromMS(p.PingInterval); interval > 0 {
				conn.pingInterval = max(interval, minPingInterval)
			}
			conn.pingInterval = min(conn.pingInterval, conn.client.config.SessionTimeout/leaseParts)
			return nil
		}
	}
}

// dial opens the connection, which is closed when its context ends.
func (conn *conn) dial(hostPort string) error {
	stream, err := conn.client.config.dial(conn.ctx, "tcp", hostPort)
	if err != nil {
		return err
	}
	context.AfterFunc(conn.ctx, func() { stream.Close() })
	if conn.Conn = stream; conn.address.isSecure {
		config, err := conn.client.config.tlsFor(conn.address.host)
		if err != nil {
			return err
		}
		secure := tls.Client(stream, config)
		if err := secure.HandshakeContext(conn.ctx); err != nil {
			return err
		}
		conn.Conn = secure
	}
	conn.lines = bufio.NewScanner(conn)
	conn.lines.Buffer(make([]byte, readBuffer), maxMessage)
	return nil
}

// read handles the messages of the server until the connection ends.
func (conn *conn) read() error {
	for {
		m, err := conn.next()
		if err == nil {
			err = conn.client.receive(conn, m)
		}
		if err != nil {
			return err
		}
	}
}

// next returns the next message.
func (conn *conn) next() (*message, error) {
	for conn.lines.Scan() {
		line := conn.lines.Bytes()
		if len(line) == 0 {
			continue
		}
		m := &message{}
		err := json.Unmarshal(line, m)
		if err == nil {
			return m, nil
		}
		if !errors.As(err, new(*json.UnmarshalTypeError)) || isKnown(m.Command) { // otherwise it is a message of a newer server
			return m, fmt.Errorf("the server sent an invalid message: %.80q (%w)", line, err)
		}
	}
	err := conn.lines.Err()
	if err == nil {
		err = io.EOF
	}
	return &message{}, err
}

// Read reads from the connection, and notes for the keepalive that the server is not silent.
func (conn *conn) Read(buffer []byte) (int, error) {
	n, err := conn.Conn.Read(buffer)
	conn.hasRead.Store(true)
	return n, err
}

// onTimer ends a handshake that takes too long. Later it renews the lease of the session with pings if the client expects
// messages, and gives up a server that does not answer them.
func (conn *conn) onTimer() {
	c := conn.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != conn {
		conn.close(errors.New("no answer to hello"))
		return
	}
	if conn.hasRead.Swap(false) {
		conn.silence = 0
	}
	step := min(conn.pingInterval, maxSilence/silentSteps)
	next := conn.pingInterval
	switch p := conn.ping; {
	case p != nil && c.calls[p.fields.Ref] == p:
		if conn.silence += step; conn.silence >= maxSilence {
			conn.close(errors.New("the server does not answer"))
			return
		}
		next = step
	case len(c.calls)+len(c.locks)+len(c.watches) == 0:
	case time.Since(c.leaseFrom) < conn.pingInterval:
		next = time.Until(c.leaseFrom.Add(conn.pingInterval))
	default:
		conn.ping, conn.silence = c.sendBackground("ping", &fields{}, nil), 0
		next = step
	}
	conn.timer.Reset(next)
}

// writeOutput writes the output until the connection ends.
func (conn *conn) writeOutput() {
	for {
		select {
		case <-conn.outputAdded:
		case <-conn.ctx.Done():
			return
		}
		runtime.Gosched() // the callers that the reader has just woken add their commands first
		conn.client.mu.Lock()
		output := conn.takeOutput()
		conn.client.mu.Unlock()
		if conn.send(output) != nil {
			return
		}
	}
}

// send writes commands. A failure does not close the connection: the reader finds its end, but first the last messages of the
// server, for example the error that says why it has ended the connection.
func (conn *conn) send(commands []byte) error {
	_, err := conn.Write(commands)
	return err
}

// takeOutput returns the output, and lets calls continue that wait to add more. Called with Client.mu held.
func (conn *conn) takeOutput() []byte {
	output := conn.output
	conn.output = nil
	close(conn.outputTaken)
	conn.outputTaken = make(chan struct{})
	return output
}
