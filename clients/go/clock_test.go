//go:build go1.25

package genie

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// These tests have a clock of their own, which advances when all goroutines wait. So they measure times exactly, and take none.

// memoryNetwork connects clients with scripted servers by pipes. A server that accepts nothing is a machine that does not
// answer, or that refuses connections.
type memoryNetwork struct {
	t       testing.TB
	servers map[string]chan *peer // by HOST:PORT
	begin   time.Time

	mu      sync.Mutex
	refuses map[string]bool
	dialled []string // HOST:PORT, and when
}

func newNetwork(t testing.TB, servers ...string) *memoryNetwork {
	n := &memoryNetwork{t: t, servers: map[string]chan *peer{}, refuses: map[string]bool{}, begin: time.Now()}
	for _, server := range servers {
		n.servers[server] = make(chan *peer, 3)
	}
	return n
}

func (n *memoryNetwork) dial(ctx context.Context, _, hostPort string) (net.Conn, error) {
	n.mu.Lock()
	n.dialled = append(n.dialled, fmt.Sprint(hostPort, " ", time.Since(n.begin)))
	refuses := n.refuses[hostPort]
	n.mu.Unlock()
	if refuses {
		return nil, syscall.ECONNREFUSED
	}
	client, server := net.Pipe()
	select {
	case n.servers[hostPort] <- &peer{server, n.t, bufio.NewReader(pump(server)), true}:
		return client, nil
	case <-ctx.Done(): // nil has no room
		server.Close()
		return nil, ctx.Err()
	}
}

func (n *memoryNetwork) config(config Config) Config {
	config.dial = n.dial
	return forTests(config)
}

// close ends the client and the connections that wait for a server, also if the test has failed.
func (n *memoryNetwork) close(client *Client, peers ...*peer) {
	for _, p := range peers {
		p.Close()
	}
	if client != nil {
		client.Close()
	}
	for _, server := range n.servers {
		for len(server) > 0 {
			(<-server).Close()
		}
	}
}

// pump reads everything at once, as a kernel does, so that the other side never waits in a write.
func pump(from io.Reader) io.Reader {
	to := &pumped{arrived: make(chan []byte, 1000)}
	go func() {
		defer close(to.arrived)
		for {
			buffer := make([]byte, 4096)
			n, err := from.Read(buffer)
			if err != nil {
				return
			}
			to.arrived <- buffer[:n]
		}
	}()
	return to
}

type pumped struct {
	arrived chan []byte
	rest    []byte
}

func (p *pumped) Read(buffer []byte) (int, error) {
	if len(p.rest) == 0 {
		more, open := <-p.arrived
		if !open {
			return 0, io.EOF
		}
		p.rest = more
	}
	n := copy(buffer, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

const onlyServer = "10.0.0.1:7077"

// world runs a test with a clock of its own, and with a client that is connected to a scripted server.
func world(t *testing.T, config Config, test func(t *testing.T, p *peer, client *Client)) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, onlyServer)
		config := network.config(config)
		config.Addresses = []string{onlyServer}
		dialled := start(func() (*Client, error) { return Dial(background, config) })
		p := <-network.servers[onlyServer]
		p.welcome()
		client, err := dialled()
		if err != nil {
			t.Fatal(err)
		}
		defer network.close(client, p)
		test(t, p, client)
	})
}

// welcome answers `hello` and `ping`.
func (p *peer) welcome() {
	p.t.Helper()
	p.expect("hello")
	p.send(`{"command":"welcome","payload":{"protocol":1,"pingInterval":2000,"namespace":"genie","resumed":false,"ref":"hello"}}`)
	p.pong()
}

func (p *peer) pong() {
	p.t.Helper()
	p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, p.expect("ping").text("ref")))
}

