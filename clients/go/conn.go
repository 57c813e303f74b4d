package genie

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"time"
)

const (
	maxUnsent    = 1 << 20 // bytes that may wait to be sent; new calls wait beyond it
	maxInline    = 4 << 10 // bytes that a call writes itself
	readBuffer   = 64 << 10
	maxAttempt   = 5 * time.Second // for a connection and its handshake
	maxRedirects = 3               // in one round over the addresses
	stableAfter  = 2 * time.Second // a connection that lasted so long resets the backoff
	tcpKeepAlive = 5 * time.Second
)

// conn is one connection. Client.mu protects writing and drained.
type conn struct {
	net.Conn
	tcp     net.Conn // below TLS
	address address
	buffer  []byte // received bytes without the end of their line
	scanned int    // bytes of the buffer that were searched for it
	wake    chan struct{}
	closed  chan struct{} // closed when the connection is given up
	spare   []byte
	writing bool
	drained chan struct{} // closed when bytes were written; nil: no call waits for it
}

// Close closes the connection at once. The close of TLS could wait for a server that does not read.
func (conn *conn) Close() error { return conn.tcp.Close() }

func (c *Client) now() time.Duration { return time.Since(c.start) }

// unlock releases the mutex, after it has started what the holder has caused: the output and the timer. A
// command that is alone is written here, which saves a switch of goroutines. That cannot block: the
// server has answered all earlier commands, so it has read them. Otherwise the writer goroutine
// writes the commands of all callers together.
func (c *Client) unlock() {
	s, conn := c.session, c.conn
	switch {
	case conn == nil:
	case s.closeReason != "":
		conn.Close()
	case len(s.out) == 0 || conn.writing:
	case len(s.out) <= maxInline && !s.busy(1):
		if _, err := conn.Write(s.out); err != nil {
			conn.Close() // the reader handles the end of the connection
		}
		s.out = s.out[:0]
	default:
		conn.wakeWriter()
	}
	if s.nextTimer < c.timerAt {
		c.timerAt = s.nextTimer
		c.timer.Reset(max(0, c.timerAt-c.now()))
	}
	c.mu.Unlock()
}

func (conn *conn) wakeWriter() {
	select {
	case conn.wake <- struct{}{}:
	default: // it is awake
	}
}

// writeLoop writes the output of the session that its callers do not write themselves.
func (c *Client) writeLoop(conn *conn) {
	for {
		select {
		case <-conn.wake:
		case <-conn.closed:
			return
		}
		runtime.Gosched() // the callers that the reader has just woken add their commands first
		c.mu.Lock()
		for c.conn == conn && len(c.session.out) > 0 {
			output := c.session.out
			c.session.out, conn.writing = conn.spare[:0], true
			c.mu.Unlock()
			_, err := conn.Write(output)
			c.mu.Lock()
			conn.writing, conn.spare = false, nil
			if cap(output) <= maxUnsent {
				conn.spare = output
			}
			if conn.drained != nil {
				close(conn.drained)
				conn.drained = nil
			}
			if err != nil {
				conn.Close()
				break
			}
		}
		c.mu.Unlock()
	}
}

