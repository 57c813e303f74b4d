package genie

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"time"
)

const (
	readBuffer   = 64 << 10
	maxInline    = 4 << 10         // bytes of a command that its caller writes to the connection
	maxUnsent    = 1 << 20         // bytes that may wait for the writer; new calls wait beyond it
	maxAttempt   = 5 * time.Second // for a connection and its handshake
	stableAfter  = 2 * time.Second // a connection that lasted so long resets the backoff
	tcpKeepAlive = 5 * time.Second

	// A server hangs if it is silent for these steps after a ping. Before the last step, a client that was suspended has read.
	pingSteps   = 3
	maxPingStep = time.Second
)

// conn is one connection. The goroutine of Client.run reads it.
type conn struct {
	net.Conn
	client       *Client
	address      address
	ctx          context.Context // ends with the connection
	close        context.CancelFunc
	handshake    *time.Timer // closes a connection whose handshake takes too long
	pingInterval time.Duration
	helloAt      time.Time
	outputAdded  chan struct{} // with room for one value: there is output for the writer

	// Client.mu protects the rest.
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
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	conn := &conn{
		client: c, address: a, ctx: ctx, close: cancel, pingInterval: min(2*time.Second, c.config.ConnectTimeout/2),
		outputAdded: make(chan struct{}, 1), outputTaken: make(chan struct{}),
	}
	conn.handshake = time.AfterFunc(min(maxAttempt, c.config.ConnectTimeout/time.Duration(len(c.addresses))), cancel)
	defer conn.handshake.Stop()
	if err = conn.dial(); err == nil {
		err = conn.readLines()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if wasUp = c.conn == conn; wasUp {
		c.disconnect()
	} else if ctx.Err() != nil {
		err = errors.New("no answer to hello")
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
	dialer := &net.Dialer{KeepAlive: tcpKeepAlive}
	dial := dialer.DialContext
	if config := conn.address.tls; config != nil {
		dial = (&tls.Dialer{NetDialer: dialer, Config: config}).DialContext
	}
	if conn.Conn, err = dial(conn.ctx, "tcp", conn.address.hostPort); err != nil {
		return err
	}
	go func() {
		<-conn.ctx.Done()
		conn.Conn.Close()
	}()
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

// Read reads from the connection. It pings a server that was silent for too long, and gives it up if it does not answer.
func (conn *conn) Read(buffer []byte) (int, error) {
	wait := conn.pingInterval
	for steps := 0; steps <= pingSteps; {
		_ = conn.SetReadDeadline(time.Now().Add(wait)) // fails if the connection is closed, as the read does
		n, err := conn.Conn.Read(buffer)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if steps > 0 || conn.ping() {
			steps++
			wait = min(maxPingStep, conn.client.config.ConnectTimeout/4)
		}
	}
	return 0, errors.New("the server does not answer")
}

// ping pings the server if the client expects messages.
func (conn *conn) ping() bool {
	c := conn.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != conn || len(c.calls)+len(c.locks)+len(c.watches) == 0 {
		return false
	}
	c.sendBackground("ping", &fields{}, nil)
	return true
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
			conn.close() // the reader handles the end of the connection
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