func (p *peer) holdBound(client *Client, opts ...Option) *Lock {
	p.t.Helper()
	acquired := acquire(client, "a", append(opts, TransactionTimeout(time.Hour), ReleaseOnDisconnect())...)
	p.grant(17)
	lock, err := acquired()
	if err != nil {
		p.t.Fatal(err)
	}
	return lock
}

func TestALeaseEndsAtAHalfOpenConnection(t *testing.T) {
	for _, c := range []struct{ session, interval time.Duration }{
		{10 * time.Second, 2 * time.Second}, {time.Minute, 2 * time.Second}, {300 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(c.session.String(), func(t *testing.T) {
			world(t, Config{SessionTimeout: c.session}, func(t *testing.T, p *peer, client *Client) {
				lock, renewed := p.holdBound(client), time.Now()
				for i := 0; i < 5; i++ {
					ping := p.expect("ping")
					if passed := time.Since(renewed); passed != c.interval {
						t.Fatal("pinged after", passed)
					}
					renewed = time.Now()
					time.Sleep(c.interval / 2) // the lease counts from the ping, not from its answer
					p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, ping.text("ref")))
				}
				expectDone(t, lock.Done())
				if passed := time.Since(renewed); passed != c.session {
					t.Fatal("lost after", passed)
				}
				expectLost(t, lock, reasonDisconnected)
			})
		})
	}
}

func TestMessagesThatAnswerNothingDoNotRenewTheLease(t *testing.T) {
	world(t, Config{}, func(t *testing.T, p *peer, client *Client) {
		lock, renewed := p.holdBound(client), time.Now()
		for lock.Err() == nil {
			p.send(`{"command":"event","payload":{"state":"locked","resource":"t/2","mode":"shared","id":2}}`)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if passed := time.Since(renewed); passed != 10*time.Second {
			t.Fatal("lost after", passed)
		}
		expectLost(t, lock, reasonDisconnected)
	})
}

func TestAClientThatWaitsRenewsItsLease(t *testing.T) {
	world(t, Config{}, func(t *testing.T, p *peer, client *Client) {
		time.Sleep(time.Hour) // without requests there are no pings
		acquired := acquire(client, "a", QueueTimeout(NoTimeout), TransactionTimeout(time.Hour), ReleaseOnDisconnect())
		request, begin := p.expect("request"), time.Now()
		for i := 0; i < 10; i++ {
			p.pong()
		}
		if passed := time.Since(begin); passed > 20*time.Second {
			t.Fatal("10 pings took", passed)
		}
		p.send(locked1(17, request.text("ref")))
		lock, err := acquired()
		if err != nil || lock.Err() != nil {
			t.Fatal(err, lock)
		}
		p.Close()
		expectDone(t, lock.Done())
		expectLost(t, lock, reasonDisconnected)
	})
}

func TestALockThatIsNotBoundOutlivesTheLease(t *testing.T) {
	world(t, Config{}, func(t *testing.T, p *peer, client *Client) {
		acquired := acquire(client, "a", TransactionTimeout(time.Hour))
		p.grant(17)
		lock, err := acquired()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour - time.Nanosecond)
		if lock.Err() != nil {
			t.Fatal(lock.Err())
		}
		time.Sleep(time.Nanosecond)
		expectLost(t, lock, reasonTransactionTimeout)
	})
}

func TestAHungServerIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, "10.0.0.1:1", "10.0.0.2:2")
		config := network.config(Config{Addresses: []string{"10.0.0.1:1", "10.0.0.2:2"}})
		dialled := start(func() (*Client, error) { return Dial(background, config) })
		p := <-network.servers["10.0.0.1:1"]
		p.welcome()
		client, err := dialled()
		if err != nil {
			t.Fatal(err)
		}
		acquired := acquire(client, "a")
		ref, begin := p.expect("request").text("ref"), time.Now()
		p.expect("ping")
		second := <-network.servers["10.0.0.2:2"]
		if passed := time.Since(begin); passed < 5*time.Second || passed > 5*time.Second+50*time.Millisecond {
			t.Fatal("given up after", passed)
		}
		defer network.close(client, p, second)
		second.welcome()
		if again := second.grant(17).text("ref"); again != ref {
			t.Fatal(again)
		}
		if _, err := acquired(); err != nil {
			t.Fatal(err)
		}
	})
}

