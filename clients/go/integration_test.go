package genie_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	mathrand "math/rand"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
	"github.com/genie-lock/genie/clients/go/internal/servers"
)

var background = context.Background()

// serve starts a server, or skips the test if there is no command for it.
func serve(t testing.TB, settings ...string) *servers.Process {
	t.Helper()
	if os.Getenv("GENIE_COMMAND") == "" {
		t.Skip("GENIE_COMMAND is not set")
	}
	server := servers.Genie(settings...)
	startProcess(t, server)
	return server
}

func startProcess(t testing.TB, p *servers.Process) {
	t.Helper()
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
}

func connect(t testing.TB, config genie.Config, addresses ...string) *genie.Client {
	t.Helper()
	config.Addresses = addresses
	if config.ResponseTimeout == 0 {
		config.ResponseTimeout = 30 * time.Second // for a slow machine, and for failovers
	}
	client, err := genie.Dial(background, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func mustAcquire(t testing.TB, client *genie.Client, resource string, opts ...genie.Option) *genie.Lock {
	t.Helper()
	lock, err := client.Acquire(background, []string{resource}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func mustRelease(t testing.TB, lock *genie.Lock) {
	t.Helper()
	if err := lock.Release(background); err != nil {
		t.Fatal(err)
	}
}

// checkNothingIsLeft waits until no lock is held and no request waits.
func checkNothingIsLeft(t testing.TB, client *genie.Client) {
	t.Helper()
	var inspection *genie.Inspection
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		var err error
		if inspection, err = client.Inspect(background, genie.Query{}); err != nil {
			t.Fatal(err)
		}
		if inspection.HoldersTotal+inspection.QueueTotal == 0 {
			return
		}
	}
	t.Fatalf("left: %+v", inspection)
}

func TestTheFirstProgramPrintsWhatTheReadmeShows(t *testing.T) {
	server := serve(t)
	command := exec.Command("go", "run", "./examples/first")
	command.Env = append(os.Environ(), "GENIE_HOST="+server.Address, "GENIE_PORT=", "GENIE_TOKEN=")
	output, err := command.CombinedOutput()
	if err != nil {
		t.Fatal(err, string(output))
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```text\n"+string(output)+"```\n") {
		t.Errorf("the README shows another output than %q", output)
	}
}

func TestAgainstAServer(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{}, server.Address)
	first := mustAcquire(t, client, "exclusive:a", genie.Transaction("t-1"), genie.Note("first"))
	_, err := client.TryAcquire(background, []string{"shared:a", "b"})
	var timeout *genie.QueueTimeoutError
	if !errors.As(err, &timeout) || timeout.Blockers[0].ID != first.ID() || timeout.Blockers[0].Note != "first" {
		t.Fatal(err)
	}
	if err := first.Extend(background, time.Minute); err != nil {
		t.Fatal(err)
	}
	inspection, err := client.Inspect(background, genie.Query{Resource: "a"})
	if err != nil || len(inspection.Holders) != 1 || inspection.Holders[0].Fence != first.Fence() ||
		inspection.Holders[0].ExpiresIn < 50*time.Second || time.Since(inspection.Holders[0].Since) > time.Minute {
		t.Fatal(inspection, err)
	}
	mustRelease(t, first)
	second := mustAcquire(t, client, "a")
	if second.Fence() <= first.Fence() {
		t.Fatal("the fence does not grow")
	}
	any, err := client.AcquireAny(background, genie.AnyOf{
		Resources: []string{"a", "b", "c", "d"}, Weights: genie.Weights(50, 20, 20, 20), Target: big.NewInt(35),
	})
	if err != nil || fmt.Sprint(any.Resources()) != "[exclusive:b exclusive:c]" {
		t.Fatal(any, err)
	}
	_, err = client.AcquireAny(background, genie.AnyOf{Resources: []string{"a", "d"}, Weights: genie.Weights(1<<62, 7), Target: big.NewInt(1 << 62)})
	var insufficient *genie.InsufficientError
	if !errors.As(err, &insufficient) || insufficient.Free.Int64() != 7 || insufficient.Locked.Int64() != 1<<62 {
		t.Fatal(err)
	}
	var rejected *genie.RejectedError
	if err := second.Extend(background, -time.Second); !errors.As(err, &rejected) || rejected.Code != "bad-request" {
		t.Fatal(err)
	}
	if _, err := client.AcquireAny(background, genie.AnyOf{Resources: []string{"d"}}); !errors.As(err, &rejected) {
		t.Fatal("no error without a target:", err)
	}
	if _, err := client.Acquire(background, []string{"mode:d"}); !errors.As(err, &rejected) {
		t.Fatal("no error for an unknown mode:", err)
	}
	if err := client.Ping(background); err != nil {
		t.Fatal(err)
	}
	short := mustAcquire(t, client, "short", genie.TransactionTimeout(50*time.Millisecond))
	<-short.Done()
	if !errors.Is(short.Err(), genie.ErrTransactionTimeout) {
		t.Fatal(short.Err())
	}
	mustRelease(t, any)
	mustRelease(t, second)
	checkNothingIsLeft(t, client)
}

func TestDeadlock(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{}, server.Address)
	mustAcquire(t, client, "a", genie.Transaction("t-1"))
	b := mustAcquire(t, client, "b", genie.Transaction("t-2"))
	waits := make(chan error, 1)
	go func() {
		_, err := client.Acquire(background, []string{"b"}, genie.Transaction("t-1"))
		waits <- err
	}()
	for queued := 0; queued == 0; {
		inspection, err := client.Inspect(background, genie.Query{Resource: "b"})
		if err != nil {
			t.Fatal(err)
		}
		queued = inspection.QueueTotal
	}
	_, err := client.Acquire(background, []string{"a"}, genie.Transaction("t-2"))
	var deadlock *genie.DeadlockError
	if !errors.As(err, &deadlock) || fmt.Sprint(deadlock.Cycle) != "[t-2 t-1]" {
		t.Fatal(err)
	}
	mustRelease(t, b)
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
}

// Two clients lock the same two names in opposite orders. The client that loses a deadlock does not lose again.
func TestTransactionsInOppositeOrders(t *testing.T) {
	server := serve(t)
	var group sync.WaitGroup
	for i := 0; i < 2; i++ {
		client := connect(t, genie.Config{}, server.Address)
		names := [2][]string{{"s/2", "s/13"}, {"s/13", "s/2"}}[i]
		group.Add(1)
		go func() {
			defer group.Done()
			deadlocks := 0
			for n := 0; n < 15; n++ {
				attempts := 0
				err := client.Transaction(background, func(ctx context.Context, tx *genie.Tx) error {
					if attempts++; attempts > 1 {
						deadlocks++
					}
					for _, name := range names {
						if _, err := tx.Lock(ctx, name); err != nil {
							return err
						}
						time.Sleep(20 * time.Millisecond)
					}
					return nil
				})
				if err != nil || attempts > 2 {
					t.Error(err, attempts)
				}
			}
			t.Log("deadlocks:", deadlocks)
		}()
	}
	group.Wait()
}

func TestTheLeaderOfAnElection(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{Defaults: []genie.Option{genie.Note("candidate 1")}}, server.Address)
	if leader, err := client.Leader(background, "leader/a"); leader != nil || err != nil {
		t.Fatal(leader, err)
	}
	err := client.Elect(background, "leader/a", func(ctx context.Context, lock *genie.Lock) error {
		leader, err := client.Leader(ctx, "leader/a")
		if err == nil && (leader == nil || leader.ID != lock.ID() || leader.Note != "candidate 1" || leader.Fence != lock.Fence()) {
			return fmt.Errorf("the leader is %v", leader)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Another client takes over a lock by its id.
func TestALockIsHandedOver(t *testing.T) {
	server := serve(t)
	first, second := connect(t, genie.Config{}, server.Address), connect(t, genie.Config{}, server.Address)
	lock := mustAcquire(t, first, "a", genie.TransactionTimeout(30*time.Second))
	id, err := lock.Detach()
	if err != nil {
		t.Fatal(err)
	}
	if err := second.ExtendID(background, id, time.Hour); err != nil {
		t.Fatal(err)
	}
	first.Close()
	inspection, err := second.Inspect(background, genie.Query{ID: id})
	if err != nil || len(inspection.Holders) != 1 || inspection.Holders[0].ExpiresIn < 50*time.Minute {
		t.Fatal(inspection, err)
	}
	if err := second.ReleaseID(background, id); err != nil {
		t.Fatal(err)
	}
	checkNothingIsLeft(t, second)
}

func TestWatchdogOfAServer(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{}, server.Address)
	lock := mustAcquire(t, client, "a", genie.Watchdog(), genie.TransactionTimeout(200*time.Millisecond))
	select {
	case <-lock.Done():
		t.Fatal(lock.Err())
	case <-time.After(time.Second):
	}
	mustRelease(t, lock)
}

func TestMemoryServerRestarts(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{}, server.Address)
	lock := mustAcquire(t, client, "a")
	waits := make(chan error, 1)
	go func() {
		lock, err := client.Acquire(background, []string{"a"})
		if err == nil {
			err = lock.Release(background)
		}
		waits <- err
	}()
	server.Kill()
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	<-lock.Done()
	if !errors.Is(lock.Err(), genie.ErrLockLost) {
		t.Fatal(lock.Err())
	}
	if err := <-waits; err != nil { // the request was queued again
		t.Fatal(err)
	}
	checkNothingIsLeft(t, client)
}

func TestLeaderIsKilled(t *testing.T) {
	redis := servers.Redis(t.TempDir())
	if os.Getenv("GENIE_COMMAND") != "" {
		startProcess(t, redis)
	}
	leader := serve(t, redis.WithRedis(), "GENIE_LEASE=1")
	follower := serve(t, redis.WithRedis(), "GENIE_LEASE=1")
	client := connect(t, genie.Config{}, follower.Address, leader.Address)
	kept := mustAcquire(t, client, "kept", genie.TransactionTimeout(time.Minute))
	other := connect(t, genie.Config{}, leader.Address, follower.Address)
	waits := make(chan error, 1)
	go func() {
		lock, err := other.Acquire(background, []string{"kept"}, genie.QueueTimeout(time.Minute))
		if err == nil && lock.Fence() <= kept.Fence() {
			err = errors.New("the fence does not grow")
		}
		waits <- err
	}()
	watch, err := other.Watch("")
	if err != nil {
		t.Fatal(err)
	}
	if change, err := watch.Next(background); err != nil || change.State != "resync" || change.Truncated {
		t.Fatal(change, err)
	}
	if change, err := watch.Next(background); err != nil || change.ID != kept.ID() {
		t.Fatal(change, err)
	}
	leader.Kill()
	if err := kept.Extend(background, time.Minute); err != nil { // executed by the new leader
		t.Fatal(err)
	}
	mustRelease(t, kept)
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
	for last := (genie.Change{}); last.State != "locked" || last.ID == kept.ID(); {
		if last, err = watch.Next(background); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTokensAndNamespaces(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret-of-the-test\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := serve(t, "GENIE_TOKEN=secret-of-the-test", "GENIE_NAMESPACES=orders,billing")
	_, err := genie.Dial(background, genie.Config{Addresses: []string{server.Address}, Token: "another"})
	var rejected *genie.RejectedError
	if !errors.As(err, &rejected) || rejected.Code != "unauthorized" {
		t.Fatal(err)
	}
	t.Setenv("GENIE_TOKEN_FILE", file)
	_, err = genie.Dial(background, genie.Config{Addresses: []string{server.Address}, Namespace: "none"})
	if !errors.As(err, &rejected) || rejected.Code != "unknown-namespace" {
		t.Fatal(err)
	}
	mustAcquire(t, connect(t, genie.Config{}, server.Address), "a")
	mustAcquire(t, connect(t, genie.Config{Namespace: "billing"}, server.Address), "a")
}

func TestTLS(t *testing.T) {
	ca, pair := certificate(t)
	server := serve(t, "GENIE_TLS_CERT="+pair)
	if _, err := genie.Dial(background, genie.Config{Addresses: []string{"genies://" + server.Address}}); err == nil {
		t.Fatal("an unknown certificate is accepted")
	}
	t.Setenv("GENIE_TLS_CA", ca)
	client := connect(t, genie.Config{}, "genies://"+server.Address)
	var group sync.WaitGroup
	for i := 0; i < 16; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := 0; i < 20; i++ {
				if err := client.Do(background, []string{"a"}, func(context.Context, *genie.Lock) error { return nil }); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	group.Wait()
	checkNothingIsLeft(t, client)
}

// The files of the certificates are read for each connection.
func TestCertificatesAreRotated(t *testing.T) {
	oldCA, _ := certificate(t)
	ca, pair := certificate(t)
	server := serve(t, "GENIE_TLS_CERT="+pair)
	t.Setenv("GENIE_TLS_CA", oldCA)
	client := connect(t, genie.Config{Lazy: true, ResponseTimeout: 200 * time.Millisecond}, "genies://"+server.Address)
	var unknown x509.UnknownAuthorityError
	if err := client.Ping(background); !errors.Is(err, genie.ErrUnavailable) || !errors.As(err, &unknown) {
		t.Fatal(err)
	}
	text, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(oldCA, text, 0o600); err != nil {
		t.Fatal(err)
	}
	lock := mustAcquire(t, client, "a")
	mustRelease(t, lock)
}

// certificate makes a certificate of 127.0.0.1; it returns the file of the CA and that of the certificate with its key.
func certificate(t testing.TB) (ca, pair string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "genie"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	ca, pair = filepath.Join(t.TempDir(), "ca.pem"), filepath.Join(t.TempDir(), "pair.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(ca, text, 0o600); err != nil {
		t.Fatal(err)
	}
	text = append(text, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})...)
	if err := os.WriteFile(pair, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return ca, pair
}

// A server that is stopped (SIGSTOP) keeps its connections open, and answers nothing.
func TestAStoppedServer(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{ResponseTimeout: 100 * time.Millisecond}, server.Address)
	lock := mustAcquire(t, client, "a", genie.TransactionTimeout(time.Minute))
	if err := server.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := lock.Release(background); !errors.Is(err, genie.ErrUnavailable) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(background, 10*time.Millisecond)
	defer cancel()
	if _, err := client.Acquire(ctx, []string{"a"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if err := server.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for { // the client releases the lock in the background
		lock, err := client.Acquire(background, []string{"a"})
		if err == nil {
			mustRelease(t, lock)
			break
		}
		if !errors.Is(err, genie.ErrUnavailable) {
			t.Fatal(err)
		}
	}
}

// cutter forwards connections to a server, and cuts one of them after a number of bytes.
type cutter struct {
	net.Listener
	server  string
	toCut   atomic.Int64 // bytes in both directions after which the next connection is cut; 0: never
	current atomic.Value // net.Conn
	cuts    atomic.Int64
	delay   time.Duration
}

// cut ends the present connection, and the next one after a number of bytes.
func (c *cutter) cut(bytes int64) {
	c.toCut.Store(bytes)
	c.current.Load().(net.Conn).Close()
}

func newCutter(t testing.TB, server string) *cutter {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	c := &cutter{Listener: listener, server: server}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go c.forward(client)
		}
	}()
	return c
}

func (c *cutter) forward(client net.Conn) {
	server, err := net.Dial("tcp", c.server)
	if err != nil {
		client.Close()
		return
	}
	c.current.Store(client)
	left := c.toCut.Swap(0)
	unlimited := left == 0
	pipe := func(from, to net.Conn) {
		defer from.Close()
		defer to.Close()
		buffer := make([]byte, 4096)
		for {
			n, err := from.Read(buffer)
			if !unlimited {
				allowed := atomic.AddInt64(&left, int64(-n)) + int64(n)
				if allowed < int64(n) {
					n, err = int(max(allowed, 0)), errors.New("cut")
					c.cuts.Add(1)
				}
			}
			time.Sleep(c.delay)
			if _, writeErr := to.Write(buffer[:n]); err != nil || writeErr != nil {
				return
			}
		}
	}
	go pipe(client, server)
	pipe(server, client)
}

// The connection is cut after every byte of the handshake and of a whole life of a lock; each time, the client resumes.
func TestConnectionsAreCutAfterEveryByte(t *testing.T) {
	server := serve(t)
	direct := connect(t, genie.Config{}, server.Address)
	const last, workers = 1300, 16
	var next, cuts atomic.Int64
	var group sync.WaitGroup
	for worker := 0; worker < workers; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			proxy := newCutter(t, server.Address)
			client := connect(t, genie.Config{}, proxy.Addr().String())
			for n := next.Add(1); n < last; n = next.Add(1) {
				proxy.cut(n)
				resource := []string{fmt.Sprint("worker/", worker)}
				err := client.Do(background, resource, func(ctx context.Context, lock *genie.Lock) error {
					if err := lock.Extend(ctx, 20*time.Second); err != nil {
						return err
					}
					_, err := client.Inspect(ctx, genie.Query{ID: lock.ID()})
					return err
				})
				if err != nil {
					t.Errorf("cut after %d bytes: %v", n, err)
				}
			}
			client.Close()
			cuts.Add(proxy.cuts.Load())
		}(worker)
	}
	group.Wait()
	if cuts.Load() < last/2 {
		t.Error("cuts:", cuts.Load())
	}
	t.Log("cuts:", cuts.Load())
	checkNothingIsLeft(t, direct)
}

// Calls are cancelled at random times; nothing is left.
func TestCallsAreCancelledAtAnyTime(t *testing.T) {
	server := serve(t)
	direct := connect(t, genie.Config{}, server.Address)
	proxy := newCutter(t, server.Address)
	proxy.delay = time.Millisecond
	client := connect(t, genie.Config{}, proxy.Addr().String())
	var group sync.WaitGroup
	var granted atomic.Int64
	for worker := 0; worker < 16; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			for i := 0; i < 100; i++ {
				ctx, cancel := context.WithTimeout(background, time.Duration(mathrand.Intn(30_000))*time.Microsecond)
				err := client.Do(ctx, []string{fmt.Sprint(worker % 4)}, func(ctx context.Context, lock *genie.Lock) error {
					granted.Add(1)
					return lock.Extend(ctx, time.Minute)
				})
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				cancel()
			}
		}(worker)
	}
	group.Wait()
	if granted.Load() == 0 {
		t.Error("no lock was granted")
	}
	checkNothingIsLeft(t, direct)
}

