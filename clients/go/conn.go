package genie

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"time"
)

const (
	readBuffer      = 64 << 10
	maxAttempt      = 5 * time.Second // for a connection and its handshake
	stableAfter     = 2 * time.Second // a connection that lasted so long resets the backoff
	tcpKeepAlive    = 5 * time.Second
	minPingInterval = 100 * time.Millisecond

	// A server hangs if it is silent for these steps after a ping. Before the last step, a client that was suspended has read.
	pingSteps   = 3
	maxPingStep = time.Second
)

// conn is one connection. The goroutine that reads uses it; Client.mu protects welcomed, resumed and answered.
type conn struct {
	net.Conn
	client        *Client
	address       address
	ctx           context.Context // ends with the connection
	close         context.CancelFunc
	lines         *bufio.Scanner
	pingInterval  time.Duration
	helloAt, upAt time.Time
	welcomed      bool // `welcome` has arrived
	resumed       bool // the server knew the session
	answered      bool // the server has executed a command, so the next reconnect has the shortest backoff
}

// encodeHello returns the first two lines of each connection.
func (c *Client) encodeHello() ([]byte, error) {
	secret := make([]byte, 24)
	if _, err := rand.Read(secret); err != nil {
		return nil, fmt.Errorf("genie: %w", err)
	}
	f := &fields{
		Protocol: protocolVersion, Client: clientName, Quiet: true, Token: c.config.Token, Namespace: c.config.Namespace,
		Session: base64.RawURLEncoding.EncodeToString(secret), SessionTimeout: toMS(c.config.SessionTimeout), Ref: helloRef,
	}
	hello := encode("hello", f)
	return append(hello, encode("ping", &fields{Ref: pingRef})...), f.check(hello)
}

// run connects, reads the connection and reconnects until the client is closed.
func (c *Client) run() {
	defer close(c.stopped)
	err := c.connectAgainAndAgain()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut(err)
	c.timer.Stop()
}

// connectAgainAndAgain returns why the client must be closed.
func (c *Client) connectAgainAndAgain() error {
	isFirst := true
	for attempts := 0; ; attempts++ {
		conn, err := c.round(isFirst)
		if err != nil {
			return err
		}
		if conn != nil {
			if isFirst {
				close(c.ready)
			}
			isFirst = false
			c.disconnect(conn, c.read(conn, false))
			if conn.answered || time.Since(conn.upAt) >= stableAfter {
				attempts = 0
			}
		}
		timer := time.NewTimer(backoff(attempts))
		select {
		case <-timer.C:
		case <-c.ctx.Done():
			timer.Stop()
			return ErrClosed
		}
	}
}

// round tries each address once, and a leader that a follower names next. It returns a connection whose
// handshake is complete, or the error that ends the client, or neither.
func (c *Client) round(isFirst bool) (*conn, error) {
	queue := append([]address(nil), c.addresses...)
	tried := map[address]bool{}
	var rejection error
	isFinal, anyAnswer := true, false
	for c.ctx.Err() == nil {
		var next address
		if c.leader != nil && !tried[*c.leader] {
			next = *c.leader
		} else if len(queue) > 0 {
			next, queue = queue[0], queue[1:]
		} else {
			break
		}
		if tried[next] {
			continue
		}
		tried[next] = true
		conn, err := c.connect(next)
		if err == nil {
			return conn, nil
		}
		c.fail(next, err)
		var rejected *RejectedError
		if errors.As(err, &rejected) {
			anyAnswer, rejection = true, rejected
		}
		isFinal = isFinal && rejected != nil && rejected.isFinal()
	}
	switch {
	case c.ctx.Err() != nil:
		return nil, ErrClosed
	case isFinal:
		return nil, rejection
	case isFirst && !anyAnswer:
		c.mu.Lock()
		defer c.mu.Unlock()
		return nil, c.unavailable()
	}
	return nil, nil
}

// fail notes why a connection, or an attempt to connect, has ended, and which server leads.
func (c *Client) fail(a address, err error) {
	c.mu.Lock()
	c.lastFailure = fmt.Errorf("%v: %w", a, err)
	isOpen := c.closed == nil
	c.mu.Unlock()
	if isOpen {
		c.config.Logf("genie: the connection to %v was lost: %v", a, err)
	}
	c.leader = nil
	var rejected *RejectedError
	if errors.As(err, &rejected) && rejected.leader != "" {
		if leader, err := parseAddress(rejected.leader, defaultPort, a.tls); err == nil {
			c.leader = &leader
		}
	}
}