// Machines that do not answer cost 250 ms each, whether a name has several addresses or several are configured.
func TestAttemptsAreStaggered(t *testing.T) {
	for name, addresses := range map[string][]string{
		"a name": {"genie"}, "names": {"genie-1", "genie-2"}, "addresses": {"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := newNetwork(t, "10.0.0.4:7077")
				network.refuses["10.0.0.2:7077"] = true
				config := network.config(Config{Addresses: addresses})
				config.lookUpHost = func(_ context.Context, host string) ([]string, error) {
					switch host {
					case "genie-1":
						return []string{"10.0.0.1", "10.0.0.2"}, nil
					case "genie-2":
						time.Sleep(100 * time.Millisecond)
						return []string{"10.0.0.3", "10.0.0.4"}, nil
					}
					return []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"}, nil
				}
				dialled := start(func() (*Client, error) { return Dial(background, config) })
				p := <-network.servers["10.0.0.4:7077"]
				p.welcome()
				client, err := dialled()
				defer network.close(client, p)
				times := "[10.0.0.1:7077 0s 10.0.0.2:7077 250ms 10.0.0.3:7077 250ms 10.0.0.4:7077 500ms]" // 2 refuses at once
				if name == "names" {                                                                      // that of the second name arrive later, and are tried first
					times = "[10.0.0.1:7077 0s 10.0.0.3:7077 250ms 10.0.0.4:7077 500ms]"
				}
				if err != nil || fmt.Sprint(network.dialled) != times {
					t.Fatal(err, network.dialled)
				}
			})
		})
	}
}

// The server whose handshake is complete first is used; the others are closed.
func TestASlowServerIsClosedAsSoonAsAnotherAccepts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, "10.0.0.1:1", "10.0.0.2:2")
		dialled := start(func() (*Client, error) {
			return Dial(background, network.config(Config{Addresses: []string{"10.0.0.1:1", "10.0.0.2:2"}}))
		})
		slow := <-network.servers["10.0.0.1:1"]
		slow.expect("hello")
		second := <-network.servers["10.0.0.2:2"]
		second.welcome()
		slow.expectClosed()
		client, err := dialled()
		if err != nil || time.Since(network.begin) != stagger {
			t.Fatal(err, time.Since(network.begin))
		}
		network.close(client, second)
	})
}

func TestDialTriesUntilConnectTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t)
		network.refuses[onlyServer] = true
		config := network.config(Config{Addresses: []string{onlyServer}, ConnectTimeout: 7 * time.Second})
		_, err := Dial(background, config)
		if expectError(t, err, ErrUnavailable); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal("the error does not tell why:", err)
		}
		if passed := time.Since(network.begin); passed != 7*time.Second || len(network.dialled) < 6 {
			t.Fatal(passed, network.dialled)
		}
	})
}

func TestALazyClientConnectsInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, onlyServer)
		network.refuses[onlyServer] = true
		config := network.config(Config{Addresses: []string{onlyServer}, Lazy: true, ResponseTimeout: time.Second})
		client, err := Dial(background, config)
		if err != nil || time.Since(network.begin) != 0 {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		expectError(t, client.Ping(background), ErrUnavailable)
		acquired := acquire(client, "a", QueueTimeout(time.Minute))
		network.mu.Lock()
		network.refuses[onlyServer] = false
		network.mu.Unlock()
		p := <-network.servers[onlyServer]
		defer network.close(client, p)
		p.welcome()
		p.grant(17)
		if _, err := acquired(); err != nil {
			t.Fatal(err)
		}
	})
}