// admit returns an error if no call is possible. It waits while too many bytes are unsent. Called with the mutex held.
func (c *Client) admit(ctx context.Context) error {
	for {
		if c.session.closed != nil {
			return c.session.closed
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		conn := c.conn
		if conn == nil || len(c.session.out) <= maxUnsent {
			return nil
		}
		if conn.drained == nil {
			conn.drained = make(chan struct{})
		}
		drained := conn.drained
		c.mu.Unlock()
		select {
		case <-drained:
		case <-conn.closed:
		case <-ctx.Done():
		}
		c.mu.Lock()
	}
}

// run reads the connection and reconnects until the client is closed.
func (c *Client) run(conn *conn) {
	defer close(c.stopped)
	for {
		err := c.read(conn)
		c.disconnect(conn, err)
		for conn = nil; conn == nil; {
			if !sleep(c.ctx, c.wait.next()) {
				return
			}
			var rejection error
			conn, rejection = c.round(c.ctx)
			if rejection != nil {
				c.mu.Lock()
				c.session.shut(rejection)
				c.unlock()
				return
			}
		}
	}
}

// read handles the messages of a connection until it ends.
func (c *Client) read(conn *conn) error {
	for {
		if err := conn.fill(); err != nil {
			return err
		}
		c.mu.Lock()
		err := c.handleLines(conn)
		c.unlock()
		if err != nil {
			return err
		}
		runtime.Gosched() // the callers that were woken run before the next read
	}
}

// fill reads once and appends the bytes to the buffer.
func (conn *conn) fill() error {
	if free := cap(conn.buffer) - len(conn.buffer); free == 0 {
		size := max(2*cap(conn.buffer), readBuffer)
		if size > maxMessage {
			return fmt.Errorf("the server sent a line of more than %d bytes", maxMessage/2)
		}
		conn.buffer = append(make([]byte, 0, size), conn.buffer...)
	}
	n, err := conn.Read(conn.buffer[len(conn.buffer):cap(conn.buffer)])
	conn.buffer = conn.buffer[:len(conn.buffer)+n]
	if n > 0 {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return errors.New("the server closed it")
	}
	return err
}

// handleLines handles the complete lines in the buffer. Called with the mutex held.
func (c *Client) handleLines(conn *conn) error {
	now := c.now()
	c.session.onData(now)
	rest := conn.buffer
	for c.session.closeReason == "" {
		end := bytes.IndexByte(rest[conn.scanned:], '\n')
		if end < 0 {
			conn.scanned = len(rest)
			break
		}
		end += conn.scanned
		conn.scanned = 0
		line := rest[:end]
		rest = rest[end+1:]
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		if err := c.session.handle(line, now); err != nil {
			return err
		}
	}
	if c.session.closeReason != "" {
		return errors.New(c.session.closeReason)
	}
	conn.buffer = conn.buffer[:copy(conn.buffer, rest)]
	return nil
}

// disconnect handles the end of a connection whose handshake was complete.
func (c *Client) disconnect(conn *conn, err error) {
	conn.Close()
	close(conn.closed)
	c.mu.Lock()
	defer c.unlock()
	if c.session.closeReason != "" {
		err = errors.New(c.session.closeReason)
	}
	c.fail(conn.address, err)
	if c.session.answered || c.now()-c.connectedAt >= stableAfter {
		c.wait.reset()
	}
	c.conn = nil
	for i, other := range c.addresses { // the next round begins with the next address
		if other == conn.address {
			c.addresses = append(append([]address(nil), c.addresses[i+1:]...), c.addresses[:i+1]...)
			break
		}
	}
	c.session.disconnected(c.now())
}

// fail notes why a connection, or an attempt to connect, has ended. Called with the mutex held.
func (c *Client) fail(a address, err error) {
	c.lastFailure = fmt.Sprintf("%v: %v", a, err)
	if c.session.closed == nil {
		c.config.Logf("genie: the connection to %v was lost: %v", a, err)
	}
	c.leader = nil
	if c.session.redirect != "" {
		if leader, err := parseAddress(c.session.redirect, "7077", a.tls); err == nil {
			c.leader = &leader
		}
	}
}

// connectFirst makes rounds of attempts until there is a connection.
func (c *Client) connectFirst(ctx context.Context) (*conn, error) {
	for {
		conn, rejection := c.round(ctx)
		if conn != nil || rejection != nil {
			return conn, rejection
		}
		if !c.session.anyAnswer || !sleep(ctx, c.wait.next()) {
			return nil, c.unavailable()
		}
	}
}

// round tries each address once, and a leader that a follower names next. It returns a connection whose
// handshake is complete, or the error with which every server has rejected the client for good, or neither.
func (c *Client) round(ctx context.Context) (*conn, error) {
	remaining := append([]address(nil), c.addresses...)
	tried := map[address]bool{}
	var rejection error
	for redirects, final := 0, true; ctx.Err() == nil; {
		var next address
		if leader := c.leader; leader != nil && !tried[*leader] && redirects < maxRedirects {
			next = *leader
			redirects++
		} else if len(remaining) > 0 {
			next, remaining = remaining[0], remaining[1:]
			if tried[next] {
				continue
			}
		} else if final {
			return nil, rejection
		} else {
			return nil, nil
		}
		tried[next] = true
		conn, err := c.connect(ctx, next)
		if err == nil {
			return conn, nil
		}
		c.mu.Lock()
		c.fail(next, err)
		if c.session.rejection == nil {
			final = false
		} else {
			rejection = c.session.rejection
		}
		c.session.disconnected(c.now())
		c.unlock()
	}
	return nil, nil
}

// connect connects to one address and completes the handshake.
func (c *Client) connect(ctx context.Context, a address) (*conn, error) {
	c.mu.Lock()
	c.session.connected(c.now())
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, min(maxAttempt, c.config.ConnectTimeout/time.Duration(len(c.addresses))))
	defer cancel()
	dialer := net.Dialer{KeepAlive: tcpKeepAlive}
	stream, err := dialer.DialContext(ctx, "tcp", a.hostPort)
	if err != nil {
		return nil, err
	}
	tcp := stream
	stop := closeWhenDone(ctx, tcp)
	if a.tls != nil {
		config := a.tls
		if config.ServerName == "" {
			config = config.Clone()
			config.ServerName, _, _ = net.SplitHostPort(a.hostPort)
		}
		stream = tls.Client(stream, config)
	}
	conn := &conn{Conn: stream, tcp: tcp, address: a, wake: make(chan struct{}, 1), closed: make(chan struct{})}
	if err = c.handshake(conn); !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		tcp.Close()
		if ctx.Err() != nil {
			err = errors.New("no answer to hello")
		}
		return nil, err
	}
	c.mu.Lock()
	c.conn, c.connectedAt = conn, c.now()
	if c.ctx.Err() != nil { // Close did not see this connection
		conn.Close()
	}
	go c.writeLoop(conn)
	c.unlock()
	return conn, nil
}