// Clients are closed at random times, also while they reconnect; every call returns, and nothing is left.
func TestClientsAreClosedAtAnyTime(t *testing.T) {
	server := serve(t)
	direct := connect(t, genie.Config{}, server.Address)
	var clients sync.WaitGroup
	for worker := 0; worker < 8; worker++ {
		clients.Add(1)
		go func() {
			defer clients.Done()
			proxy := newCutter(t, server.Address)
			for i := 0; i < 25; i++ {
				proxy.toCut.Store(0) // the first connection is made
				client, err := genie.Dial(background, genie.Config{Addresses: []string{proxy.Addr().String()}})
				if err != nil {
					t.Error(err)
					return
				}
				var calls sync.WaitGroup
				for call := 0; call < 4; call++ {
					calls.Add(1)
					go func(call int) {
						defer calls.Done()
						for {
							resources := []string{fmt.Sprint("closed/", call%2)}
							lock, err := client.Acquire(background, resources, genie.ReleaseOnDisconnect())
							if err == nil {
								err = lock.Release(background)
							}
							if errors.Is(err, genie.ErrClosed) {
								return
							} else if err != nil {
								t.Error(err)
							}
						}
					}(call)
				}
				time.Sleep(time.Duration(mathrand.Intn(20)) * time.Millisecond)
				if i%2 == 0 {
					proxy.cut(int64(mathrand.Intn(1000)))
					time.Sleep(time.Duration(mathrand.Intn(100)) * time.Millisecond)
				}
				client.Close()
				calls.Wait()
			}
		}()
	}
	clients.Wait()
	checkNothingIsLeft(t, direct)
}