// Without an answer, a call fails a second after the time for which it would wait for others.
func TestCallsFailFast(t *testing.T) {
	for name, isConnected := range map[string]bool{"connected": true, "not connected": false} {
		t.Run(name, func(t *testing.T) {
			world(t, Config{ResponseTimeout: defaultResponseTimeout}, func(t *testing.T, p *peer, client *Client) {
				lock := p.holdBound(client)
				if !isConnected {
					p.Close()
				}
				for name, c := range map[string]struct {
					call  func() error
					limit time.Duration
				}{
					"TryAcquire": {func() error { _, err := client.TryAcquire(background, []string{"b"}); return err }, time.Second},
					"AcquireAny": {func() error {
						_, err := client.AcquireAny(background, AnyOf{Resources: []string{"b"}, Target: big.NewInt(1)})
						return err
					}, time.Second},
					"Acquire": {func() error {
						_, err := client.Acquire(background, []string{"b"}, QueueTimeout(500*time.Millisecond))
						return err
					}, 1500 * time.Millisecond},
					"Extend":  {func() error { return lock.Extend(background, time.Minute) }, time.Second},
					"Ping":    {func() error { return client.Ping(background) }, time.Second},
					"Inspect": {func() error { _, err := client.Inspect(background, Query{}); return err }, time.Second},
				} {
					begin := time.Now()
					if err := c.call(); !errors.Is(err, ErrUnavailable) || time.Since(begin) != c.limit {
						t.Error(name, err, time.Since(begin))
					}
				}
			})
		})
	}
}

// The source of a token, and a lookup, may not end: the next round follows nevertheless.
func TestATokenSourceThatIgnoresItsContextFailsOneAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, onlyServer)
		config := network.config(Config{Addresses: []string{onlyServer}, ConnectTimeout: time.Minute})
		blocked := make(chan struct{})
		var calls atomic.Int32
		config.TokenSource = func(context.Context) (string, error) {
			if calls.Add(1) == 1 {
				<-blocked
			}
			return "token", nil
		}
		dialled := start(func() (*Client, error) { return Dial(background, config) })
		failed := <-network.servers[onlyServer]
		p := <-network.servers[onlyServer]
		p.welcome()
		client, err := dialled()
		defer network.close(client, failed, p)
		close(blocked)
		if passed := time.Since(network.begin); err != nil || passed > maxAttempt+time.Second {
			t.Fatal(err, passed)
		}
	})
}

// Each call of a source that does not return occupies a goroutine, so their number is limited.
func TestTheCallsOfATokenSourceThatDoNotReturnAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, onlyServer)
		network.servers[onlyServer] = make(chan *peer, 100)
		config := network.config(Config{Addresses: []string{onlyServer}, Lazy: true})
		blocked := make(chan struct{})
		var calls atomic.Int32
		config.TokenSource = func(context.Context) (string, error) {
			calls.Add(1)
			<-blocked
			return "token", nil
		}
		client, err := Dial(background, config)
		if err != nil {
			t.Fatal(err)
		}
		defer network.close(client)
		defer close(blocked)
		time.Sleep(3 * maxTokenCalls * maxAttempt)
		if n := calls.Load(); n != maxTokenCalls {
			t.Fatal(n)
		}
	})
}

func TestALookupThatDoesNotEndFailsOneAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, onlyServer)
		config := network.config(Config{Addresses: []string{"genie"}, ConnectTimeout: time.Minute})
		calls := 0
		config.lookUpHost = func(ctx context.Context, host string) ([]string, error) {
			if calls++; calls == 1 {
				<-ctx.Done()
			}
			return []string{"10.0.0.1"}, ctx.Err()
		}
		dialled := start(func() (*Client, error) { return Dial(background, config) })
		p := <-network.servers[onlyServer]
		p.welcome()
		client, err := dialled()
		defer network.close(client, p)
		if err != nil {
			t.Fatal(err)
		}
	})
}