// connect connects to one address and completes the handshake.
func (c *Client) connect(a address) (*conn, error) {
	ctx, cancel := context.WithCancel(c.ctx)
	limit := time.AfterFunc(min(maxAttempt, c.config.ConnectTimeout/time.Duration(len(c.addresses))), cancel)
	defer limit.Stop()
	conn := &conn{client: c, address: a, ctx: ctx, close: cancel, pingInterval: min(2*time.Second, c.config.ConnectTimeout/2)}
	err := conn.dial()
	if err == nil {
		conn.helloAt = time.Now()
		if _, err = conn.Write(c.hello); err == nil {
			err = c.read(conn, true)
		}
	}
	if err != nil {
		if ctx.Err() != nil {
			err = errors.New("no answer to hello")
		}
		cancel()
		return nil, err
	}
	go c.writeLoop(conn)
	return conn, nil
}

// dial opens the connection. It is closed when its context ends.
func (conn *conn) dial() (err error) {
	dialer := &net.Dialer{KeepAlive: tcpKeepAlive}
	if conn.address.tls == nil {
		conn.Conn, err = dialer.DialContext(conn.ctx, "tcp", conn.address.hostPort)
	} else {
		conn.Conn, err = (&tls.Dialer{NetDialer: dialer, Config: conn.address.tls}).DialContext(conn.ctx, "tcp", conn.address.hostPort)
	}
	if err != nil {
		return err
	}
	tcp := conn.Conn
	if stream, isTLS := tcp.(*tls.Conn); isTLS {
		tcp = stream.NetConn() // the close of TLS could wait for a server that does not read
	}
	go func() {
		<-conn.ctx.Done()
		tcp.Close()
	}()
	conn.lines = bufio.NewScanner(conn)
	conn.lines.Buffer(make([]byte, readBuffer), maxMessage)
	return nil
}

// disconnect handles the end of a connection whose handshake was complete.
func (c *Client) disconnect(conn *conn, err error) {
	conn.close()
	c.fail(conn.address, err)
	for i, other := range c.addresses { // the next round begins with the other addresses
		if other == conn.address {
			c.addresses = append(append(c.addresses[:i:i], c.addresses[i+1:]...), other)
			break
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = nil
	c.takeOutput()
	c.outputAdded.Broadcast() // ends the writer
	for w := range c.watches {
		w.state = lagging
	}
	for _, l := range c.locks {
		sessionEndsAt := time.Now().Add(c.config.SessionTimeout)
		if l.err == nil && l.request.fields.OnDisconnect != "" && sessionEndsAt.Before(l.expiresAt) {
			l.expiresAt, l.expiryReason = sessionEndsAt, reasonDisconnected
			l.setTimer()
		}
	}
}

// takeOutput returns the commands that are not written yet, and lets calls continue that wait to add more. Called with
// Client.mu held.
func (c *Client) takeOutput() []byte {
	output := c.output
	c.output = nil
	close(c.outputTaken)
	c.outputTaken = make(chan struct{})
	return output
}

// writeLoop writes the commands to the connection.
func (c *Client) writeLoop(conn *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for c.conn == conn && len(c.output) == 0 {
			c.outputAdded.Wait()
		}
		if c.conn != conn {
			return
		}
		c.mu.Unlock()
		runtime.Gosched() // the callers that the reader has just woken add their commands first
		c.mu.Lock()
		if c.conn != conn {
			return
		}
		output := c.takeOutput()
		c.mu.Unlock()
		_, err := conn.Write(output)
		c.mu.Lock()
		if err != nil {
			conn.close() // the reader handles the end of the connection
			return
		}
	}
}

// read handles the messages of a connection until it ends, or until its handshake is complete.
func (c *Client) read(conn *conn, onlyHandshake bool) error {
	for conn.lines.Scan() {
		line := bytes.TrimSpace(conn.lines.Bytes())
		if len(line) == 0 {
			continue
		}
		m, err := decode(line)
		if err != nil {
			return err
		}
		c.mu.Lock()
		err = c.handle(conn, m)
		isUp := c.conn == conn
		c.mu.Unlock()
		if err != nil || onlyHandshake && isUp {
			return err
		}
	}
	if err := conn.lines.Err(); err != nil {
		return err
	}
	return io.EOF
}

// Read reads from the connection. It pings a server that was silent for too long, and gives it up if it does not answer.
func (conn *conn) Read(buffer []byte) (int, error) {
	wait := conn.pingInterval
	for steps := 0; ; {
		_ = conn.SetReadDeadline(time.Now().Add(wait)) // fails if the connection is closed, as the read does
		n, err := conn.Conn.Read(buffer)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if steps == pingSteps {
			return 0, errors.New("the server does not answer")
		}
		if steps > 0 || conn.ping() {
			steps++
			wait = min(maxPingStep, conn.client.config.ConnectTimeout/4)
		}
	}
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