// The server's side of a connection is reset, and the client's side stays silent. When the server gives the lock to another
// client, this client no longer believes in it.
func TestAHalfOpenConnection(t *testing.T) {
	server := serve(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	served := make(chan *net.TCPConn, 1)
	go func() {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		listener.Close() // there is no second connection
		forwarded, err := net.Dial("tcp", server.Address)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { client.Close() })
		go io.Copy(forwarded, client)
		go io.Copy(client, forwarded)
		served <- forwarded.(*net.TCPConn)
	}()
	config := genie.Config{SessionTimeout: 500 * time.Millisecond, ResponseTimeout: 100 * time.Millisecond}
	half := connect(t, config, listener.Addr().String())
	direct := connect(t, genie.Config{}, server.Address)
	lock := mustAcquire(t, half, "a", genie.ReleaseOnDisconnect(), genie.TransactionTimeout(time.Hour))
	time.Sleep(time.Second) // the session is kept alive
	if lock.Err() != nil {
		t.Fatal(lock.Err())
	}
	connection := <-served
	_ = connection.SetLinger(0)
	connection.Close()
	other := mustAcquire(t, direct, "a", genie.QueueTimeout(time.Minute))
	if !errors.Is(lock.Err(), genie.ErrLockLost) {
		t.Fatal("two clients believe in one lock")
	}
	mustRelease(t, other)
}