// A resolver asks its second name server after 5 s, in each lookup.
func TestALookupThatIsTooLateForItsRoundIsForTheNextOne(t *testing.T) {
	for _, duration := range []time.Duration{maxAttempt + time.Millisecond, maxAttempt + time.Second, 3 * maxAttempt} {
		t.Run(duration.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := newNetwork(t, onlyServer)
				config := network.config(Config{Addresses: []string{"genie"}, ConnectTimeout: time.Minute})
				calls := 0
				config.lookUpHost = func(ctx context.Context, host string) ([]string, error) {
					calls++
					select {
					case <-time.After(duration):
						return []string{"10.0.0.1"}, nil
					case <-ctx.Done():
						return nil, ctx.Err()
					}
				}
				network.refuses["genie:7077"] = true
				dialled := start(func() (*Client, error) { return Dial(background, config) })
				var p *peer
				select {
				case p = <-network.servers[onlyServer]:
				case <-time.After(time.Minute):
					_, err := dialled()
					t.Fatal(err, calls)
				}
				p.welcome()
				client, err := dialled()
				defer network.close(client, p)
				if passed := time.Since(network.begin); err != nil || calls != 1 || passed > duration+3*time.Second {
					t.Fatal(err, calls, passed)
				}
			})
		})
	}
}

func TestACallWhoseCallerHasGivenUpIsNotRepeated(t *testing.T) {
	world(t, Config{ResponseTimeout: time.Second}, func(t *testing.T, p *peer, client *Client) {
		_, err := client.Inspect(background, Query{})
		expectError(t, err, ErrUnavailable)
		p.send(error1("unavailable", p.expect("inspect").text("ref")))
		time.Sleep(time.Second)
		extended := start(func() (bool, error) { return true, client.ExtendID(background, 17, time.Minute) })
		p.send(error1("unknown-id", p.expect("extend").text("ref")))
		if _, err := extended(); err == nil {
			t.Fatal("the error was not reported")
		}
	})
}

func TestTheWaitToSendAndTheWaitForTheAnswerHaveOneTimeout(t *testing.T) {
	world(t, Config{ResponseTimeout: time.Second}, func(t *testing.T, p *peer, client *Client) {
		client.mu.Lock()
		client.conn.output = make([]byte, maxUnsent+1)
		client.mu.Unlock()
		time.AfterFunc(700*time.Millisecond, func() {
			client.mu.Lock()
			defer client.mu.Unlock()
			client.conn.takeOutput()
		})
		begin := time.Now()
		expectError(t, client.ExtendID(background, 17, time.Minute), ErrUnavailable)
		if passed := time.Since(begin); passed != time.Second {
			t.Fatal(passed)
		}
	})
}

func TestCloseDuringAResumptionSendsByeAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newNetwork(t, onlyServer)
		dialled := start(func() (*Client, error) {
			return Dial(background, network.config(Config{Addresses: []string{onlyServer}}))
		})
		first := <-network.servers[onlyServer]
		first.welcome()
		client, err := dialled()
		if err != nil {
			t.Fatal(err)
		}
		waits := acquire(client, "waits")
		ref := first.expect("request").text("ref")
		first.Close()
		p := <-network.servers[onlyServer]
		defer network.close(client, p)
		p.expect("hello")
		p.send(`{"command":"welcome","payload":{"protocol":1,"namespace":"genie","resumed":true,"quiet":true}}`)
		ping := p.expect("ping").text("ref")
		synctest.Wait()
		closed := start(func() (bool, error) { return true, client.Close() })
		_, err = waits()
		expectError(t, err, ErrClosed)
		synctest.Wait()
		p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, ping))
		if released := p.expect("release").text("ref"); released != ref {
			t.Fatal(released)
		}
		p.send(fmt.Sprintf(`{"command":"bye","payload":{"ref":%q}}`, p.expect("bye").text("ref")))
		_, _ = closed()
	})
}