func (c *Client) handshake(conn *conn) error {
	c.mu.Lock()
	c.session.helloAt = c.now()
	c.mu.Unlock()
	if _, err := conn.Write(c.hello); err != nil {
		return err
	}
	for {
		if err := conn.fill(); err != nil {
			return err
		}
		c.mu.Lock()
		err := c.handleLines(conn)
		isUp := c.session.phase == up
		c.unlock()
		if err != nil || isUp {
			return err
		}
	}
}

// closeWhenDone closes a connection when ctx ends. stop ends that, and returns false if ctx has ended before.
func closeWhenDone(ctx context.Context, stream net.Conn) (stop func() bool) {
	stopped, ended := make(chan struct{}), make(chan bool)
	go func() {
		select {
		case <-ctx.Done():
			stream.Close()
			ended <- false
		case <-stopped:
			ended <- true
		}
	}()
	return func() bool {
		close(stopped)
		return <-ended
	}
}

// onTimer runs the timers of the session.
func (c *Client) onTimer() {
	c.mu.Lock()
	defer c.unlock()
	c.timerAt = never
	if c.session.closed == nil {
		c.session.onTimer(c.now(), c.unavailableLocked)
	}
}

// unavailable returns an ErrUnavailable with the reason of the last failure.
func (c *Client) unavailable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unavailableLocked()
}

func (c *Client) unavailableLocked() error {
	if c.conn != nil {
		return fmt.Errorf("%w: %v does not answer", ErrUnavailable, c.conn.address)
	}
	return fmt.Errorf("%w: %s", ErrUnavailable, c.lastFailure)
}

// sleep waits, and returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