// The next candidate leads when the leader ends or loses its lock.
func TestElection(t *testing.T) {
	server := serve(t)
	client := connect(t, genie.Config{}, server.Address)
	first, elected := make(chan *genie.Lock), make(chan error, 1)
	go func() {
		elected <- client.Elect(background, "leader/a", func(ctx context.Context, lock *genie.Lock) error {
			first <- lock
			<-ctx.Done()
			return ctx.Err()
		}, genie.TransactionTimeout(200*time.Millisecond))
	}()
	lock := <-first
	time.Sleep(500 * time.Millisecond) // longer than its transaction timeout: the client extends it
	if lock.Err() != nil {
		t.Fatal(lock.Err())
	}
	second := make(chan error, 1)
	go func() {
		second <- client.Elect(background, "leader/a", func(_ context.Context, next *genie.Lock) error {
			if next.Fence() <= lock.Fence() {
				return errors.New("the fence does not grow")
			}
			return nil
		})
	}()
	if _, err := releaseID(server.Address, lock.ID()); err != nil {
		t.Fatal(err)
	}
	if err := <-elected; !errors.Is(err, genie.ErrLockLost) {
		t.Fatal(err)
	}
	if err := <-second; err != nil {
		t.Fatal(err)
	}
	checkNothingIsLeft(t, client)
}

// releaseID releases a lock as another client.
func releaseID(address string, id int64) (string, error) {
	connection, err := net.Dial("tcp", address)
	if err != nil {
		return "", err
	}
	defer connection.Close()
	fmt.Fprintf(connection, `{"command":"release","payload":{"id":%d}}`+"\n", id)
	return bufio.NewReader(connection).ReadString('\n')
}

// Many goroutines and clients increment a counter that only the lock protects.
func TestMutualExclusion(t *testing.T) {
	server := serve(t)
	var group sync.WaitGroup
	counter, lastFence := 0, int64(0)
	for i := 0; i < 3; i++ {
		client := connect(t, genie.Config{}, server.Address)
		for j := 0; j < 10; j++ {
			group.Add(1)
			go func() {
				defer group.Done()
				for k := 0; k < 20; k++ {
					err := client.Do(background, []string{"counter"}, func(_ context.Context, lock *genie.Lock) error {
						counter++
						if lock.Fence() <= lastFence {
							t.Error("the fence does not grow")
						}
						lastFence = lock.Fence()
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			}()
		}
	}
	group.Wait()
	if counter != 600 {
		t.Fatal(counter)
	}
}
