package genie

import (
	"bufio"
	"context"
	"crypto/tls"
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
	leaseParts          = 3 // how often the lease of the session is renewed while it lasts

	readBuffer   = 64 << 10
	maxInline    = 4 << 10         // bytes of a command that its caller writes to the connection
	maxUnsent    = 1 << 20         // bytes that may wait for the writer; new calls wait beyond it
	maxAttempt   = 5 * time.Second // for a connection and its handshake
	stableAfter  = 2 * time.Second // a connection that lasted so long resets the backoff
	tcpKeepAlive = 5 * time.Second

	// A server hangs if it is silent for so long after a ping. That is measured in steps: before the last one, a client that
	// was suspended has read.
	maxSilence  = 3 * time.Second
	silentSteps = 3
)

// conn is one connection. The goroutine of Client.run reads it.
type conn struct {
	net.Conn
	client       *Client
	address      address
	ctx          context.Context // ends with the connection; its cause is the reason
	close        context.CancelCauseFunc
	pingInterval time.Duration
	helloAt      time.Time
	hasRead      atomic.Bool   // something was read since the last step of the keepalive
	outputAdded  chan struct{} // with room for one value: there is output for the writer

	// Client.mu protects the rest.
	timer       *time.Timer   // limits the handshake, and then keeps the session alive
	ping        *call         // the last ping of the keepalive
	silence     time.Duration // the steps since then without a message
	resumed     bool          // the server knew the session
	output      []byte        // commands for the writer
	outputTaken chan struct{} // closed, and replaced, when the output was taken
}

// run connects in rounds, until the client is closed or all servers reject it.
func (c *Client) run() {
	defer close(c.stopped)
	var err error
	for err == nil {
		err = c.round()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut(err)
}

// round tries each address once, and a leader that a server names next, until the handshake with one of them is complete and
// its connection has ended. Then it waits. The next round begins with the addresses after it. An error ends the client.
func (c *Client) round() error {
	tried := map[address]bool{{}: true} // the zero address: no leader is known
	var rejected *RejectedError
	isFinal, wasUp := true, false
	for left := len(c.addresses); (left > 0 || !tried[c.leader]) && !wasUp && c.ctx.Err() == nil; {
		next := c.leader
		if tried[next] {
			next = c.addresses[0]
			c.addresses = append(c.addresses[1:], next)
			left--
		}
		if !tried[next] {
			var err error
			tried[next] = true
			wasUp, err = c.serve(next)
			isFinal = isFinal && !wasUp && errors.As(err, &rejected) && rejected.isFinal()
		}
	}
	if isFinal && rejected != nil {
		return rejected
	}
	select {
	case <-time.After(backoff(c.failedRounds)):
		c.failedRounds++
		return nil
	case <-c.ctx.Done():
		return ErrClosed
	}
}

// serve connects to a server and handles its messages until the connection ends. It returns whether the handshake was
// complete, and why the connection has ended.
func (c *Client) serve(a address) (wasUp bool, err error) {
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer cancel(nil)
	conn := &conn{
		client: c, address: a, ctx: ctx, close: cancel, pingInterval: c.pingInterval(defaultPingInterval),
		outputAdded: make(chan struct{}, 1), outputTaken: make(chan struct{}),
	}
	c.mu.Lock()
	conn.timer = time.AfterFunc(min(maxAttempt, c.config.ConnectTimeout/time.Duration(len(c.addresses))), conn.onTimer)
	c.mu.Unlock()
	defer conn.timer.Stop()
	if err = conn.dial(); err == nil {
		err = conn.readLines()
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if wasUp = c.conn == conn; wasUp {
		c.disconnect()
	}
	if c.lastFailure = fmt.Errorf("%s: %w", a.hostPort, err); c.closed == nil {
		c.log("the connection was lost: %v", c.lastFailure)
	}
	c.leader = address{}
	var rejected *RejectedError
	if errors.As(err, &rejected) {
		c.leader, _ = parseAddress(rejected.leader, defaultPort, a.tls)
	}
	return wasUp, err
}

// dial opens the connection, which is closed when its context ends, and sends `hello`.
func (conn *conn) dial() (err error) {
	dial := conn.client.config.dial
	if dial == nil {
		dial = (&net.Dialer{KeepAlive: tcpKeepAlive}).DialContext
	}
	stream, err := dial(conn.ctx, "tcp", conn.address.hostPort)
	if err != nil {
		return err
	}
	context.AfterFunc(conn.ctx, func() { stream.Close() })
	if conn.Conn = stream; conn.address.tls != nil {
		config := conn.address.tls.Clone()
		if host, _, _ := net.SplitHostPort(conn.address.hostPort); config.ServerName == "" {
			config.ServerName = host
		}
		secure := tls.Client(stream, config)
		if err := secure.HandshakeContext(conn.ctx); err != nil {
			return err
		}
		conn.Conn = secure
	}
	conn.helloAt = time.Now()
	_, err = conn.Write(conn.client.hello)
	return err
}

// readLines handles the messages of the server until the connection ends.
func (conn *conn) readLines() error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(make([]byte, readBuffer), maxMessage)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		if err := conn.client.receive(conn, lines.Bytes()); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return io.EOF
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
	step := min(conn.pingInterval, maxSilence/silentSteps, c.config.ConnectTimeout/4)
	next := conn.pingInterval
	switch p := conn.ping; {
	case p != nil && c.calls[p.fields.Ref] == p:
		if conn.silence += step; conn.silence >= min(maxSilence, c.config.ConnectTimeout*silentSteps/4) {
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

// pingInterval returns after which time without an answer a server is pinged that recommends the interval.
func (c *Client) pingInterval(recommended time.Duration) time.Duration {
	return min(recommended, c.config.SessionTimeout/leaseParts, c.config.ConnectTimeout/2)
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
		if _, err := conn.Write(output); err != nil {
			conn.close(err) // the reader handles the end of the connection
			return
		}
	}
}

// takeOutput returns the output, and lets calls continue that wait to add more. Called with Client.mu held.
func (conn *conn) takeOutput() []byte {
	output := conn.output
	conn.output = nil
	close(conn.outputTaken)
	conn.outputTaken = make(chan struct{})
	return output
}
